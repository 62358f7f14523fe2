"""What hypothesis draws: a drafter's forward in few numbers, so that a failure prints all of it.

``Drawn`` holds the numbers, ``Drawn.outputs()`` makes the tensors from them: a regime of logits for
each row, a memory layout for each tensor, masks and ids of any dtype. Pasting a printed ``Drawn``
into a test makes the same tensors again.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Optional

import torch
from hypothesis import strategies as st
from inputs import DTYPES, generator
from torch import Tensor

from dspark_ext import DSparkForwardOutput

f32, bf16, f16, f64 = DTYPES

# --- Logits --------------------------------------------------------------------------------------

Regime = Callable[[torch.Generator, int, torch.dtype], Tensor]


def _noise(scale: float, offset: float = 0.0) -> Regime:
    return lambda g, V, dtype: torch.randn(V, generator=g, dtype=f64) * scale + offset


def _ordered(step: float) -> Regime:
    """Few values, so that maxima and whole rows tie."""
    return lambda g, V, dtype: torch.randint(-2, 3, (V,), generator=g).double() * step


def _peak(height: float) -> Regime:
    def row(g: torch.Generator, V: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(V, generator=g, dtype=f64)
        x[torch.randint(V, (), generator=g)] += height
        return x

    return row


def _without(part: Callable[[int], slice]) -> Regime:
    """Columns of minus infinity, never all of them."""

    def row(g: torch.Generator, V: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(V, generator=g, dtype=f64) * 2
        kept = int(torch.randint(V, (), generator=g))
        value = float(x[kept])
        x[part(V)] = -math.inf
        x[kept] = value
        return x

    return row


def _extremes(g: torch.Generator, V: int, dtype: torch.dtype) -> Tensor:
    """Near both ends of the dtype's range, so that a difference of two may be infinite."""
    signs = torch.randint(0, 2, (V,), generator=g).double() * 2 - 1
    return signs * torch.finfo(dtype).max * 0.9


