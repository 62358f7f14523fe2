"""The objective and everything it logs, by its definition."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepspec.utils.metrics import add_metric


def compute_dspark_loss(
    *,
    outputs: Any,
    loss_decay_gamma: Optional[float],
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
) -> Tensor:
    draft, target = outputs.draft_logits.float(), outputs.aligned_target_logits
    mask, confidence = outputs.eval_mask.float(), outputs.confidence_pred
    weights = mask
    if loss_decay_gamma is not None and loss_decay_gamma > 0:
        weights = mask * torch.exp(-torch.arange(mask.shape[-1]) / loss_decay_gamma)
    zero, block_size = mask.new_zeros(()), mask.shape[-1]

    ce = F.cross_entropy(draft.flatten(0, 2), outputs.target_ids.flatten(), reduction="none")
    ce = ce.view_as(mask)
    l1 = accept = None
    if target is not None:
        l1 = (draft.softmax(-1) - target.float().softmax(-1)).abs().sum(-1)
        accept = (1 - l1.detach() / 2).clamp(0, 1)
    elif l1_loss_alpha > 0 or confidence is not None:
        raise AssertionError("target logits are required")

    blocks = (outputs.block_keep_mask & outputs.eval_mask.any(-1)).float()
    accepted = torch.zeros_like(mask) if accept is None else accept * mask
    for k in range(block_size):
        add_metric(f"accept_rate@{k}", accepted[..., k].sum(), den=mask[..., k].sum(), tag="train")
    length = (1 + accepted.cumprod(-1).sum(-1)) * blocks
    add_metric(
        "tau_probabilistic", zero if accept is None else length.sum(), den=blocks.sum(), tag="train"
    )

    sums = {"ce_loss": ((ce * weights).sum(), ce_loss_alpha)}
    if l1_loss_alpha > 0:
        sums["l1_loss"] = ((l1 * weights).sum(), l1_loss_alpha)
    if confidence is not None:
        probability = confidence.detach().float().sigmoid()
        error = probability - accept
        prefix = (probability * mask).cumprod(-1) - accepted.cumprod(-1)
        for name, what in (
            ("confidence_abs_error", error.abs()),
            ("confidence_bias", error),
            ("confidence_cumprod_bias", prefix),
        ):
            add_metric(name, (what * weights).sum(), den=weights.sum(), tag="train")
        bce = F.binary_cross_entropy_with_logits(confidence.float(), accept, reduction="none")
        sums["confidence_loss"] = ((bce * weights).sum(), confidence_head_alpha)

    everywhere = weights.sum()
    dist.all_reduce(everywhere)
    loss = zero
    for name, (numerator, alpha) in sums.items():
        if name != "l1_loss" or everywhere.item() > 0:
            add_metric(name, numerator, den=weights.sum(), tag="train")
            loss = loss + alpha * numerator / (everywhere + 1e-6)
    loss = loss * dist.get_world_size()
    add_metric("loss", loss.detach(), reduction="dp_mean", tag="train")
    return loss
