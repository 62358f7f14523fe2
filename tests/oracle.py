"""The objective in plain float64, written from its definition and from nothing of the package.

One row at a time, with Python loops wherever the definition has an index: slow, and readable
next to the formulas. Probabilities are ``exp(x_j - m) / Z``; differences that vanish in a
confident row (``p_y - 1``, ``1 - S``) are formed from the columns they consist of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

IGNORE_INDEX = -100
EPSILON = 1e-6


class Softmax(NamedTuple):
    """One row: its logits, their maximum and its multiplicity, the other exponentials, p."""

    x: Tensor
    m: float
    c: float
    t: float
    p: Tensor

    @property
    def z(self) -> float:
        return self.c + self.t


def softmax(row: Tensor) -> Softmax:
    """NaN throughout where the maximum is not finite: no logit is, or one is inf or NaN."""
    x = row.double()
    m = x.max()
    if not m.isfinite():
        return Softmax(x, math.nan, math.nan, math.nan, torch.full_like(x, math.nan))
    e = torch.exp(x - m)
    others = torch.where(x == m, torch.zeros_like(e), e)
    c, t = float((x == m).sum()), float(others.sum())
    return Softmax(x, float(m), c, t, e / (c + t))


def cross_entropy(row: Softmax, label: int) -> float:
    """``log(Z) - (x_y - m)``, 0 for an ignored label."""
    if label == IGNORE_INDEX:
        return 0.0
    return math.log1p(row.c - 1 + row.t) - (float(row.x[label]) - row.m)


def cross_entropy_gradient(row: Softmax, label: int) -> Tensor:
    """``p_j - [j = y]``, zeros for an ignored label."""
    if label == IGNORE_INDEX:
        return torch.zeros_like(row.p)
    gradient = row.p.clone()
    at_maximum = float(row.x[label]) == row.m
    gradient[label] = -(row.c - 1 + row.t) / row.z if at_maximum else row.p[label] - 1
    return gradient


def l1_distance(draft: Softmax, target: Softmax) -> float:
    return float((draft.p - target.p).abs().sum())


class SignedMass(NamedTuple):
    """Draft probability where p is above, below and equal to q."""

    above: float
    below: float
    tie: float

    @property
    def s(self) -> float:
        return self.above - self.below


def signed_mass(draft: Softmax, target: Softmax) -> SignedMass:
    p, q = draft.p, target.p
    return SignedMass(*(float(p[where].sum()) for where in (p > q, p < q, p == q)))


def l1_gradient(draft: Softmax, target: Softmax) -> Tensor:
    """``p_j (s_j - S)`` with ``1 - S = 2 below + tie`` and ``1 + S = 2 above + tie``."""
    p, q = draft.p, target.p
    mass = signed_mass(draft, target)
    slope = torch.full_like(p, -mass.s)
    slope[p > q] = 2 * mass.below + mass.tie
    slope[p < q] = -(2 * mass.above + mass.tie)
    return p * slope


def unresolved(draft: Softmax, target: Softmax, epsilon: float = 2.0**-23) -> Tensor:
    """Columns where ``p - q`` is within the rounding of arithmetic with this epsilon.

    A difference of logits carries a relative error of ``epsilon / 2``, which its exponential
    turns into ``|x_j - m| * epsilon / 2``; exponential, sum and product add a few more.
    """
    spread = (draft.m - draft.x) + (target.m - target.x)
    return (draft.p - target.p).abs() <= epsilon * (8 + spread) * torch.maximum(draft.p, target.p)


@dataclass
class Objective:
    """What ``compute_dspark_loss`` must give: the differentiated loss, its gradients, terms."""

    loss: float
    draft_gradient: Tensor
    confidence_gradient: Optional[Tensor]
    terms: dict[str, Any]


def weights(eval_mask: Tensor, gamma: Optional[float]) -> Tensor:
    decay = [
        math.exp(-k / gamma) if gamma is not None and gamma > 0 else 1.0
        for k in range(eval_mask.shape[-1])
    ]
    return eval_mask.double() * torch.tensor(decay, dtype=torch.float64)


def objective(
    outputs: Any,
    *,
    loss_decay_gamma: Optional[float],
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
    world_size: int = 1,
    denominator: Optional[float] = None,
) -> Objective:
    """The objective of one rank; ``denominator`` is the group's, by default this rank's own."""
    x, t = outputs.draft_logits.detach(), outputs.aligned_target_logits
    z = None if outputs.confidence_pred is None else outputs.confidence_pred.detach()
    blocks, K = outputs.eval_mask.shape[:-1], outputs.eval_mask.shape[-1]
    positions = [(b, a, k) for b in range(blocks[0]) for a in range(blocks[1]) for k in range(K)]
    w = weights(outputs.eval_mask, loss_decay_gamma)
    den = float(w.sum())
    group_den = den if denominator is None else denominator
    wants_l1 = l1_loss_alpha > 0
    has_l1 = t is not None and (wants_l1 or z is not None)

    def factor(alpha: float) -> float:
        return world_size * alpha / (group_den + EPSILON) if group_den > 0 else 0.0

    draft_gradient = torch.zeros(x.shape, dtype=torch.float64)
    confidence_gradient = None if z is None else torch.zeros(z.shape, dtype=torch.float64)
    accept = torch.zeros(outputs.eval_mask.shape, dtype=torch.float64)
    sigmoid = torch.zeros_like(accept)
    ce_num = l1_num = confidence_num = 0.0
    for i in positions:
        if not outputs.eval_mask[i]:
            continue
        label, weight, draft = int(outputs.target_ids[i]), float(w[i]), softmax(x[i])
        ce_num += weight * cross_entropy(draft, label)
        draft_gradient[i] += weight * factor(ce_loss_alpha) * cross_entropy_gradient(draft, label)
        if has_l1:
            target = softmax(t[i])
            distance = l1_distance(draft, target)
            accept[i] = min(max(1 - distance / 2, 0.0), 1.0)
        if wants_l1:
            l1_num += weight * distance
            draft_gradient[i] += weight * factor(l1_loss_alpha) * l1_gradient(draft, target)
        if z is not None:
            logit, goal = float(z[i]), float(accept[i])
            bce = max(logit, 0) - logit * goal + math.log1p(math.exp(-abs(logit)))
            confidence_num += weight * bce
            sigmoid[i] = torch.sigmoid(torch.tensor(logit, dtype=torch.float64))
            confidence_gradient[i] = (
                weight * factor(confidence_head_alpha) * (float(sigmoid[i]) - goal)
            )

    terms = _diagnostics(outputs, accept if has_l1 else None, sigmoid, w)
    l1_den = den if wants_l1 else 0.0
    confidence_den = den if z is not None else 0.0
    ce_loss = ce_num / (den + EPSILON)
    l1_loss = l1_num / (l1_den + EPSILON)
    confidence_loss = confidence_num / (confidence_den + EPSILON)
    terms.update(
        ce_loss=ce_loss,
        l1_loss=l1_loss,
        confidence_loss=confidence_loss,
        ce_loss_den=den,
        l1_loss_den=l1_den,
        confidence_loss_den=confidence_den,
        loss=ce_loss_alpha * ce_loss
        + l1_loss_alpha * l1_loss
        + confidence_head_alpha * confidence_loss,
    )
    loss = (
        factor(ce_loss_alpha) * ce_num
        + factor(l1_loss_alpha) * l1_num
        + factor(confidence_head_alpha) * confidence_num
    )
    return Objective(loss, draft_gradient, confidence_gradient, terms)


def _diagnostics(
    outputs: Any, accept: Optional[Tensor], sigmoid: Tensor, w: Tensor
) -> dict[str, Any]:
    B, A, K = outputs.eval_mask.shape
    mask = outputs.eval_mask.double()
    per_position_num, per_position_den = [0.0] * K, [0.0] * K
    tau_num = tau_den = abs_error = bias = cumprod_bias = diag_den = 0.0
    for b in range(B):
        for a in range(A):
            reached, claimed, length = 1.0, 1.0, 1.0
            for k in range(K):
                i = (b, a, k)
                if accept is None:
                    continue
                accepted = float(accept[i] * mask[i])
                per_position_num[k] += accepted
                per_position_den[k] += float(mask[i])
                reached *= accepted
                claimed *= float(sigmoid[i] * mask[i])
                length += reached
                if outputs.confidence_pred is not None:
                    error = float(sigmoid[i] - accept[i])
                    abs_error += float(w[i]) * abs(error)
                    bias += float(w[i]) * error
                    cumprod_bias += float(w[i]) * (claimed - reached)
                    diag_den += float(w[i])
            if accept is not None and outputs.block_keep_mask[b, a] and mask[b, a].any():
                tau_num += length
                tau_den += 1
    return {
        "accept_rate_per_pos_num": torch.tensor(per_position_num, dtype=torch.float64),
        "accept_rate_per_pos_den": torch.tensor(per_position_den, dtype=torch.float64),
        "tau_num": tau_num,
        "tau_den": tau_den,
        "confidence_abs_error_num": abs_error,
        "confidence_bias_num": bias,
        "confidence_cumprod_bias_num": cumprod_bias,
        "confidence_diag_den": diag_den,
    }
