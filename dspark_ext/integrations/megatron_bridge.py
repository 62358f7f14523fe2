"""Megatron Bridge: both of a row's losses, in one visit to its logits."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from dspark_ext.integrations.patching import Integration, Target
from dspark_ext.rowwise import ce_and_l1, token_log_prob


def ce_and_l1_per_token(
    draft_logits: Tensor,
    target_ids: Tensor,
    target_logits: Optional[Tensor],
    chunk_tokens: int = 128,
) -> tuple[Tensor, Tensor]:
    """``(ce, l1)`` of every row in float32, with an ``l1`` of zeros where there is no target.

    ``chunk_tokens`` bounds the original's memory; nothing of that size is allocated here.
    """
    if target_logits is None:
        ce = -token_log_prob(draft_logits, target_ids).float()
        return ce, torch.zeros_like(ce)
    ce, l1 = ce_and_l1(draft_logits, target_logits, target_ids)
    return ce.float(), l1.float()


INTEGRATION = Integration(
    name="megatron_bridge",
    distribution="megatron-bridge",
    package="megatron.bridge",
    versions=(),
    layouts=(
        (
            Target(
                module="megatron.bridge.training.post_training.dspark.loss",
                attribute="_ce_and_l1_per_token",
                signature="(draft_logits, target_ids, target_logits, chunk_tokens=128)",
                make=lambda original: ce_and_l1_per_token,
            ),
        ),
    ),
)