def _denormals(g: torch.Generator, V: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(V, generator=g, dtype=f64) * torch.finfo(dtype).tiny / 8


def _signed_zeros(g: torch.Generator, V: int, dtype: torch.dtype) -> Tensor:
    return torch.where(torch.rand(V, generator=g) < 0.5, 0.0, -0.0).double()


def _one(value: float) -> Regime:
    def row(g: torch.Generator, V: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(V, generator=g, dtype=f64)
        x[torch.randint(V, (), generator=g)] = value
        return x

    return row


REGIMES: dict[str, Regime] = {
    "flat": _noise(0.01),
    "spread": _noise(1.0),
    "wide": _noise(5.0),
    "offset": _noise(3.0, 900.0),
    "far offset": _noise(3.0, -3e4),
    "tied": _ordered(1.0),
    "tied, wide": _ordered(12.0),
    "constant": lambda g, V, dtype: torch.full((V,), 1.25, dtype=f64),
    "peak of 20": _peak(20.0),
    "peak of 60": _peak(60.0),
    "leading stretch of -inf": _without(lambda V: slice(0, V - V // 4)),
    "trailing stretch of -inf": _without(lambda V: slice(V // 4, V)),
    "every other column -inf": _without(lambda V: slice(0, V, 2)),
    "one column": _without(lambda V: slice(None)),
    "extremes": _extremes,
    "denormals": _denormals,
    "signed zeros": _signed_zeros,
}
# Rows without a distribution: the answer is NaN.
UNDEFINED: dict[str, Regime] = {
    "a NaN": _one(math.nan),
    "an inf": _one(math.inf),
    "all -inf": lambda g, V, dtype: torch.full((V,), -math.inf, dtype=f64),
}
# A teacher that is its student: exactly, after rounding to its own dtype, or nearly.
RELATED = {"same": 0.0, "near": 0.04, "nearer": 0.001}


# --- Layouts -------------------------------------------------------------------------------------


def _copy(x: Tensor, view: Tensor) -> Tensor:
    return view.copy_(x)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _permuted(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, *range(3, x.dim())).contiguous().permute(1, 2, 0, *range(3, x.dim()))


def _every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 2)[:, :, ::2]


def _backward_in_memory(x: Tensor) -> Tensor:
    """The last dimension strided: logits of this layout are copied."""
    return x.transpose(-1, 0).contiguous().transpose(-1, 0)


def _with_offset(x: Tensor) -> Tensor:
    buffer = torch.full((x.numel() + 3,), 7, dtype=x.dtype)
    return _copy(x, buffer[3:].view(x.shape))


def _in_wider_rows(x: Tensor) -> Tensor:
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + 5), 7, dtype=x.dtype)
    return _copy(x, buffer[..., 2 : 2 + x.shape[-1]])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": _transposed,
    "permuted": _permuted,
    "every second": _every_second,
    "offset": _with_offset,
    "wider rows": _in_wider_rows,
    "last dimension strided": _backward_in_memory,
}

# --- A forward -----------------------------------------------------------------------------------

MASKS = {
    torch.bool: (1,),
    torch.uint8: (1, 3),
    torch.int64: (1, 2),
    f16: (1, 0.5),
    bf16: (1, 0.5),
    f32: (1, 0.25, 2.5, 1e-3),
    f64: (1, 0.3),
}
IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SENTINELS = (-1, -100, 2**40, -(2**63))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """``draft`` and ``target`` name a regime for each row, which they take in turn; the target's
    may also name a relation to the draft."""

    seed: int
    shape: tuple[int, int, int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    draft: tuple[str, ...]
    target: tuple[str, ...]
    layouts: tuple[str, str, str]  # of draft, of target, of everything per position
    expanded: bool  # the target is one block's, with strides of 0
    mask: torch.dtype
    keep: float
    ids: torch.dtype
    ignored: float  # share of the positions whose label is -100
    at_maximum: float  # share of the positions whose label is the draft's maximum
    confidence: Optional[float]  # the scale of its logits; None without a confidence head

    def outputs(self) -> DSparkForwardOutput:
        """The tensors; positions without supervision hold NaN and ids of no column."""
        B, A, K, V = self.shape
        g = generator(self.seed)
        x = self._logits(g, self.draft, self.dtypes[0], None)
        t = self._logits(g, self.target, self.dtypes[1], x)
        if self.expanded and B * A > 0:
            t = t[:1, :1].expand(t.shape)
        active = torch.rand(B, A, K, generator=g) < self.keep
        values = torch.tensor(MASKS[self.mask])
        weights = values[torch.randint(len(values), (B, A, K), generator=g)]
        eval_mask = torch.where(active, weights, 0).to(self.mask)
        x = torch.where(active[..., None], x, math.nan)
        if not (self.expanded and B * A > 0):
            t = torch.where(active[..., None], t, math.nan)
        arrange = LAYOUTS[self.layouts[2]]

        def per_position(values: Tensor) -> Tensor:
            return arrange(values[..., None]).squeeze(-1)

        confidence = None
        if self.confidence is not None:
            z = torch.randn(B, A, K, generator=g, dtype=f64) * self.confidence
            z = torch.where(active, z, math.nan).to(f64 if self.dtypes[0] == f64 else f32)
            confidence = per_position(z).requires_grad_()
        arranged = t if t.stride()[:2] == (0, 0) else LAYOUTS[self.layouts[1]](t)
        return DSparkForwardOutput(
            draft_logits=LAYOUTS[self.layouts[0]](x).requires_grad_(),
            target_ids=per_position(self._labels(g, x, active)),
            eval_mask=per_position(eval_mask),
            block_keep_mask=torch.rand(B, A, generator=g) < 0.8,
            confidence_pred=confidence,
            aligned_target_logits=arranged,
        )

    def _logits(
        self, g: torch.Generator, regimes: tuple[str, ...], dtype: torch.dtype, x: Optional[Tensor]
    ) -> Tensor:
        B, A, K, V = self.shape
        rows = []
        for i in range(B * A * K):
            name = regimes[i % len(regimes)]
            if name in RELATED:
                assert x is not None
                noise = torch.randn(V, generator=g, dtype=f64) * RELATED[name]
                row = x.reshape(-1, V)[i].double() + noise
                largest = torch.finfo(dtype).max
                rows.append(
                    torch.where(row.isfinite(), row.clamp(-largest, largest), row).to(dtype)
                )
            else:
                rows.append({**REGIMES, **UNDEFINED}[name](g, V, dtype).to(dtype))
        return torch.stack(rows).reshape(self.shape) if rows else torch.empty(self.shape).to(dtype)

    def _labels(self, g: torch.Generator, x: Tensor, active: Tensor) -> Tensor:
        B, A, K, V = self.shape
        bounds = torch.iinfo(self.ids)
        labels = torch.randint(min(V, bounds.max + 1), (B, A, K), generator=g)
        maximum = x.double().nan_to_num(nan=-math.inf).argmax(-1)
        chosen = torch.rand(B, A, K, generator=g) < self.at_maximum
        labels = torch.where(chosen & (maximum <= bounds.max), maximum, labels)
        if bounds.min <= -100:
            ignored = torch.rand(B, A, K, generator=g) < self.ignored
            labels = torch.where(ignored, -100, labels)
        sentinels = [s for s in SENTINELS if bounds.min <= s <= bounds.max] or [bounds.max]
        anything = torch.tensor(sentinels)[torch.randint(len(sentinels), (B, A, K), generator=g)]
        return torch.where(active, labels, anything).to(self.ids)

    @property
    def is_defined(self) -> bool:
        return not set(UNDEFINED) & {*self.draft, *self.target}


# Less than a vector of any level, several, a kernel's block and chunk, and one column beside each.
COLUMNS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 129, 255, 257, 300, 1025)
CHUNKS = (2047, 2048, 2049, 4097)


@st.composite
def forwards(draw: Any, undefined: bool = True, dtypes: tuple = DTYPES, chunks: bool = True):
    """``Drawn`` of every kind. Rows over more columns than a chunk come in small numbers."""
    V = draw(st.sampled_from(COLUMNS + CHUNKS if chunks else COLUMNS))
    leading = draw(st.tuples(*(st.integers(1, n) for n in (2, 3, 5))))
    if min(CHUNKS) <= V and math.prod(leading) > 6:
        leading = (1, 2, 3)
    nothing = draw(st.sampled_from([None] * 8 + [0, 1]))
    if nothing is not None:
        leading = tuple(0 if i == nothing else n for i, n in enumerate(leading))
    names = [*REGIMES, *UNDEFINED] if undefined and draw(st.integers(0, 3)) == 0 else [*REGIMES]
    regimes = st.lists(st.sampled_from(names), min_size=1, max_size=4).map(tuple)
    related = st.lists(st.sampled_from([*names, *RELATED]), min_size=1, max_size=4).map(tuple)
    layout = st.sampled_from([*LAYOUTS])
    return Drawn(
        seed=draw(st.integers(0, 2**32)),
        shape=(*leading, V),
        dtypes=draw(st.tuples(st.sampled_from(dtypes), st.sampled_from(dtypes))),
        draft=draw(regimes),
        target=draw(related),
        layouts=draw(st.tuples(layout, layout, layout)),
        expanded=draw(st.booleans()) and draw(st.booleans()),
        mask=draw(st.sampled_from([*MASKS])),
        keep=draw(st.sampled_from([1.0, 1.0, 0.7, 0.7, 0.3, 0.0])),
        ids=draw(st.sampled_from(IDS)),
        ignored=draw(st.sampled_from([0.0, 0.0, 0.3])),
        at_maximum=draw(st.sampled_from([0.0, 0.5, 1.0])),
        confidence=draw(st.sampled_from([None, 1.0, 1.0, 200.0, 1e4])),
    )
