"""NeMo AutoModel: the objective as a whole."""

from __future__ import annotations

from dspark_ext.integrations.patching import Integration, Target
from dspark_ext.loss import compute_dspark_loss

INTEGRATION = Integration(
    name="nemo_automodel",
    distribution="nemo-automodel",
    package="nemo_automodel",
    versions=("0.7.0",),
    layouts=(
        (
            Target(
                module="nemo_automodel.components.speculative.dspark.loss",
                attribute="compute_dspark_loss",
                signature=(
                    "(*, outputs, loss_decay_gamma, ce_loss_alpha, l1_loss_alpha, "
                    "confidence_head_alpha, return_terms=False)"
                ),
                make=lambda original: compute_dspark_loss,
            ),
        ),
    ),
)
