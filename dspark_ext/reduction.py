"""Sums whose rounding does not depend on the number of threads."""

from __future__ import annotations

import torch
from torch import Tensor


def ordered_sum(values: Tensor) -> Tensor:
    """Sum over the first dimension, as a balanced tree of elementwise additions.

    ``torch.sum`` splits its work by the number of threads, and with it the order of its
    additions; here the order follows from the shape alone, so a loss has the same bits on every
    machine. ``[M, ...] -> [...]``; the sum of no values is 0. Differentiable.
    """
    count = values.shape[0]
    if count == 0:
        return values.new_zeros(values.shape[1:])
    size = 1 << (count - 1).bit_length()
    if size != count:
        values = torch.cat([values, values.new_zeros((size - count, *values.shape[1:]))])
    while size > 1:
        size //= 2
        values = values[:size] + values[size:]
    return values[0]
