"""Sums whose rounding does not depend on the number of threads."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_ext import _backend


def ordered_sum(values: Tensor) -> Tensor:
    """Sum over the first dimension in an order that follows from the shape alone.

    ``torch.sum`` splits its work by the number of threads, and with it the order of its
    additions. ``[M, ...] -> [...]``, differentiable; the sum of no values is 0. One op where this
    build has kernels for the dtype, float32 or float64; elsewhere a balanced tree of elementwise
    additions.
    """
    has_kernel = values.dtype in (torch.float32, torch.float64)
    if has_kernel and _backend.has_kernels(values.device):
        return torch.ops.dspark_ext.ordered_sum(values)
    count = values.shape[0]
    if count == 0:
        return values.sum(dim=0)  # an empty sum that still has a gradient
    size = 1 << (count - 1).bit_length()
    if size != count:
        values = torch.cat([values, values.new_zeros((size - count, *values.shape[1:]))])
    while size > 1:
        size //= 2
        values = values[:size] + values[size:]
    return values[0]
