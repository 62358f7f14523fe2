"""Row after row of random logits, each judged by float64 mathematics of the same numbers: what goes
wrong once in a million rows is met here, where no grid of chosen cases has it.

A row draws how far its logits spread, how far draft and target are apart, whether its label is
nearly certain, where it has equal logits, columns without probability, and a common offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Union

import oracle
import pytest
import torch
from accuracy import PATHS, Pair, bf16, coefficients, f16, f32, pair_name
from conftest import TOLERANCES
from gpu import gpu
from inputs import LabelledRows, generator
from torch import Tensor

__all__ = ["gpu"]

PAIRS: tuple[Pair, ...] = (
    (bf16, bf16),
    (f32, f32),
    (f16, f16),
    (bf16, f32),
    (f32, f16),
    (f16, bf16),
)
CUDA_PATHS = ("fused", "in_place", "recompute")
COLUMNS = (2, 3000)


def random_rows(seed: int, pair: Pair, count: int) -> LabelledRows:
    """A batch of rows, whose number of columns and everything else follow from the seed."""
    random = generator(seed)

    def uniform(low: float, high: float) -> Tensor:
        """A number for each row."""
        return low + (high - low) * torch.rand(count, 1, generator=random).double()

    def share(of_all: float) -> Tensor:
        """So many of the rows, at random."""
        return uniform(0, 1) < of_all

    low, high = map(math.log, COLUMNS)
    V = round(math.exp(low + (high - low) * float(torch.rand((), generator=random))))
    if torch.rand((), generator=random) < 0.5:
        V += -V % 8  # rows as the row-resident CUDA kernel takes them
    noise = torch.randn(2, count, V, generator=random).double()
    draft = noise[0] * 10 ** uniform(-2, 1)
    target = draft + noise[1] * 10 ** uniform(-6, 1)
    draft = torch.where(share(0.1), (draft * 2).round() / 2, draft)
    target = torch.where(share(0.1), draft, target)
    ids = torch.randint(V, (count, 1), generator=random)
    confident = torch.zeros_like(draft).scatter_(1, ids, 1.0) * uniform(0, 40)
    draft = torch.where(share(0.2), draft + confident, draft)
    target = torch.where(share(0.2), target + confident, target)
    without = torch.rand(count, V, generator=random) < 0.3
    without.scatter_(1, ids, False)  # a label without probability has an infinite loss
    for x in (draft, target):
        x += torch.where(share(0.2), uniform(-500, 500), torch.zeros(()).double())
        x.masked_fill_(without & share(0.1), -math.inf)
    return LabelledRows(draft.to(pair[0]), target.to(pair[1]), ids[:, 0], ())


class Expected:
    """Float64 mathematics of all rows at once."""

    def __init__(self, rows: LabelledRows) -> None:
        x, t = rows.draft.double(), rows.target.double()
        self.p, spread_x = self.softmax(x)
        q, spread_t = self.softmax(t)
        label = rows.ids[:, None]
        others = torch.exp(x - x.gather(1, label)).scatter_(1, label, 0.0).sum(-1)
        self.ce = torch.log1p(others)
        self.l1 = (self.p - q).abs().sum(-1)
        self.ce_gradient = self.p.scatter(1, label, -(others / (1 + others))[:, None])
        above, below = (torch.where(s, self.p, 0.0).sum(-1, True) for s in (self.p > q, self.p < q))
        tie = torch.where(self.p == q, self.p, 0.0).sum(-1, True)
        slope = torch.where(self.p > q, 2 * below + tie, below - above)
        self.l1_gradient = self.p * torch.where(self.p < q, -(2 * above + tie), slope)
        rounding = 2.0**-23 * (8 + spread_x + spread_t) * torch.maximum(self.p, q)
        self.unresolved = (self.p - q).abs() <= rounding  # as in oracle.unresolved

    @staticmethod
    def softmax(x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, and how far each logit that has one is below the maximum."""
        below = x.amax(-1, True) - x
        e = torch.exp(-below)
        return e / e.sum(-1, True), below.masked_fill(below.isinf(), 0.0)

    def compare_with_the_oracle(self, rows: LabelledRows, index: int) -> None:
        draft, target = (oracle.softmax(x[index]) for x in (rows.draft, rows.target))
        label = int(rows.ids[index])
        assert float(self.ce[index]) == pytest.approx(
            oracle.cross_entropy(draft, label), rel=1e-9, abs=0
        )
        assert float(self.l1[index]) == pytest.approx(oracle.l1_distance(draft, target), abs=1e-13)
        true = oracle.cross_entropy_gradient(draft, label)
        torch.testing.assert_close(self.ce_gradient[index], true, rtol=1e-9, atol=1e-13)
        known = ~self.unresolved[index]
        torch.testing.assert_close(
            self.l1_gradient[index][known],
            oracle.l1_gradient(draft, target)[known],
            rtol=1e-9,
            atol=1e-9,  # float64 as well has columns whose sign is a matter of rounding
        )


