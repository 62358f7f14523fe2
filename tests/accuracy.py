"""Every way to a row's ce, l1 and gradient, and how each is judged by float64 mathematics."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple, Union

import oracle
import pytest
import torch
from conftest import TOLERANCES
from inputs import DTYPES, LabelledRows, labelled_rows, name_of
from torch import Tensor

import dspark_ext

OPS = torch.ops.dspark_ext
f32, bf16, f16, f64 = DTYPES

Pair = tuple[torch.dtype, torch.dtype]  # of draft and target


def pair_name(pair: Pair) -> str:
    return "-".join(name_of(dtype) for dtype in pair)


class Expected(NamedTuple):
    ce: float
    l1: float
    ce_gradient: Tensor
    l1_gradient: Tensor
    mass: oracle.SignedMass
    unresolved: Tensor  # columns where fp32 cannot know the sign of p - q
    p: Tensor


@functools.lru_cache(maxsize=2)
def case(V: int, pair: Pair) -> tuple[LabelledRows, list[Expected]]:
    rows = labelled_rows(V, V, *pair)
    epsilon = 2.0**-52 if f64 in pair else 2.0**-23
    expected = []
    for i, label in enumerate(rows.ids.tolist()):
        draft, target = oracle.softmax(rows.draft[i]), oracle.softmax(rows.target[i])
        expected.append(
            Expected(
                oracle.cross_entropy(draft, label),
                oracle.l1_distance(draft, target),
                oracle.cross_entropy_gradient(draft, label),
                oracle.l1_gradient(draft, target),
                oracle.signed_mass(draft, target),
                oracle.unresolved(draft, target, epsilon),
                draft.p,
            )
        )
    return rows, expected


def by_rows(rows: LabelledRows, a: Tensor, b: Tensor, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    draft = rows.draft.clone().requires_grad_()
    ce, l1 = dspark_ext.ce_and_l1(draft, rows.target, rows.ids, impl=impl)
    torch.autograd.backward((ce, l1), (a.to(ce), b.to(l1)))
    return ce.detach(), l1.detach(), draft.grad


def fused(rows: LabelledRows, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return OPS.weighted_fwd(rows.draft, rows.target, rows.ids, None, a, b, True)[1:]


def fused_in_place(rows: LabelledRows, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    draft = rows.draft.clone()
    _, ce, l1 = OPS.weighted_inplace_(draft, rows.target, rows.ids, None, a, b)
    return ce, l1, draft


PATHS = {
    "recompute": functools.partial(by_rows, impl="kernel"),
    "torch": functools.partial(by_rows, impl="torch"),
    "fused": fused,
    "in_place": fused_in_place,
}


def coefficients(rows: LabelledRows, a: float, b: float) -> tuple[Tensor, Tensor]:
    """Different in each row; in fp16 with a loss scale, as fp16 training has."""
    scale = 1024 if rows.draft.dtype == f16 else 1
    real = f64 if rows.draft.dtype == f64 else f32
    ramp = torch.linspace(1, 2, len(rows.draft), dtype=real) * scale
    return ramp * a, ramp.flip(0) * b


def assert_accurate(
    V: int, pair: Pair, path: str, device: Union[str, torch.device] = "cpu"
) -> None:
    """Values and gradients of every regime by one path, on one device, within the tolerances."""
    rows, expected = case(V, pair)
    tolerance = TOLERANCES[pair[0]]
    # The smallest step of a dtype is an absolute error that no relative one bounds.
    floor = math.sqrt(V) * {f16: 2.0**-25}.get(pair[0], 2.0**-149)
    for alpha, beta in ((1.0, 0.0), (0.0, 1.0), (0.3, 0.7)):
        a, b = coefficients(rows, alpha, beta)
        on_device = rows.to(device)
        results = PATHS[path](on_device, a.to(device), b.to(device))
        ce, l1, gradient = (result.cpu() for result in results)
        assert gradient.dtype == pair[0]
        assert ce.dtype == l1.dtype == (f64 if pair[0] == f64 else f32)
        for i, row in enumerate(expected):
            where = (
                f"seed={V} V={V} {pair_name(pair)} row {i} ({rows.regimes[i]}) a={alpha} b={beta}"
            )
            ce_error = abs(float(ce[i]) - row.ce) / row.ce if row.ce else abs(float(ce[i]))
            assert ce_error <= (tolerance.ce if row.ce >= 1e-3 else tolerance.small_ce), where
            assert abs(float(l1[i]) - row.l1) <= tolerance.l1, where
            a_i, b_i = float(a[i]), float(b[i])
            reference = a_i * row.ce_gradient + b_i * row.l1_gradient
            resolved = ~row.unresolved
            # An unresolved column may carry any of the three signs; besides its own element it
            # moves S, and with it every other one in proportion to p.
            shift = 2 * b_i * float(row.p[row.unresolved].sum()) * float(row.p[resolved].norm())
            error = float((gradient[i].double() - reference)[resolved].norm()) - shift - floor
            assert error <= tolerance.gradient * float(reference.norm()), (
                f"{where}: relative error {error / float(reference.norm()):.3e}"
            )


def assert_statistics(V: int, dtype: torch.dtype, device: Union[str, torch.device] = "cpu") -> None:
    """What log_softmax gives for every regime: statistics, and a label's log-probability."""
    rows = labelled_rows(V, V, dtype)
    statistics, log_prob = OPS.log_softmax_fwd(rows.draft.to(device), rows.ids.to(device), None)
    tolerance = TOLERANCES[dtype]
    for i, (x, y) in enumerate(zip(rows.draft, rows.ids)):
        expected = oracle.softmax(x)
        m, c, t = statistics[i].tolist()
        assert (m, c) == (expected.m, expected.c), rows.regimes[i]
        assert t == pytest.approx(expected.t, rel=tolerance.ce), rows.regimes[i]
        ce = oracle.cross_entropy(expected, int(y))
        relative = tolerance.ce if ce >= 1e-3 else tolerance.small_ce
        assert -float(log_prob[i]) == pytest.approx(ce, rel=relative, abs=0), rows.regimes[i]


