"""The mathematics in plain PyTorch: what the kernels compute, and ``impl="torch"``.

For one row of draft logits ``x`` and target logits ``t`` over ``V`` columns, with
``p = softmax(x)``, ``q = softmax(t)`` and the label ``y``::

    m = max x    c = #{j: x_j = m}    T = sum over the other j of exp(x_j - m)    Z = c + T
    p_j = exp(x_j - m) / Z            ce = log1p(c - 1 + T) - (x_y - m)
    l1 = sum_j |p_j - q_j|            S = sum_j s_j p_j,  s_j = sign(p_j - q_j)

    d(a ce + b l1)/dx_j = a (p_j - [j = y]) + b p_j (s_j - S)

T leaves the maximum out, and ``p_y - 1`` is ``-(c - 1 + T) / Z`` where y is a maximum, because a
trained drafter is confident: next to the maximum's 1, the digits that its gradient consists of
are rounded away. For the same reason S travels as its two sides ``1 - S`` and ``1 + S``, each a
sum of its own.

The three functions mirror the kernels: row statistics, distance from statistics, gradient from
statistics, over ``[..., V]`` logits a chunk of rows at a time, so that no temporary of the
logits' size exists. Arithmetic is float32, or float64 where either side is float64.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

# Rows of a chunk: many, for few launches (and a short graph under torch.compile), or on the host
# so few that a chunk's temporaries stay in the cache and in the allocator's heap.
_CHUNK_ROWS = 128
_HOST_CHUNK_ELEMENTS = 1 << 20
IGNORE_INDEX = -100


def real_dtype(draft: Tensor, target: Optional[Tensor] = None) -> torch.dtype:
    """The dtype of the arithmetic: float64 when either side is, else float32."""
    wide = draft.dtype == torch.float64 or (target is not None and target.dtype == torch.float64)
    return torch.float64 if wide else torch.float32


def row_statistics(logits: Tensor, real: torch.dtype) -> Tensor:
    """``(m, c, T)`` of every row, ``[..., 3]`` in ``real``."""
    if logits.shape[-1] == 0:  # a shard without a column
        empty = logits.new_tensor([-torch.inf, 0, 0], dtype=real)
        return empty.expand(*logits.shape[:-1], 3)
    rows = []
    for begin, end in _bounds(logits):
        x = _rows(logits, begin, end, real)
        m = x.amax(dim=-1, keepdim=True)
        is_maximum = x == m
        c = is_maximum.sum(dim=-1, keepdim=True, dtype=real)
        t = torch.exp(x - m).masked_fill(is_maximum, 0).sum(dim=-1, keepdim=True)
        rows.append(torch.cat([m, c, t], dim=-1))
    return _joined(rows, logits, (3,), real)


def cross_entropy(statistics: Tensor, label_logit: Tensor) -> Tensor:
    """``log(Z) - (x_y - m)`` from statistics ``[..., 3]`` and the labels' logits ``[...]``."""
    m, c, t = statistics.unbind(-1)
    return torch.log1p(_nan_if_infinite(m) + c - 1 + t) - (label_logit - m)


