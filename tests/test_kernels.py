"""Every way to a row's ce, l1 and gradient, against float64 mathematics of the same inputs."""

from __future__ import annotations

import itertools
import math
import time
from typing import Optional

import oracle
import pytest
import torch
from accuracy import (
    OPS,
    PATHS,
    assert_accurate,
    assert_distances,
    assert_statistics,
    assert_sums_of_equal_numbers_are_rounded_once,
    assert_sums_of_few_values_do_not_drift,
    bf16,
    case,
    f16,
    f32,
    f64,
    pair_name,
)
from conftest import TESTS, run_python
from inputs import DTYPES, LAYOUTS, generator, labelled_rows, name_of, normal
from torch import Tensor

from dspark_ext import _C

# Two columns; less than a vector; a block and one column more; two chunks and one column more;
# an odd vocabulary over many chunks; SmolLM2's and Qwen2.5's.
COLUMNS = (2, 7, 257, 4097, 32003, 49152, 151936)
PAIRS = (
    (f32, f32),
    (bf16, bf16),
    (f16, f16),
    (f64, f64),
    (f32, bf16),
    (bf16, f32),
    (f16, bf16),
    (f32, f64),
    (bf16, f64),
)


LEVELS = set(_C.cpu_available_levels().split())


# --- Accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
@pytest.mark.parametrize("V", COLUMNS)
def test_accuracy_of_values_and_gradients(V, pair, path):
    assert_accurate(V, pair, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [1637, 2031, 2572, 6319, 49152])
def test_sums_of_few_values_do_not_drift(V, dtype, path):
    assert_sums_of_few_values_do_not_drift(V, dtype, path)


def test_the_exclusion_rule_leaves_nearly_every_column():
    for V, pair in itertools.product((257, 4097, 32003), ((f32, f32), (bf16, bf16))):
        for row in case(V, pair)[1][:3]:
            assert float(row.p[row.unresolved].sum()) < 1e-4, (V, pair)


@pytest.mark.parametrize(
    "level", [n for n in _C.cpu_available_levels().split() if n != _C.cpu_level()]
)
def test_every_other_instruction_set_level_passes_these_tests(level):
    report = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "test_kernels.py")),
        *("-k", "not level and not torch"),
        level=level,
    )
    assert " passed" in report and "failed" not in report


# --- The ops one by one --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", COLUMNS)
def test_log_softmax_gives_statistics_and_log_probabilities(V, dtype):
    assert_statistics(V, dtype)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
@pytest.mark.parametrize("V", (7, 4097, 49152))
def test_l1_distance_gives_l1_and_both_sides_of_the_signed_mass(V, pair):
    assert_distances(V, pair)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("factor", [1.0, 3.0, 0.37])
def test_scaling_a_gradient_rounds_once(dtype, factor):
    gradient = normal(5, 3, 5001).to(dtype)
    upstream = torch.tensor(factor, dtype=f64 if dtype == f64 else f32)
    expected = (gradient.double() * upstream.double()).to(f32 if dtype != f64 else f64).to(dtype)
    before = gradient.clone()
    assert torch.equal(OPS.weighted_bwd(gradient, upstream), expected)
    assert torch.equal(gradient, before)
    OPS.weighted_bwd_(gradient, upstream)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (1000,), (100003,), (0, 5), (4097, 3)])
@pytest.mark.parametrize("dtype", [f32, f64], ids=name_of)
def test_ordered_sum_adds_in_an_order_of_its_own(shape, dtype):
    values = normal(8, *shape).to(dtype).requires_grad_()
    total = OPS.ordered_sum(values)
    columns = values.detach().double().reshape(shape[0], math.prod(shape[1:])).t().tolist()
    exact = [math.fsum(column) for column in columns]
    scale = values.detach().abs().double().sum(0).max() if shape[0] else 0
    error = (total.detach().double().flatten() - torch.tensor(exact, dtype=f64)).abs().max()
    assert total.shape == shape[1:] and float(error) <= 4 * torch.finfo(dtype).eps * float(scale)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(OPS.ordered_sum(values), total)
    total.sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))


def test_a_sum_of_many_equal_numbers_is_rounded_once():
    assert_sums_of_equal_numbers_are_rounded_once()


# --- Memory layout -------------------------------------------------------------------------------


