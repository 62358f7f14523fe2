"""verl-SpeCo: the L1 term, and in the source repository its two fused losses.

The release computes the L1 in a method of its training model and the cross-entropy in the middle
of ``forward``, where nothing can be replaced. The source repository, under the same version, has
moved both into functions of their own, which it uses on accelerators.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_ext.integrations.patching import Integration, Target
from dspark_ext.rowwise import l1_distance, token_log_prob


def l1_loss_for_active(
    self: Any,
    *,
    active_hidden: Tensor,
    active_prev_tokens: Tensor,
    active_target_hidden: Tensor,
    active_weights: Tensor,
    lm_head_weight: Tensor,
    active_draft_log_probs: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """The method of ``DSparkTrainingModel``: ``(sum(w * l1), sum(w))`` of ``[N]`` active rows.

    Log-probabilities serve as logits: their softmax is the distribution they stand for, and the
    gradient passes through the log-softmax that made them unchanged, since it sums to zero.
    ``l1_chunk_size`` rows at a time go through the language model head, as in the original.
    """
    rows = active_hidden.shape[0]
    if active_hidden.numel() == 0:
        zero = active_weights.new_zeros(())
        return zero, zero
    expected = (rows, lm_head_weight.shape[0])
    if active_draft_log_probs is not None and tuple(active_draft_log_probs.shape) != expected:
        raise ValueError(
            f"DSpark precomputed draft log probabilities must have shape {expected}, got "
            f"{tuple(active_draft_log_probs.shape)}"
        )
    weights = active_weights.float()
    l1_sum = weights.new_zeros(())
    chunk_rows = self.l1_chunk_size if self.l1_chunk_size > 0 else rows
    for begin in range(0, rows, chunk_rows):
        chunk = slice(begin, begin + chunk_rows)
        if active_draft_log_probs is not None:
            draft = active_draft_log_probs[chunk]
        else:
            draft = F.linear(active_hidden[chunk], lm_head_weight)
            bias = self._markov_bias_for_active(
                active_hidden=active_hidden[chunk],
                active_prev_tokens=active_prev_tokens[chunk],
                restricted_vocab=None,
            )
            draft = draft if bias is None else draft + bias
        with torch.no_grad():
            target = F.linear(active_target_hidden[chunk], lm_head_weight)
        l1_sum = l1_sum + (l1_distance(draft, target).float() * weights[chunk]).sum()
    return l1_sum, weights.sum()


def label_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of ``[N]`` labels in float32."""
    return -token_log_prob(logits, labels).float()


def total_variation(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Total variation of ``[N]`` rows, half of the L1, in float32."""
    return l1_distance(draft_logits, target_logits).float() / 2


_FUSED = "verl_speco.ops.dspark_fused_loss"

INTEGRATION = Integration(
    name="verl_speco",
    distribution="verl-speco",
    package="verl_speco",
    versions=("0.1.0",),
    layouts=(
        (
            Target(
                module=_FUSED,
                attribute="fused_label_cross_entropy",
                signature="(logits, labels)",
                make=lambda original: label_cross_entropy,
            ),
            Target(
                module=_FUSED,
                attribute="fused_total_variation",
                signature="(draft_logits, target_logits)",
                make=lambda original: total_variation,
            ),
        ),
        (
            Target(
                module="verl_speco.backends.dspark_trainer_backend",
                attribute="DSparkTrainingModel._compute_l1_loss_for_active",
                signature=(
                    "(self, *, active_hidden, active_prev_tokens, active_target_hidden, "
                    "active_weights, lm_head_weight, active_draft_log_probs=None)"
                ),
                make=lambda original: l1_loss_for_active,
            ),
        ),
    ),
)
