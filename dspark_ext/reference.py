"""The mathematics in plain PyTorch: what the kernels compute, and ``impl="torch"``.

For one row of draft logits ``x`` and target logits ``t`` over ``V`` columns, with
``p = softmax(x)``, ``q = softmax(t)`` and the label ``y``::

    m = max x    c = #{j: x_j = m}    T = sum over the other j of exp(x_j - m)    Z = c + T
    ce = log(Z) - (x_y - m)           log(Z) = log1p(c - 1 + T)
    l1 = sum_j |p_j - q_j|            S = sum_j sign(p_j - q_j) p_j

    d(a ce + b l1)/dx_j = a (p_j - [j = y]) + b p_j (sign(p_j - q_j) - S)

T leaves the maximum out, and ``p_y - 1`` is ``-(c - 1 + T) / Z`` where y is a maximum, because a
trained drafter is confident: next to the maximum's 1, the digits that its gradient consists of
are rounded away. For the same reason ``1 - S`` and ``1 + S`` are formed as sums of their own.

Everything is computed in float32, or in float64 when either side is float64, a chunk of rows at
a time, so that no temporary of the logits' size exists. Backward recomputes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from dspark_ext._validate import refuse_double_backward

CHUNK_ROWS = 128
IGNORE_INDEX = -100


class RowStatistics(NamedTuple):
    """Maximum, its multiplicity and the sum of the others' exponentials, each ``[N, 1]``."""

    m: Tensor
    c: Tensor
    t: Tensor

    @property
    def z(self) -> Tensor:
        return self.c + self.t


def exponentials(x: Tensor) -> tuple[Tensor, RowStatistics]:
    """``exp(x_j - m)`` ``[N, V]`` and the row statistics. A row with no finite maximum is NaN."""
    m = x.amax(dim=-1, keepdim=True)
    e = torch.exp(x - m)
    is_maximum = x == m
    c = is_maximum.sum(dim=-1, keepdim=True, dtype=x.dtype)
    t = e.masked_fill(is_maximum, 0).sum(dim=-1, keepdim=True)
    return e, RowStatistics(m, c, torch.where(m.isinf(), torch.nan, t))


def cross_entropy(x: Tensor, ids: Tensor, statistics: RowStatistics) -> Tensor:
    """``log(Z) - (x_y - m)``, ``[N]``; 0 for an id of -100, NaN for another id outside [0, V)."""
    columns = x.shape[-1]
    x_y = x.gather(-1, ids.clamp(0, columns - 1).unsqueeze(-1))
    ce = (torch.log1p(statistics.c - 1 + statistics.t) - (x_y - statistics.m)).squeeze(-1)
    ce = torch.where((ids >= 0) & (ids < columns), ce, torch.nan)
    return torch.where(ids == IGNORE_INDEX, 0.0, ce)


def l1(p: Tensor, q: Tensor) -> Tensor:
    """``sum |p - q|``, ``[N]``, never above 2."""
    return (p - q).abs().sum(dim=-1).clamp(max=2)


def l1_slopes(p: Tensor, q: Tensor) -> Tensor:
    """``sign(p_j - q_j) - S``, ``[N, V]``."""
    sign = torch.sign(p - q)
    below_one = (p * (1 - sign)).sum(dim=-1, keepdim=True)  # 1 - S
    above_one = (p * (1 + sign)).sum(dim=-1, keepdim=True)  # 1 + S
    s = torch.where(below_one < above_one, 1 - below_one, above_one - 1)
    return torch.where(sign > 0, below_one, torch.where(sign < 0, -above_one, -s))


def gradient(
    a: Optional[Tensor], b: Optional[Tensor], x: Tensor, t: Optional[Tensor], ids: Optional[Tensor]
) -> Tensor:
    """Gradient of ``sum(a * ce + b * l1)`` with respect to ``x``, ``[N, V]``."""
    e, statistics = exponentials(x)
    p = e / statistics.z
    grad = torch.zeros_like(x)
    if a is not None and ids is not None:
        columns = x.shape[-1]
        a = torch.where(ids == IGNORE_INDEX, 0.0, a)
        a = torch.where(((ids >= 0) & (ids < columns)) | (ids == IGNORE_INDEX), a, torch.nan)
        label = ids.clamp(0, columns - 1).unsqueeze(-1)
        at_maximum = x.gather(-1, label) == statistics.m
        p_minus_one = torch.where(
            at_maximum, -(statistics.c - 1 + statistics.t) / statistics.z, p.gather(-1, label) - 1
        )
        grad = a.unsqueeze(-1) * p.scatter(-1, label, p_minus_one)
    if b is not None and t is not None:
        f, target_statistics = exponentials(t)
        slopes = l1_slopes(p, f / target_statistics.z)
        # A teacher that is only reported on (b = 0) must not reach the gradient, not even as NaN.
        b = b.unsqueeze(-1)
        grad = grad + torch.where(b == 0, 0.0, b * p * slopes)
    return grad