def assert_every_row_is_right(
    seed: int, count: int, paths: Sequence[str], device: Union[str, torch.device] = "cpu"
) -> None:
    pair = PAIRS[seed % len(PAIRS)]
    path = paths[seed // len(PAIRS) % len(paths)]
    rows = random_rows(seed, pair, count)
    V = rows.draft.shape[1]
    expected = Expected(rows)
    expected.compare_with_the_oracle(rows, seed % count)
    a, b = coefficients(rows, 0.3, 0.7)
    results = PATHS[path](rows.to(device), a.to(device), b.to(device))
    ce, l1, gradient = (x.cpu() for x in results)

    tolerance = TOLERANCES[pair[0]]
    relative = torch.where(expected.ce >= 1e-3, tolerance.ce, tolerance.small_ce)
    wrong_ce = ~((ce.double() - expected.ce).abs() <= relative * expected.ce)
    wrong_l1 = ~((l1.double() - expected.l1).abs() <= tolerance.l1)
    a, b = a.double()[:, None], b.double()[:, None]
    parts = a * expected.ce_gradient, b * expected.l1_gradient
    reference = parts[0] + parts[1]
    # Arithmetic is in fp32, of parts that may cancel; the result is then rounded to its dtype.
    allowed = tolerance.gradient * reference.norm(dim=-1)
    allowed += TOLERANCES[f32].gradient * (parts[0].norm(dim=-1) + parts[1].norm(dim=-1))
    known = ~expected.unresolved
    # As in accuracy.assert_accurate: an unresolved column moves S, and the smallest step of a
    # dtype is an absolute error.
    unknown = torch.where(known, 0.0, expected.p).sum(-1)
    shift = 2 * b[:, 0] * unknown * torch.where(known, expected.p, 0.0).norm(dim=-1)
    floor = math.sqrt(V) * {f16: 2.0**-25}.get(pair[0], 2.0**-126)
    error = torch.where(known, gradient.double() - reference, 0.0).norm(dim=-1) - shift - floor
    wrong_gradient = ~(error <= allowed)
    for name, wrong in (("ce", wrong_ce), ("l1", wrong_l1), ("gradient", wrong_gradient)):
        where = wrong.nonzero()[:, 0].tolist()
        assert not where, f"seed={seed} V={V} {pair_name(pair)} {path}: {name} of rows {where[:9]}"


@pytest.mark.parametrize("seed", range(24))
def test_each_of_thousands_of_random_rows_is_that_of_float64_mathematics(seed):
    assert_every_row_is_right(seed, 2000, tuple(PATHS))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(24, 524, 50))
def test_each_of_a_million_random_rows_is_that_of_float64_mathematics(first):
    for seed in range(first, first + 50):
        assert_every_row_is_right(seed, 2000, tuple(PATHS))


@pytest.mark.parametrize("seed", range(18))
def test_each_of_a_thousand_random_rows_by_the_cuda_kernels(gpu, seed):
    assert_every_row_is_right(seed, 60, CUDA_PATHS, gpu.device)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(18, 518, 50))
def test_each_of_a_hundred_thousand_random_rows_by_the_cuda_kernels(gpu, first):
    for seed in range(first, first + 50):
        assert_every_row_is_right(seed, 200, CUDA_PATHS, gpu.device)
