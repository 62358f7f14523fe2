from __future__ import annotations

from torch import Tensor

from verl_speco.ops.dspark_fused_loss import fused_label_cross_entropy, fused_total_variation


def loss_of_active_rows(draft: Tensor, target: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    ce, tv = fused_label_cross_entropy(draft, labels), fused_total_variation(draft, target)
    return ((0.1 * ce + 0.9 * 2 * tv) * weights).sum()