def assert_distances(V: int, pair: Pair, device: Union[str, torch.device] = "cpu") -> None:
    """What l1_distance gives for every regime: L1 and both sides of the signed mass."""
    rows, expected = case(V, pair)
    real = f64 if f64 in pair else f32
    draft, target = rows.draft.to(device), rows.target.to(device)
    statistics = [OPS.log_softmax_fwd(x, None, None)[0].to(real) for x in (draft, target)]
    l1, sides = OPS.l1_distance_fwd(draft, target, *statistics, None)
    tolerance = TOLERANCES[f64 if pair == (f64, f64) else f32]  # statistics of fp32 logits are fp32
    for i, (l1_i, sides_i, row) in enumerate(zip(l1.tolist(), sides.tolist(), expected)):
        assert l1_i == pytest.approx(row.l1, rel=0, abs=tolerance.l1), rows.regimes[i]
        below, above = 2 * row.mass.below + row.mass.tie, 2 * row.mass.above + row.mass.tie
        unknown = 2 * float(row.p[row.unresolved].sum())
        for side, true in zip(sides_i, (below, above)):
            assert abs(side - true) <= tolerance.gradient * true + unknown, rows.regimes[i]


def rows_of_few_values(V: int, dtype: torch.dtype) -> LabelledRows:
    """Rows whose logits repeat one, two or three values, next to a column that has most or all.

    Sums of equal numbers are where rounding drifts: each addition errs in the same direction.
    """
    columns = torch.arange(V)
    kinds = {f"{n} values": (columns % n).float() for n in (1, 2, 3)}
    kinds |= {f"a peak of {height}": height * (columns == V // 3) for height in (12.0, 40.0)}
    pairs = list(itertools.permutations(kinds, 2))
    draft, target = (torch.stack([kinds[pair[i]] for pair in pairs]).to(dtype) for i in (0, 1))
    ids = torch.full((len(pairs),), V // 3)
    return LabelledRows(draft, target, ids, tuple(" against ".join(pair) for pair in pairs))


def assert_sums_of_few_values_do_not_drift(
    V: int, dtype: torch.dtype, path: str, device: Union[str, torch.device] = "cpu"
) -> None:
    rows = rows_of_few_values(V, dtype)
    a, b = coefficients(rows, 0.3, 0.7)
    ce, l1, _ = PATHS[path](rows.to(device), a.to(device), b.to(device))
    p, q = (torch.softmax(x.double(), -1) for x in (rows.draft, rows.target))
    expected_l1 = (p - q).abs().sum(-1).tolist()
    tolerance = TOLERANCES[dtype]
    for i, where in enumerate(rows.regimes):
        expected_ce = oracle.cross_entropy(oracle.softmax(rows.draft[i]), V // 3)
        relative = tolerance.ce if expected_ce >= 1e-3 else tolerance.small_ce
        assert float(ce[i]) == pytest.approx(expected_ce, rel=relative, abs=0), where
        assert float(l1[i]) == pytest.approx(expected_l1[i], rel=0, abs=tolerance.l1), where


def assert_sums_of_equal_numbers_are_rounded_once(device: Union[str, torch.device] = "cpu") -> None:
    values = torch.tensor([0.1, 0.3679, 1 / 3, 0.9]).repeat(300_007, 1)
    total = OPS.ordered_sum(values.to(device)).cpu()
    assert torch.equal(total, (values[0].double() * len(values)).float())
