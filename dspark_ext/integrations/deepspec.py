"""DeepSpec: the objective as a whole, with the metrics that its loss logs on the way."""

from __future__ import annotations

import importlib
from typing import Any, Optional

import torch
from torch import Tensor

from dspark_ext.integrations.patching import Integration, Target
from dspark_ext.loss import (
    _EPSILON,
    _build_loss_weight_mask,
    _collect_acceptance_diagnostics,
    _compute_accept_rate_3d,
    compute_dspark_loss,
)
from dspark_ext.rowwise import l1_distance


def loss_with_metrics(
    *,
    outputs: Any,
    loss_decay_gamma: Optional[float],
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
) -> Tensor:
    """The loss, after ``add_metric`` has been given every metric of the original, in its order,
    under its names, as local sums with their denominators.

    Whether ``l1_loss`` is among them is decided by its alpha. The original looks at its global
    denominator, which is also 0 in a step without a single supervised position anywhere; the
    sums are zeros then, so that no average changes, and nothing waits for the device.
    """
    l1_loss_alpha = float(l1_loss_alpha)
    loss, terms = compute_dspark_loss(
        outputs=outputs,
        loss_decay_gamma=loss_decay_gamma,
        ce_loss_alpha=float(ce_loss_alpha),
        l1_loss_alpha=l1_loss_alpha,
        confidence_head_alpha=float(confidence_head_alpha),
        return_terms=True,
    )
    losses = ["ce_loss"]
    if l1_loss_alpha > 0:
        losses.append("l1_loss")
    with torch.no_grad():
        ratios = _acceptance(outputs, terms, l1_loss_alpha)
        if outputs.confidence_pred is not None:
            losses.append("confidence_loss")
            for name in ("confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"):
                ratios.append((name, terms[f"{name}_num"], terms["confidence_diag_den"]))
        for name in losses:
            denominator = terms[f"{name}_den"]
            ratios.append((name, terms[name] * (denominator + _EPSILON), denominator))
    # Looked up at every call, so that a trainer's own replacement of it is respected.
    add_metric = importlib.import_module("deepspec.utils.metrics").add_metric
    for name, numerator, denominator in ratios:
        add_metric(name, numerator, den=denominator, tag="train")
    add_metric("loss", loss.detach(), reduction="dp_mean", tag="train")
    return loss


def _acceptance(
    outputs: Any, terms: dict[str, Tensor], l1_loss_alpha: float
) -> list[tuple[str, Tensor, Tensor]]:
    """``accept_rate@k`` and ``tau_probabilistic`` as (name, numerator, denominator).

    The original measures acceptance wherever there are target logits, and counts positions and
    blocks even where there are none; the objective does neither unless its loss needs the L1.
    """
    target = outputs.aligned_target_logits
    if target is not None and (l1_loss_alpha > 0 or outputs.confidence_pred is not None):
        accepted, positions = terms["accept_rate_per_pos_num"], terms["accept_rate_per_pos_den"]
        length, blocks = terms["tau_num"], terms["tau_den"]
    else:
        ids = outputs.target_ids
        l1 = torch.full(ids.shape, 2.0, device=ids.device)
        if target is not None:
            l1 = l1_distance(outputs.draft_logits, target, active=outputs.eval_mask)
        diagnostics = _collect_acceptance_diagnostics(
            outputs=outputs,
            accept_rate_3d=_compute_accept_rate_3d(l1_dist_per_token=l1),
            loss_weight_mask=_build_loss_weight_mask(
                eval_mask=outputs.eval_mask,
                block_size=ids.shape[-1],
                device=ids.device,
                loss_decay_gamma=None,
            ),
            has_confidence=False,
        )
        accepted, positions, length, blocks = (
            diagnostics[name]
            for name in ("accept_rate_pos_num", "accept_rate_pos_den", "tau_num", "tau_den")
        )
        if target is None:
            length = torch.zeros_like(length)
    rates = [
        (f"accept_rate@{k}", accepted[k], positions[k]) for k in range(outputs.eval_mask.shape[-1])
    ]
    return [*rates, ("tau_probabilistic", length, blocks)]


INTEGRATION = Integration(
    name="deepspec",
    distribution="deepspec",
    package="deepspec",
    versions=(),
    layouts=(
        (
            Target(
                module="deepspec.modeling.dspark.loss",
                attribute="compute_dspark_loss",
                signature=(
                    "(*, outputs, loss_decay_gamma, ce_loss_alpha, l1_loss_alpha, "
                    "confidence_head_alpha)"
                ),
                make=lambda original: loss_with_metrics,
            ),
        ),
    ),
)
