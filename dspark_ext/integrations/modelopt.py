"""NVIDIA Model Optimizer: the distance of the draft's and the target's distributions."""

from __future__ import annotations

from torch import Tensor

from dspark_ext.integrations.patching import Integration, Target
from dspark_ext.rowwise import l1_distance


def tvd_per_token(final_logits: Tensor, teacher_logits: Tensor, chunk_size: int = 1024) -> Tensor:
    """The raw L1 of every row in float32, which the trainer calls total variation.

    ``chunk_size`` bounds the original's memory; nothing of that size is allocated here.
    """
    return l1_distance(final_logits, teacher_logits).float()


INTEGRATION = Integration(
    name="modelopt",
    distribution="nvidia-modelopt",
    package="modelopt",
    versions=("0.47.0",),
    layouts=(
        (
            Target(
                module="modelopt.torch.speculative.plugins.hf_dspark",
                attribute="_tvd_per_token",
                signature="(final_logits, teacher_logits, chunk_size=1024)",
                make=lambda original: tvd_per_token,
            ),
        ),
    ),
)
