"""speculators: the cross-entropy and the total variation among its fused losses.

Each fused loss asks one function for its Triton kernel by name, at every call. Replacing that
function reaches every place that holds a loss: configurations that were resolved before, default
arguments, re-exports. It also gives the fused losses to machines without Triton.
"""

from __future__ import annotations

from torch import Tensor

from dspark_ext.integrations.patching import Function, Integration, Target
from dspark_ext.rowwise import l1_distance, token_log_prob


def ce_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy against the target's most likely token, per position, in float32."""
    return -token_log_prob(logits, targets.argmax(dim=-1)).float()


def tv_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Total variation, half of the L1, per position, in float32."""
    return l1_distance(logits, targets).float() / 2


_LOSSES = {"fused_ce_loss": ce_loss, "fused_tv_loss": tv_loss}


def _kernel_lookup(original: Function) -> Function:
    def fused_kernel(name: str) -> Function:
        return _LOSSES[name] if name in _LOSSES else original(name)

    return fused_kernel


INTEGRATION = Integration(
    name="speculators",
    distribution="speculators",
    package="speculators",
    versions=("0.9.0",),
    layouts=(
        (
            Target(
                module="speculators.losses.utils",
                attribute="_fused_kernel",
                signature="(name)",
                make=_kernel_lookup,
            ),
        ),
    ),
)
