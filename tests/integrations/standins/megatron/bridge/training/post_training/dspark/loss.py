"""Stands in for the DSpark loss of Megatron Bridge's source repository, which no release has."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor


def _ce_and_l1_per_token(
    draft_logits: Tensor,
    target_ids: Tensor,
    target_logits: Optional[Tensor],
    chunk_tokens: int = 128,
) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(draft_logits, dim=-1, dtype=torch.float32)
    ce = -log_p.gather(-1, target_ids.long().unsqueeze(-1)).squeeze(-1)
    if target_logits is None:
        return ce, torch.zeros_like(ce)
    q = torch.softmax(target_logits, dim=-1, dtype=torch.float32)
    return ce, (log_p.exp() - q).abs().sum(-1)


def dspark_loss(outputs: Any, *, l1_alpha: float = 0.9, chunk_tokens: int = 128) -> Tensor:
    """The weighted sum of both terms over the supervised positions, not normalised."""
    target = outputs.aligned_target_logits if l1_alpha > 0 else None
    ce, l1 = _ce_and_l1_per_token(outputs.draft_logits, outputs.target_ids, target, chunk_tokens)
    return ((0.1 * ce + l1_alpha * l1) * outputs.eval_mask).sum()