def l1_distance(
    draft: Tensor, target: Tensor, draft_statistics: Tensor, target_statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """``l1`` ``[...]`` and the sides of S, ``(1 - S, 1 + S)`` ``[..., 2]``, of every row."""
    real = real_dtype(draft, target)
    distances, sides = [], []
    for begin, end in _bounds(draft):
        p = _probabilities(draft, draft_statistics, begin, end, real)
        difference = p - _probabilities(target, target_statistics, begin, end, real)
        sign = torch.sign(difference)
        distance = difference.abs().sum(dim=-1).clamp(max=2)
        both = torch.stack([(p * (1 - sign)).sum(-1), (p * (1 + sign)).sum(-1)], dim=-1)
        distances.append(distance)
        # The sign of NaN is 0; only l1 has seen it.
        sides.append(torch.where(distance.isnan().unsqueeze(-1), torch.nan, both))
    return _joined(distances, draft, (), real), _joined(sides, draft, (2,), real)


def gradient(
    a: Optional[Tensor],
    b: Optional[Tensor],
    draft: Tensor,
    target: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    draft_statistics: Tensor,
    target_statistics: Optional[Tensor],
    sides: Optional[Tensor],
) -> Tensor:
    """Gradient of ``sum(a * ce + b * l1)``, in the draft's shape and dtype.

    Without ``ids`` or ``a`` there is no cross-entropy, without ``target`` or ``b`` no L1. An id
    of -100 leaves a row's cross-entropy out; another id outside [0, V) is a column elsewhere.
    Rows where ``active`` is false get zeros.
    """
    real = real_dtype(draft, target)
    columns = draft.shape[-1]
    grads = []
    for begin, end in _bounds(draft):

        def take(per_row: Tensor, begin: int = begin, end: int = end) -> Tensor:
            return per_row.reshape(-1)[begin:end].unsqueeze(-1)

        p = _probabilities(draft, draft_statistics, begin, end, real)
        grad = torch.zeros_like(p)
        if a is not None and ids is not None:
            label = take(ids)
            m, c, t = _statistics(draft_statistics, begin, end)
            here = (label >= 0) & (label < columns)
            grad = torch.where(label == IGNORE_INDEX, 0, take(a).to(real)) * p
            if columns > 0:
                column = label.clamp(0, columns - 1)
                x_y = _rows(draft, begin, end, real).gather(-1, column)
                p_y = p.gather(-1, column)
                p_minus_one = torch.where(x_y == m, -(c - 1 + t) / _z(m, c, t), p_y - 1)
                with_label = grad.scatter(-1, column, take(a).to(real) * p_minus_one)
                grad = torch.where(here, with_label, grad)
        if b is not None and target is not None and target_statistics is not None:
            assert sides is not None, "an L1 gradient needs the sides of S"
            q = _probabilities(target, target_statistics, begin, end, real)
            below_one, above_one = sides.reshape(-1, 2)[begin:end].split(1, dim=-1)
            slope = torch.where(
                p > q, below_one, torch.where(p < q, -above_one, (below_one - above_one) / 2)
            )
            # A teacher that is only reported on (b = 0) must not reach the gradient, not even
            # as NaN.
            grad = grad + torch.where(take(b) == 0, 0, take(b).to(real) * p * slope)
        if active is not None:
            grad = torch.where(take(active) != 0, grad, 0)
        grads.append(grad.to(draft.dtype))
    return _joined(grads, draft, (columns,), draft.dtype)


def _nan_if_infinite(m: Tensor) -> Tensor:
    """0, or NaN where a row has no finite maximum and so no distribution."""
    return m - m


def _z(m: Tensor, c: Tensor, t: Tensor) -> Tensor:
    return _nan_if_infinite(m) + c + t


def _statistics(statistics: Tensor, begin: int, end: int) -> tuple[Tensor, ...]:
    return statistics.reshape(-1, 3)[begin:end].split(1, dim=-1)


def _probabilities(
    logits: Tensor, statistics: Tensor, begin: int, end: int, real: torch.dtype
) -> Tensor:
    m, c, t = _statistics(statistics, begin, end)
    return torch.exp(_rows(logits, begin, end, real) - m) / _z(m, c, t)


def _bounds(logits: Tensor) -> list[tuple[int, int]]:
    count, rows = logits.shape[:-1].numel(), _CHUNK_ROWS
    if logits.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = min(rows, max(1, _HOST_CHUNK_ELEMENTS // max(logits.shape[-1], 1)))
    return [(begin, min(begin + rows, count)) for begin in range(0, count, rows)]


def _rows(logits: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Rows [begin, end) of ``[..., V]`` as ``[end - begin, V]``; copies no other row."""
    leading, columns = logits.shape[:-1], logits.shape[-1]
    if logits.dim() != 2 and logits.is_contiguous():
        logits = logits.view(leading.numel(), columns)
    if logits.dim() == 2:
        return logits[begin:end].to(dtype)
    index = torch.arange(begin, end, device=logits.device)
    return logits[torch.unravel_index(index, leading)].to(dtype)


def _joined(
    parts: list[Tensor], logits: Tensor, last: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    joined = torch.cat(parts) if parts else logits.new_empty((0, *last), dtype=dtype)
    return joined.reshape((*logits.shape[:-1], *last))