class _ChunkedCEAndL1(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft: Tensor,
        target: Optional[Tensor],
        ids: Optional[Tensor],
        active: Optional[Tensor],
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        real, result = _dtypes(draft, target)
        ce, distance = [], []
        for begin, end in _bounds(draft, chunk_rows):
            e, statistics = exponentials(x := _rows(draft, begin, end, real))
            zero = x.new_zeros(end - begin)
            if ids is None:
                ce.append(zero)
            else:
                ce.append(cross_entropy(x, ids.reshape(-1)[begin:end], statistics))
            if target is None:
                distance.append(zero)
            else:
                f, target_statistics = exponentials(_rows(target, begin, end, real))
                distance.append(l1(e / statistics.z, f / target_statistics.z))
        leading = draft.shape[:-1]
        outputs = []
        for parts in (ce, distance):
            rows = torch.cat(parts) if parts else draft.new_empty(0, dtype=real)
            rows = rows.to(result).reshape(leading)
            outputs.append(rows if active is None else torch.where(active, rows, 0.0))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(draft, target, ids, active)
        ctx.chunk_rows = chunk_rows
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, grad_ce: Optional[Tensor], grad_l1: Optional[Tensor]) -> tuple:
        refuse_double_backward("ce_and_l1")
        draft, target, ids, active = ctx.saved_tensors
        real, _ = _dtypes(draft, target)
        a, b, y = (None if v is None else v.reshape(-1) for v in (grad_ce, grad_l1, ids))
        grads = []
        for begin, end in _bounds(draft, ctx.chunk_rows):
            grads.append(
                gradient(
                    None if a is None else a[begin:end].to(real),
                    None if b is None else b[begin:end].to(real),
                    _rows(draft, begin, end, real),
                    None if target is None else _rows(target, begin, end, real),
                    None if y is None else y[begin:end],
                ).to(draft.dtype)
            )
        grad = torch.cat(grads) if grads else draft.new_empty(draft.shape)
        grad = grad.reshape(draft.shape)
        if active is not None:
            grad = torch.where(active.unsqueeze(-1), grad, 0.0)
        return grad, None, None, None, None


def ce_and_l1(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Per-row ``(ce, l1)`` in ``draft.shape[:-1]``, differentiable in ``draft``.

    Without ``ids`` the ce is 0, without ``target`` the l1. Rows where ``active`` is false give 0.
    """
    if active is not None:
        active = active.to(torch.bool)
    if ids is not None:
        ids = ids.to(torch.int64)
    return _ChunkedCEAndL1.apply(draft, target, ids, active, chunk_rows)


def _dtypes(draft: Tensor, target: Optional[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    wide = draft.dtype == torch.float64 or (target is not None and target.dtype == torch.float64)
    real = torch.float64 if wide else torch.float32
    return real, torch.float64 if draft.dtype == torch.float64 else torch.float32


def _bounds(draft: Tensor, chunk_rows: int) -> list[tuple[int, int]]:
    count = draft.shape[:-1].numel()
    return [(begin, min(begin + chunk_rows, count)) for begin in range(0, count, chunk_rows)]


def _rows(tensor: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Rows [begin, end) of ``[..., V]`` as ``[end - begin, V]``; copies no other row."""
    leading, columns = tensor.shape[:-1], tensor.shape[-1]
    if len(leading) != 1 and tensor.is_contiguous():
        tensor = tensor.view(-1, columns)
    if tensor.dim() == 2:
        return tensor[begin:end].to(dtype)
    index = torch.arange(begin, end, device=tensor.device)
    return (
        tensor[torch.unravel_index(index, leading)].to(dtype) if leading else tensor[None].to(dtype)
    )
