"""Stands in for the fused losses of verl-SpeCo's source repository, which its release lacks. The
real ones need an accelerator; these are their mathematics."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_label_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def fused_total_variation(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    p, q = draft_logits.float().softmax(-1), target_logits.detach().float().softmax(-1)
    return 1 - torch.minimum(p, q).sum(-1)
