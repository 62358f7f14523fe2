"""SpecForge: the terms of one slice of draft blocks."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_ext.integrations.patching import Integration, Target
from dspark_ext.loss import _compute_accept_rate_3d
from dspark_ext.rowwise import ce_and_l1, token_log_prob


def objective_chunk_terms(
    self: Any,
    hidden: Tensor,
    prev_token_ids: Tensor,
    target_ids: Tensor,
    loss_weights: Tensor,
    eval_mask: Tensor,
    aligned_target_hidden: Optional[Tensor],
) -> tuple[Tensor, ...]:
    """The method of ``OnlineDSparkModel``: additive terms of ``[B, A, K]`` positions, fourteen of
    them in the order in which the trainer unpacks them.

    The heads are the trainer's own. Positions outside ``eval_mask`` have weight 0 in every term,
    so that their logits need not be read.
    """
    head, draft_model = self.lm_head, self.draft_model
    draft = draft_model.apply_logits_head(
        _logits(head, hidden), prev_token_ids=prev_token_ids, hidden_states=hidden
    )
    target = accept = None
    if aligned_target_hidden is None:
        ce = -token_log_prob(draft, target_ids, active=eval_mask)
    else:
        with torch.no_grad():
            target = _logits(head, aligned_target_hidden)
        ce, l1 = ce_and_l1(draft, target, target_ids, active=eval_mask)
        accept = _compute_accept_rate_3d(l1_dist_per_token=l1.detach())

    ce_num = (ce * loss_weights).sum()
    l1_num = confidence_num = confidence_error_num = ce_num.new_zeros(())
    if target is not None and self.dspark_l1_loss_alpha > 0:
        l1_num = (l1 * loss_weights).sum()

    confidence = draft_model.predict_confidence(hidden, prev_token_ids=prev_token_ids)
    if confidence is not None and self.dspark_confidence_head_alpha > 0:
        if accept is None:
            raise ValueError("DSpark confidence loss requires target_last_hidden_states")
        confidence = confidence.float()
        bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
        confidence_num = (bce * loss_weights).sum()
        error = (confidence.detach().sigmoid() - accept).abs()
        confidence_error_num = (error * loss_weights).sum()

    with torch.no_grad():
        mask = eval_mask.float()
        drafted = draft.argmax(dim=-1)
        correct = (drafted == target_ids) * mask
        telemetry = [
            correct.sum(),
            mask.sum(),
            (ce * mask).sum(dim=(0, 1)),
            correct.sum(dim=(0, 1)),
            mask.sum(dim=(0, 1)),
            *_target_telemetry(draft, drafted, target, accept, eval_mask, mask),
        ]
    return (ce_num, l1_num, confidence_num, confidence_error_num, *telemetry)


def _logits(head: Any, hidden: Tensor) -> Tensor:
    """The language model head's logits; it sees ``[B, A * K, H]``, as in the original."""
    return head(hidden.flatten(1, 2)).unflatten(1, hidden.shape[1:3])


def _target_telemetry(
    draft: Tensor,
    drafted: Tensor,
    target: Optional[Tensor],
    accept: Optional[Tensor],
    eval_mask: Tensor,
    mask: Tensor,
) -> tuple[Tensor, ...]:
    """How often draft and target agree, the probability of each one's favourite, and tau's sums;
    zeros without a target."""
    if target is None or accept is None:
        return tuple(mask.new_zeros(()) for _ in range(5))
    favourite = target.argmax(dim=-1)
    valid = eval_mask.any(dim=-1).float()
    length = 1 + (accept * mask).cumprod(dim=-1).sum(dim=-1)
    return (
        ((drafted == favourite) * mask).sum(),
        (token_log_prob(target, favourite, active=eval_mask).exp() * mask).sum(),
        (token_log_prob(draft, drafted, active=eval_mask).exp() * mask).sum(),
        (length * valid).sum(),
        valid.sum(),
    )


INTEGRATION = Integration(
    name="specforge",
    distribution="specforge",
    package="specforge",
    versions=("0.2.0",),
    layouts=(
        (
            Target(
                module="specforge.algorithms.common.dflash_family_model",
                attribute="OnlineDSparkModel._dspark_objective_chunk_terms",
                signature=(
                    "(self, hidden, prev_token_ids, target_ids, loss_weights, eval_mask, "
                    "aligned_target_hidden)"
                ),
                make=lambda original: objective_chunk_terms,
            ),
        ),
    ),
)