def all_results(
    draft: Tensor,
    target: Tensor,
    ids: Tensor,
    active: Optional[Tensor] = None,
) -> dict[str, Tensor]:
    """Everything the kernels give for these rows, by every op."""
    real = f64 if f64 in (draft.dtype, target.dtype) else f32
    a = torch.linspace(0.5, 1.5, ids.numel(), dtype=real).reshape(ids.shape)
    statistics, log_prob = OPS.log_softmax_fwd(draft, ids, active)
    target_statistics, _ = OPS.log_softmax_fwd(target, None, active)
    known = (statistics.to(real), target_statistics.to(real))
    l1, sides = OPS.l1_distance_fwd(draft, target, *known, active)
    gradient = OPS.ce_and_l1_bwd(a, 1 - a, draft, target, ids, active, *known, sides)
    names = ("fused_ce", "fused_l1", "fused_gradient")
    return {
        "statistics": statistics,
        "log_prob": log_prob,
        "l1": l1,
        "sides": sides,
        "gradient": gradient,
        **dict(zip(names, OPS.weighted_fwd(draft, target, ids, active, a, 1 - a, True)[1:])),
    }


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name}: {what}"


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [7, 257, 32003])
@pytest.mark.parametrize("offset", [1, 3, 16])
def test_a_storage_offset_changes_no_bit(V, dtype, offset):
    rows = labelled_rows(1, V, dtype)

    def shifted(tensor: Tensor) -> Tensor:
        buffer = torch.zeros(tensor.numel() + offset, dtype=dtype)
        view = buffer[offset:].view(tensor.shape)
        view.copy_(tensor)
        return view

    assert_same_bits(
        all_results(shifted(rows.draft), shifted(rows.target), rows.ids),
        all_results(rows.draft, rows.target, rows.ids),
        f"V={V} {dtype} offset={offset}",
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_strides_of_the_leading_dimensions_change_no_bit(layout, dtype):
    shape = (2, 3, 4, 131)
    draft, target = (normal(seed, *shape, scale=2).to(dtype) for seed in (1, 2))
    ids = torch.randint(131, shape[:-1], generator=torch.Generator().manual_seed(3))
    arranged = LAYOUTS[layout](draft)
    assert torch.equal(arranged, draft) and arranged.stride() != draft.stride()
    expected = all_results(draft, target, ids)
    for x, t in ((arranged, target), (draft, LAYOUTS[layout](target))):
        assert_same_bits(all_results(x, t, ids), expected, f"{layout} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_an_expanded_target_is_read_where_it_stands(dtype):
    draft, target = normal(1, 2, 3, 4, 131).to(dtype), normal(2, 1, 1, 4, 131).to(dtype)
    ids = torch.zeros(2, 3, 4, dtype=torch.int64)
    expanded = target.expand(2, 3, 4, 131)
    expected = all_results(draft, expanded.contiguous(), ids)
    assert_same_bits(all_results(draft, expanded, ids), expected, str(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [2, 7, 257, 4097])
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_in_place_writes_the_same_gradient_and_nothing_beside_it(V, dtype, offset):
    # A wide enough buffer that large V takes the stores that bypass the caches.
    N = max(3, (9 << 20) // (V * DTYPES[0].itemsize)) if V > 4000 else 3
    x = normal(1, N, V, scale=2).to(dtype)
    target = normal(2, N, V, scale=2).to(dtype)
    ids = torch.arange(N) % V
    real = f64 if dtype == f64 else f32
    a, b = torch.full((N,), 0.3, dtype=real), torch.full((N,), 0.7, dtype=real)
    active = torch.arange(N) % 3 != 1
    _, ce, l1, gradient = OPS.weighted_fwd(x, target, ids, active, a, b, True)

    buffer = torch.full((N, V + offset + 2), 7.0, dtype=dtype)
    view = buffer[:, offset : offset + V]
    view.copy_(x)
    _, ce_in_place, l1_in_place = OPS.weighted_inplace_(view, target, ids, active, a, b)
    what = f"N={N} V={V} {dtype} offset={offset}"
    assert torch.equal(view, gradient), what
    assert torch.equal(ce_in_place, ce) and torch.equal(l1_in_place, l1), what
    assert (buffer[:, :offset] == 7).all() and (buffer[:, offset + V :] == 7).all(), what


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_inactive_rows_are_zero_and_change_no_bit_of_the_others(dtype):
    rows = labelled_rows(4, 4097, dtype)
    active = torch.tensor([True, False, True, True, False, True])
    expected = all_results(rows.draft, rows.target, rows.ids)
    poisoned = [x.clone() for x in (rows.draft, rows.target)]
    for x in poisoned:
        x[~active] = torch.nan
    ids = torch.where(active, rows.ids, 2**40)
    actual = all_results(*poisoned, ids, active)
    for name, value in actual.items():
        assert torch.equal(value[active], expected[name][active]), name
        assert (value[~active] == 0).all(), name


def test_time_follows_the_active_rows():
    N, V = 64, 49152
    draft, target = (torch.randn(N, V, generator=generator(seed)) for seed in (1, 2))
    ids, ones = torch.arange(N), torch.ones(N)
    seconds = {1: math.inf, 8: math.inf}
    for _ in range(5):  # of this thread alone, the least: a busy machine only ever adds some
        for every in seconds:
            active = torch.arange(N) % every == 0
            begun = time.thread_time()
            OPS.weighted_fwd(draft, target, ids, active, ones, ones, False)
            seconds[every] = min(seconds[every], time.thread_time() - begun)
    assert seconds[8] < 0.4 * seconds[1], seconds


# --- Reproducibility -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("N,V", [(1, 32003), (2, 151936), (6, 4097), (64, 257)])
def test_the_number_of_threads_changes_no_bit(N, V, dtype):
    draft, target = (normal(seed, N, V, scale=2).to(dtype) for seed in (1, 2))
    ids = torch.arange(N) * (V // N)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(all_results(draft, target, ids))
    for other in results[1:]:
        assert_same_bits(other, results[0], f"N={N} V={V} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_row_does_not_know_its_neighbours_or_its_place(dtype):
    # 300 rows make a gradient that is written past the caches, one row makes one that is not.
    N, V = 300, 8193
    draft, target = (normal(seed, N, V, scale=2).to(dtype) for seed in (1, 2))
    ids = torch.arange(N)
    real = f64 if dtype == f64 else f32
    a, b = torch.linspace(0, 1, N, dtype=real), torch.linspace(1, 2, N, dtype=real)
    together = OPS.weighted_fwd(draft, target, ids, None, a, b, True)[1:]
    for i in (0, 1, 150, 299):
        one = slice(i, i + 1)
        alone = OPS.weighted_fwd(draft[one], target[one], ids[one], None, a[one], b[one], True)[1:]
        for name, x, y in zip(("ce", "l1", "gradient"), together, alone):
            assert torch.equal(x[one], y), f"{name} of row {i} {dtype}"


# --- Instruction-set levels ----------------------------------------------------------------------

# Levels add in different orders, and a sum of thousands of equal exponentials, as rows of bf16
# logits have, rounds in one direction. A gradient's slope may be a difference of such sums.
LEVEL_ULP = 32

_SAVE = """
import sys, torch
from inputs import labelled_rows
from test_kernels import all_results
saved = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    rows = labelled_rows(9, 4097, dtype)
    saved[str(dtype)] = all_results(rows.draft, rows.target, rows.ids)
torch.save(saved, sys.argv[1])
"""


@pytest.mark.skipif(len(_C.cpu_available_levels().split()) < 2, reason="only one level here")
def test_levels_agree_to_a_few_units_in_the_last_place(tmp_path):
    levels = _C.cpu_available_levels().split()
    for level in levels:
        run_python("-c", _SAVE, str(tmp_path / level), level=level)
    best, *others = (torch.load(tmp_path / level) for level in levels)
    for other, dtype in itertools.product(others, DTYPES):
        rows = labelled_rows(9, 4097, dtype)
        pairs = [tuple(map(oracle.softmax, pair)) for pair in zip(rows.draft, rows.target)]
        # Two levels may give a column whose sign is within rounding different signs.
        resolved = [i for i, pair in enumerate(pairs) if not oracle.unresolved(*pair).any()]
        assert len(resolved) >= 3, dtype
        for name, expected in best[str(dtype)].items():
            expected, actual = expected[resolved], other[str(dtype)][name][resolved]
            difference = (actual.double() - expected.double()).abs()
            unit = torch.finfo(expected.dtype).eps * expected.double().abs()
            units = float(torch.where(difference > 0, difference / unit, 0.0).max())
            assert units <= LEVEL_ULP, f"{name} of {dtype}: {units:.1f} ulp"


def test_an_unknown_level_is_refused_with_those_that_exist():
    code = (
        "import torch\nfrom dspark_ext import _C\n"
        "try:\n    print(_C.cpu_level())\nexcept ValueError as error:\n    print(error)"
    )
    message = run_python("-c", code, level="avx1024")
    assert "avx1024" in message and "baseline" in message
