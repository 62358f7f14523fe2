"""The CUDA kernels against float64 mathematics, executed in the emulator and, marked ``cuda``, on
a GPU."""

from __future__ import annotations

import math
from typing import Callable

import mutate_cuda
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
    f16,
    f32,
    pair_name,
)
from conftest import TOLERANCES
from emulated import MAX_CLUSTERS
from gpu import emulator, gpu
from inputs import LAYOUTS, OBJECTIVE, labelled_rows, name_of, normal, outputs
from process_groups import group_of_one
from torch import Tensor

import dspark_ext
from dspark_ext import _backend, compute_dspark_loss

__all__ = ["emulator", "gpu"]

DTYPES = (f32, bf16, f16)
EQUAL_PAIRS = tuple((dtype, dtype) for dtype in DTYPES)
MIXED_PAIRS = tuple((d, t) for d in DTYPES for t in DTYPES if d != t)

# Two columns; less than a unit; an odd number over several units; a whole number of units in one
# block; more than one split, and odd; SmolLM2, Llama 3, Qwen 2.5, Gemma.
SMALL = (2, 7, 257, 1000, 4097)
LARGE = (32003, 49152, 128256, 151936, 262144)
CLUSTERS = {49152: 4, 128256: 8, 129280: 8, 151936: 8, 262144: 16}  # of bfloat16 rows
KERNEL_PATHS = tuple(name for name in PATHS if name != "torch")


def on(gpu, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(gpu.device) for tensor in tensors)


# --- Accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", KERNEL_PATHS)
@pytest.mark.parametrize("pair", EQUAL_PAIRS + MIXED_PAIRS, ids=pair_name)
@pytest.mark.parametrize("V", SMALL)
def test_accuracy_of_values_and_gradients(gpu, V, pair, path):
    assert_accurate(V, pair, path, gpu.device)


@pytest.mark.parametrize("path", ["fused", "recompute"])
@pytest.mark.parametrize("pair", [*EQUAL_PAIRS[:2], (bf16, f32)], ids=pair_name)
@pytest.mark.parametrize("V", LARGE)
def test_accuracy_of_large_vocabularies(gpu, V, pair, path):
    if V == 262144 and pair == (f32, f32) and path == "recompute":
        pytest.skip("the same kernels as fused: both go by the portable path")
    assert_accurate(V, pair, path, gpu.device)


@pytest.mark.slow
@pytest.mark.parametrize("path", KERNEL_PATHS)
@pytest.mark.parametrize("pair", EQUAL_PAIRS + MIXED_PAIRS, ids=pair_name)
@pytest.mark.parametrize("V", LARGE)
def test_accuracy_of_large_vocabularies_in_every_dtype(gpu, V, pair, path):
    assert_accurate(V, pair, path, gpu.device)


@pytest.mark.parametrize("path", ["fused", "recompute"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [4007, 4096, 19968, 32003, 61000])
def test_sums_of_few_values_do_not_drift(gpu, V, dtype, path):
    assert_sums_of_few_values_do_not_drift(V, dtype, path, gpu.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [7, 4097, 49152])
def test_log_softmax_gives_statistics_and_log_probabilities(gpu, V, dtype):
    assert_statistics(V, dtype, gpu.device)


@pytest.mark.parametrize("pair", EQUAL_PAIRS + MIXED_PAIRS, ids=pair_name)
@pytest.mark.parametrize("V", [7, 4097])
def test_l1_distance_gives_l1_and_both_sides_of_the_signed_mass(gpu, V, pair):
    assert_distances(V, pair, gpu.device)


@pytest.mark.parametrize("V", [151936, 49160])
def test_the_label_may_stand_at_any_edge_of_a_block(gpu, V):
    cluster, units, _ = gpu.plan(*on(gpu, *(torch.zeros(1, V, dtype=bf16) for _ in range(2))))
    assert cluster > 1
    edges = [block * units * 8 for block in range(1, cluster)]
    ids = torch.tensor([0, V - 1, *edges, *(edge - 1 for edge in edges)])
    draft = normal(1, 1, V, scale=2).to(bf16).expand(len(ids), V).contiguous()
    target = normal(2, 1, V, scale=2).to(bf16).expand(len(ids), V)
    ones = torch.ones(len(ids))
    _, ce, _, gradient = OPS.weighted_fwd(
        *on(gpu, draft, target, ids), None, *on(gpu, ones, 0 * ones), True
    )
    row = oracle.softmax(draft[0])
    for i, y in enumerate(ids.tolist()):
        assert float(ce[i]) == pytest.approx(oracle.cross_entropy(row, y), rel=2e-6), y
        expected = oracle.cross_entropy_gradient(row, y)
        error = (gradient[i].cpu().double() - expected).norm() / expected.norm()
        assert float(error) <= TOLERANCES[bf16].gradient, y


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [1000, 4097, 49152])
def test_identical_rows_have_no_distance_and_no_gradient(gpu, V, dtype):
    draft = labelled_rows(V, V, dtype).draft
    ones, ids = torch.ones(len(draft)), torch.zeros(len(draft), dtype=torch.int64)
    draft, ids, ones = on(gpu, draft, ids, ones)
    elsewhere = torch.cat([draft.new_zeros(3), draft.flatten()])[3:].view(draft.shape)
    for target in (draft.clone(), draft.float(), elsewhere, elsewhere.float()):
        _, _, l1, gradient = OPS.weighted_fwd(draft, target, ids, None, 0 * ones, ones, True)
        what = f"{target.dtype}, at {target.storage_offset()}"
        assert (l1 == 0).all() and (gradient == 0).all(), what
        # As shards of a vocabulary are compared.
        known = [OPS.log_softmax_fwd(x, None, None, draft)[0] for x in (draft, target)]
        assert torch.equal(*known), what
        assert not OPS.l1_distance_fwd(draft, target, *known, None)[0].any(), what


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [4104, 4108, 49152])
def test_ties_take_the_slope_between(gpu, V, dtype):
    """Of each four columns one is above, one below and two tie, by construction to the bit."""
    draft = torch.tensor([0.0, -1.0, -0.5, -0.5]).repeat(1, V // 4).to(dtype)
    target = torch.tensor([-1.0, 0.0, -0.5, -0.5]).repeat(1, V // 4).to(dtype)
    one, ids = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    _, _, l1, gradient = OPS.weighted_fwd(
        *on(gpu, draft, target, ids), None, *on(gpu, 0 * one, one), True
    )
    high, low, tied = 1.0, math.exp(-1), math.exp(-0.5)
    z = V / 4 * (high + low + 2 * tied)
    s = V / 4 * (high - low) / z
    assert float(l1) == pytest.approx(2 * s, rel=2e-6)
    expected = [high / z * (1 - s), low / z * (-1 - s), tied / z * -s, tied / z * -s]
    for column, value in enumerate(expected):
        elements = gradient[0, column::4].double()
        smallest = 2.0**-25 if dtype == f16 else 0.0  # half of a subnormal's last place
        error = float((elements - value).abs().max())
        assert error <= 2 * TOLERANCES[dtype].gradient * abs(value) + smallest, column


@pytest.mark.parametrize("V", [49152, 151936])
def test_a_confident_rows_small_numbers_keep_their_digits(gpu, V):
    for gap in (20, 30, 60):
        draft = normal(gap, 1, V)
        draft[0, 1234] += gap
        for dtype in (f32, bf16):
            x = draft.to(dtype)
            one = torch.ones(1)
            _, ce, _, gradient = OPS.weighted_fwd(
                *on(gpu, x, normal(1, 1, V).to(dtype), torch.tensor([1234])),
                *(None, *on(gpu, one, 0 * one), True),
            )
            row = oracle.softmax(x[0])
            assert float(ce[0]) == pytest.approx(oracle.cross_entropy(row, 1234), rel=1e-5)
            expected = float(oracle.cross_entropy_gradient(row, 1234)[1234])
            rounding = 1e-5 if dtype == f32 else 2.0**-8
            assert float(gradient[0, 1234]) == pytest.approx(expected, rel=rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [4097, 151936])
def test_leading_stretches_of_minus_infinity_take_no_part(gpu, V, dtype):
    for finite in (1, 3):
        draft = torch.full((1, V), -math.inf).to(dtype)
        draft[0, -5 : -5 + finite] = torch.arange(finite).to(dtype)
        target = normal(3, 1, V).to(dtype)
        ids, one = torch.tensor([V - 5]), torch.ones(1)
        _, ce, l1, gradient = OPS.weighted_fwd(
            *on(gpu, draft, target, ids), None, *on(gpu, one, one), True
        )
        p, q = oracle.softmax(draft[0]), oracle.softmax(target[0])
        assert float(ce) == pytest.approx(oracle.cross_entropy(p, V - 5), rel=2e-6, abs=0)
        assert float(l1) == pytest.approx(oracle.l1_distance(p, q), abs=2e-6)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("V", [4097, 49152])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_row_without_a_distribution_is_nan_and_no_other_one(gpu, V, value):
    draft, target = normal(1, 3, V).to(bf16), normal(2, 3, V).to(bf16)
    draft[1] = value
    ids, ones = torch.tensor([0, 1, 2]), torch.ones(3)
    _, ce, l1, gradient = OPS.weighted_fwd(
        *on(gpu, draft, target, ids), None, *on(gpu, ones, ones), True
    )
    for results in (ce, l1, gradient[:, 0], gradient.float().mean(-1)):
        assert results.isnan().tolist() == [False, True, False]
    recomputed = draft.to(gpu.device).requires_grad_()
    ce, l1 = dspark_ext.ce_and_l1(recomputed, *on(gpu, target, ids))
    (ce.sum() + l1.sum()).backward()
    assert ce.isnan().tolist() == l1.isnan().tolist() == [False, True, False]
    assert recomputed.grad.float().mean(-1).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("V", [4097, 49152])
def test_huge_logits_and_offsets_are_exact(gpu, V):
    for dtype, largest in ((f32, 3e38), (bf16, 3e38), (f16, 6e4)):
        draft = torch.full((2, V), -largest).to(dtype)
        draft[0, 5] = largest  # alone at the top
        draft[1] = largest  # everything at the top
        ids, ones = torch.tensor([5, 5]), torch.ones(2)
        _, ce, l1, _ = OPS.weighted_fwd(
            *on(gpu, draft, draft.flip(-1), ids), None, *on(gpu, ones, ones), True
        )
        assert ce.tolist() == pytest.approx([0, math.log(V)], rel=1e-6)
        assert l1.tolist() == [2, 0]


@pytest.mark.parametrize("V", [4097, 4096, 49152])
@pytest.mark.parametrize("offset", [900.0, -3e4, 2.0**20 - 8, 2.0**20 + 8, -1e7, 1e12])
def test_offsets_of_every_size_cancel(gpu, V, offset):
    """Of a whole row, and of a few columns next to others that have none."""
    draft = (normal(1, 2, V, scale=3) + offset).float()
    draft[1, 7:] = normal(2, V - 7).float()
    target = (normal(3, 2, V, scale=3) - offset).float()
    ids, ones = torch.tensor([V // 2, 3]), torch.ones(2)
    _, ce, l1, gradient = OPS.weighted_fwd(
        *on(gpu, draft, target, ids), None, *on(gpu, ones, ones), True
    )
    for i, y in enumerate(ids.tolist()):
        p, q = oracle.softmax(draft[i]), oracle.softmax(target[i])
        assert float(ce[i]) == pytest.approx(oracle.cross_entropy(p, y), rel=2e-6)
        assert float(l1[i]) == pytest.approx(oracle.l1_distance(p, q), abs=2e-6)
        known = ~oracle.unresolved(p, q)
        expected = oracle.cross_entropy_gradient(p, y) + oracle.l1_gradient(p, q)
        shift = 2 * float(p.p[~known].sum()) * float(p.p[known].norm())
        error = float((gradient[i].cpu().double() - expected)[known].norm()) - shift
        assert error <= TOLERANCES[f32].gradient * float(expected.norm())


@pytest.mark.parametrize("V", [4097, 49152])
def test_ids_that_are_no_column(gpu, V, monkeypatch):
    if gpu.is_emulated:
        monkeypatch.setattr(_backend, "checks_enabled", lambda: False)
    draft, target = normal(1, 4, V).to(bf16), normal(2, 4, V).to(bf16)
    ids, ones = torch.tensor([0, -100, V, -1]), torch.ones(4)
    arguments = (*on(gpu, draft, target, ids), None, *on(gpu, ones, ones))
    _, ce, l1, gradient = OPS.weighted_fwd(*arguments, True)
    assert ce.isnan().tolist() == [False, False, True, True] and float(ce[1]) == 0
    assert not l1.isnan().any()
    assert gradient.isnan().all(-1).tolist() == [False, False, True, True]
    without_ce = OPS.weighted_fwd(*arguments[:4], 0 * arguments[4], arguments[5], True)[3]
    assert torch.equal(gradient[1], without_ce[1])
    recomputed = arguments[0].clone().requires_grad_()
    ce, l1 = dspark_ext.ce_and_l1(recomputed, *arguments[1:3])
    (ce.sum() + l1.sum()).backward()
    assert ce.isnan().tolist() == [False, False, True, True]
    assert recomputed.grad.isnan().all(-1).tolist() == [False, False, True, True]


def test_ids_that_are_no_column_of_any_shard(emulator, gpu, monkeypatch):
    monkeypatch.setattr(_backend, "checks_enabled", lambda: False)
    draft, target = normal(1, 4, 257).to(bf16).requires_grad_(), normal(2, 4, 257).to(bf16)
    with group_of_one() as group:
        shard = {"tp_group": group, "vocab_size": 250}
        ce, l1 = dspark_ext.ce_and_l1(draft, target, torch.tensor([0, -100, 250, -1]), **shard)
        (ce.sum() + l1.sum()).backward()
    assert ce.isnan().tolist() == [False, False, True, True] and float(ce[1].detach()) == 0
    assert not l1.isnan().any() and not draft.grad[:, 250:].any()
    assert draft.grad[:, :250].isnan().all(-1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("impl", ["kernel", "torch"])
def test_an_id_that_is_no_column_is_named_where_checks_are_asked_for(gpu, impl, monkeypatch):
    draft, target = on(gpu, *(normal(seed, 4, 33).float() for seed in (1, 2)))
    (ids,) = on(gpu, torch.tensor([0, -100, 33, -1]))
    calls = (
        lambda: dspark_ext.ce_and_l1(draft, target, ids, impl=impl),
        lambda: dspark_ext.token_log_prob(draft, ids, impl=impl),
    )
    for call in calls:
        monkeypatch.setenv("DSPARK_EXT_CHECK", "1")
        with pytest.raises(IndexError, match=r"\[2\] is 33.*-100"):
            call()
        for nothing in ("0", ""):
            monkeypatch.setenv("DSPARK_EXT_CHECK", nothing)
            call()


# --- Rows that take no part ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fused", "in_place", "recompute"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [257, 4097, 49152])
def test_inactive_rows_are_zero_and_change_no_bit_of_the_others(gpu, V, dtype, path):
    rows = labelled_rows(4, V, dtype)
    active = torch.tensor([True, False, True, False, False, True])
    a, b = torch.linspace(1, 2, 6), torch.linspace(0.5, 1, 6)

    def results(draft: Tensor, target: Tensor, ids: Tensor, active: Tensor) -> list[Tensor]:
        draft, target, ids, active, ce_weight, l1_weight = on(
            gpu, draft.clone(), target, ids, active, a, b
        )
        if path == "recompute":
            draft.requires_grad_()
            ce, l1 = dspark_ext.ce_and_l1(draft, target, ids, active=active)
            torch.autograd.backward((ce, l1), (ce_weight, l1_weight))
            found = [ce.detach(), l1.detach(), draft.grad]
        elif path == "in_place":
            _, ce, l1 = OPS.weighted_inplace_(draft, target, ids, active, ce_weight, l1_weight)
            found = [ce, l1, draft]
        else:
            found = OPS.weighted_fwd(draft, target, ids, active, ce_weight, l1_weight, True)[1:]
        return [result.cpu() for result in found]

    expected = results(rows.draft, rows.target, rows.ids, torch.ones(6, dtype=torch.bool))
    poisoned = [x.clone() for x in (rows.draft, rows.target)]
    for x in poisoned:
        x[~active] = torch.nan
    actual = results(*poisoned, torch.where(active, rows.ids, 2**40), active)
    for name, x, y in zip(("ce", "l1", "gradient"), actual, expected):
        assert torch.equal(x[active], y[active]), name
        assert (x[~active] == 0).all(), name


@pytest.mark.parametrize("N", [1, 1023, 1024, 1025, 2500])
@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
def test_rows_are_brought_into_order_whatever_their_number(gpu, N, keep):
    draft, target = normal(1, N, 16).to(bf16), normal(2, N, 16).to(bf16)
    active = torch.rand(N, generator=torch.Generator().manual_seed(N)) < keep
    ids, ones = torch.arange(N) % 16, torch.ones(N)
    arguments = on(gpu, draft, target, ids, active, ones, ones)
    _, ce, l1, gradient = OPS.weighted_fwd(*arguments, True)
    whole = OPS.weighted_fwd(*arguments[:3], None, *arguments[4:], True)
    kept = arguments[3]
    for actual, expected in zip((ce, l1, gradient), whole[1:]):
        assert torch.equal(actual[kept], expected[kept]) and (actual[~kept] == 0).all()


def test_no_rows_launch_nothing(gpu):
    for shape in ((0, 49152), (2, 0, 257)):
        draft = torch.zeros(shape, dtype=bf16, device=gpu.device).requires_grad_()
        ids = torch.zeros(shape[:-1], dtype=torch.int64, device=gpu.device)
        ce, l1 = dspark_ext.ce_and_l1(draft, draft.detach(), ids)
        (ce.sum() + l1.sum()).backward()
        assert ce.shape == l1.shape == shape[:-1] and draft.grad.shape == shape


# --- Memory layout -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("V", [136, 4096])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=name_of)
def test_strides_of_the_leading_dimensions_change_no_bit(gpu, layout, V, dtype):
    shape = (2, 3, 4, V)
    draft, target = on(gpu, *(normal(seed, *shape, scale=2).to(dtype) for seed in (1, 2)))
    ids = torch.arange(24, device=gpu.device).reshape(2, 3, 4)
    ones = torch.ones(2, 3, 4, device=gpu.device)
    expected = OPS.weighted_fwd(draft, target, ids, None, ones, ones, True)
    for x, t in ((LAYOUTS[layout](draft), target), (draft, LAYOUTS[layout](target))):
        for actual, other in zip(OPS.weighted_fwd(x, t, ids, None, ones, ones, True), expected):
            assert torch.equal(actual, other)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=name_of)
def test_an_expanded_target_is_read_where_it_stands(gpu, dtype):
    draft, target = on(gpu, normal(1, 2, 3, 4, 4096).to(dtype), normal(2, 1, 1, 4, 4096).to(dtype))
    expanded = target.expand(2, 3, 4, 4096)
    assert gpu.plan(draft, expanded)[0] > 0
    ids = torch.zeros(2, 3, 4, dtype=torch.int64, device=gpu.device)
    for actual, expected in zip(
        dspark_ext.ce_and_l1(draft, expanded, ids),
        dspark_ext.ce_and_l1(draft, expanded.contiguous(), ids),
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("pair", [(f32, f32), (bf16, bf16), (bf16, f32)], ids=pair_name)
@pytest.mark.parametrize("V", [7, 257, 4099])
@pytest.mark.parametrize("offsets", [(1, 1), (3, 0), (0, 5)])
def test_rows_off_every_boundary_are_right(gpu, V, pair, offsets):
    """Draft and target, each at an offset of its own, so that their vectors do not line up."""
    rows = labelled_rows(1, V, *pair)

    def shifted(tensor: Tensor, offset: int) -> Tensor:
        buffer = torch.full((tensor.numel() + offset,), torch.nan, dtype=tensor.dtype)
        buffer[offset:] = tensor.flatten()
        return buffer.to(gpu.device)[offset:].view(tensor.shape)

    draft, target = shifted(rows.draft, offsets[0]), shifted(rows.target, offsets[1])
    ids, ones = on(gpu, rows.ids, torch.ones(6))
    _, ce, l1, gradient = OPS.weighted_fwd(draft, target, ids, None, ones, ones, True)
    for i in range(6):
        p, q = oracle.softmax(rows.draft[i]), oracle.softmax(rows.target[i])
        where = f"{rows.regimes[i]} V={V} {pair_name(pair)} {offsets}"
        expected = oracle.cross_entropy(p, int(rows.ids[i]))
        assert float(ce[i]) == pytest.approx(expected, rel=1e-5, abs=1e-30), where
        assert float(l1[i]) == pytest.approx(oracle.l1_distance(p, q), abs=2e-6), where
        if not oracle.unresolved(p, q).any():
            true = oracle.cross_entropy_gradient(p, int(rows.ids[i])) + oracle.l1_gradient(p, q)
            error = (gradient[i].cpu().double() - true).norm() / true.norm()
            assert float(error) <= TOLERANCES[pair[0]].gradient, where


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [7, 257, 4097, 4096, 49152])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_in_place_writes_the_same_gradient_and_nothing_beside_it(gpu, V, dtype, offset):
    if V == 49152 and offset == 1:
        pytest.skip("a misaligned row takes the path of 4096")
    N = 3
    width = (V + offset + 9) // 8 * 8
    buffer = torch.full((N, width), 7.0, dtype=dtype)
    buffer[:, offset : offset + V] = normal(1, N, V, scale=2).to(dtype)
    target = normal(2, N, V, scale=2).to(dtype)
    ids, a, b = torch.arange(N) % V, torch.full((N,), 0.3), torch.full((N,), 0.7)
    active = torch.tensor([True, False, True])
    buffer, target, ids, active, a, b = on(gpu, buffer, target, ids, active, a, b)
    view = buffer[:, offset : offset + V]
    fresh = OPS.weighted_fwd(view, target, ids, active, a, b, True)[1:]
    in_place = (*OPS.weighted_inplace_(view, target, ids, active, a, b)[1:], view)
    # A fresh gradient may be aligned where the buffer is not; then other columns go together.
    alike = gpu.plan(view, target, fresh[2])[0] == gpu.plan(view, target, view)[0]
    for actual, expected in zip(in_place, fresh):
        if alike:
            assert torch.equal(actual, expected), f"V={V} {dtype} offset={offset}"
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-6)
    assert (buffer[:, :offset] == 7).all() and (buffer[:, offset + V :] == 7).all()


# --- The other kernels ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("count", [1, 7, 4096, 100003])
@pytest.mark.parametrize("factor", [1.0, 3.0, 0.37])
def test_scaling_a_gradient_rounds_once(gpu, count, dtype, factor):
    gradient = normal(5, count).to(dtype)
    expected = (gradient.double() * torch.tensor(factor).double()).to(f32).to(dtype)
    on_device, upstream = on(gpu, gradient, torch.tensor(factor))
    assert torch.equal(OPS.weighted_bwd(on_device, upstream).cpu(), expected)
    assert torch.equal(on_device.cpu(), gradient)
    OPS.weighted_bwd_(on_device, upstream)
    assert torch.equal(on_device.cpu(), expected)


def test_a_factor_of_one_touches_nothing(emulator):
    gradient = normal(5, 100003).to(bf16)
    OPS.weighted_bwd_(gradient, torch.tensor(1.0))
    assert emulator.counters()["scale"]["bytes_written"] == 0
    assert emulator.counters()["scale"]["bytes_read"] < gradient.numel()


@pytest.mark.parametrize("shape", [(0,), (1,), (255,), (1000, 3), (100003,)])
@pytest.mark.parametrize("dtype", [f32, torch.float64], ids=name_of)
def test_ordered_sum_is_a_sum(gpu, shape, dtype):
    values = normal(8, *shape).to(dtype)
    total = OPS.ordered_sum(values.to(gpu.device))
    magnitude = float(values.double().abs().sum(0).max()) if shape[0] else 0.0
    error = float((total.cpu().double() - values.double().sum(0)).abs().max())
    assert error <= 4 * torch.finfo(dtype).eps * magnitude
    assert torch.equal(OPS.ordered_sum(values.to(gpu.device)), total)


def test_a_sum_of_many_equal_numbers_is_rounded_once(gpu):
    assert_sums_of_equal_numbers_are_rounded_once(gpu.device)


# --- Which path, and what it costs ---------------------------------------------------------------


def logits(gpu, V: int, dtype=bf16, N: int = 2) -> tuple[Tensor, Tensor]:
    return tuple(on(gpu, *(normal(seed, N, V).to(dtype) for seed in (1, 2))))


@pytest.mark.parametrize("V", CLUSTERS)
def test_rows_of_real_vocabularies_are_held_by_the_smallest_cluster(gpu, V):
    draft, target = logits(gpu, V)
    cluster, units, shared_bytes = gpu.plan(draft, target, draft)
    if not gpu.is_emulated and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no clusters before compute capability 9.0")
    assert cluster == CLUSTERS[V]
    assert cluster * units * 8 >= V and (cluster - 1) * units * 8 < V
    assert 2 * (shared_bytes + 1024) <= 228 * 1024  # two blocks on a multiprocessor


def test_rows_that_do_not_qualify_go_by_the_portable_path(gpu):
    draft, target = logits(gpu, 4096)
    assert gpu.plan(draft, target, draft)[0] == 1
    for what, operands in {
        "no target": (draft, None, None),
        "two dtypes": (draft, target.float(), None),
        "columns that are no multiple of 8": tuple(x[:, :4090] for x in (draft, target)),
        "a misaligned row": (draft[:, 8:-8], target[:, 1:-15], None),
        "a misaligned gradient": (draft[:, 8:-8], target[:, 8:-8], draft[:, 4:-12]),
        "rows at odd strides": tuple(
            torch.zeros(2, 4097, dtype=bf16, device=gpu.device)[:, :4096] for _ in range(2)
        ),
        "float32 rows too large for a cluster": logits(gpu, 262144, f32, N=1),
    }.items():
        assert gpu.plan(*operands)[0] == 0, what


def test_devices_without_clusters_go_by_the_portable_path(emulator, gpu):
    draft, target = logits(gpu, 4096)
    emulator.set_device(architecture=80, shared_bytes=167936)
    assert gpu.plan(draft, target)[0] == 0
    assert_accurate(4096, (bf16, bf16), "fused")
    assert "resident" not in emulator.counters()


def test_a_device_that_holds_no_cluster_goes_by_the_portable_path(emulator, gpu):
    emulator.set_max_clusters(0)
    assert_accurate(4096, (bf16, bf16), "fused")
    assert "resident" not in emulator.counters()


def measured(emulator, draft: Tensor, target: Tensor, gradient: bool) -> dict[str, dict]:
    N = draft.shape[0]
    emulator.reset_counters()
    ids, ones = torch.arange(N), torch.ones(N)
    OPS.weighted_fwd(draft, target, ids, None, ones, ones, gradient)
    return emulator.counters()


@pytest.mark.parametrize("V", CLUSTERS)
def test_the_row_resident_path_moves_each_byte_once(emulator, gpu, V):
    draft, target = logits(gpu, V, N=MAX_CLUSTERS + 1)
    pairs = draft.numel()
    for gradient, floor in ((True, 6), (False, 4)):
        counters = measured(emulator, draft, target, gradient)
        moved = sum(c["bytes_read"] + c["bytes_written"] for c in counters.values())
        assert set(counters) == {"resident", "ordered_sum"}
        assert floor <= moved / pairs <= 1.01 * floor
        assert counters["resident"]["exponentials"] / pairs <= 3


def test_only_active_rows_are_read(emulator, gpu):
    V, N = 49152, 8
    draft, target = logits(gpu, V, N=N)
    ids, ones = torch.arange(N), torch.ones(N)
    active = torch.arange(N) % 4 == 0
    emulator.reset_counters()
    OPS.weighted_fwd(draft, target, ids, active, ones, ones, True)
    counters = emulator.counters()["resident"]
    assert counters["bytes_read"] <= 1.01 * 4 * V * int(active.sum())
    assert counters["bytes_written"] <= 1.01 * 2 * V * N


def test_the_portable_path_moves_fourteen_bytes(emulator, gpu):
    """Two visits to both rows and a third that writes; what is left over is per row and split."""
    V = 151937
    draft, target = logits(gpu, V, N=4)
    counters = measured(emulator, draft, target, True)
    pairs = draft.numel()
    visits = {"statistics": 4, "distance": 4, "gradient": 6}
    for kernel, floor in visits.items():
        moved = counters[kernel]["bytes_read"] + counters[kernel]["bytes_written"]
        assert floor <= moved / pairs <= 1.01 * floor, kernel
    assert sum(c["exponentials"] for c in counters.values()) / pairs <= 7


def test_large_matrices_are_taken_in_groups_that_the_cache_holds(emulator, gpu):
    V, N = 4097, 40
    draft, target = logits(gpu, V, N=N)
    expected = OPS.weighted_fwd(draft, target, *(torch.arange(N), None), *[torch.ones(N)] * 2, True)
    for kernel, launches in (("statistics", 2), ("gradient", 1)):
        assert emulator.counters()[kernel]["launches"] == launches
    emulator.set_device(l2_bytes=2 * 16 * V * 4)  # both operands of 16 rows, in half of it
    emulator.reset_counters()
    actual = OPS.weighted_fwd(draft, target, *(torch.arange(N), None), *[torch.ones(N)] * 2, True)
    for kernel, launches in (("statistics", 6), ("gradient", 3)):
        assert emulator.counters()[kernel]["launches"] == launches
    for x, y in zip(actual, expected):
        assert torch.equal(x, y)


# --- Schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [4097, 49152])
def test_the_order_of_threads_blocks_and_copies_changes_no_bit(emulator, gpu, V):
    rows = labelled_rows(2, V, bf16)
    active = torch.tensor([True, True, False, True, True, True])
    ones = torch.ones(6)
    results = []
    for seed in range(6):
        emulator.set_seed(seed)
        results.append(
            OPS.weighted_fwd(rows.draft, rows.target, rows.ids, active, ones, ones, True)
        )
    for other in results[1:]:
        for x, y in zip(other, results[0]):
            assert torch.equal(x, y)


@pytest.mark.parametrize("clusters", [1, 2, 5, 64])
def test_the_number_of_clusters_changes_no_bit(emulator, gpu, clusters):
    draft, target = logits(gpu, 49152, N=5)
    ids, ones = torch.arange(5), torch.ones(5)
    expected = OPS.weighted_fwd(draft, target, ids, None, ones, ones, True)
    emulator.set_max_clusters(clusters)
    for x, y in zip(OPS.weighted_fwd(draft, target, ids, None, ones, ones, True), expected):
        assert torch.equal(x, y)


@pytest.mark.parametrize("V", [257, 4096, 49152])
def test_a_row_does_not_know_its_neighbours_or_its_place(gpu, V):
    N = 9
    draft, target = on(gpu, *(normal(seed, N, V, scale=2).to(bf16) for seed in (1, 2)))
    ids, ones = torch.arange(N, device=gpu.device), torch.ones(N, device=gpu.device)
    together = OPS.weighted_fwd(draft, target, ids, None, ones, ones, True)[1:]
    step = 8 if V % 8 else 1  # rows at the same distance from a boundary
    for i in range(0, N, step):
        one = slice(i, i + 1)
        alone = OPS.weighted_fwd(
            draft[one].clone(), target[one].clone(), ids[one], None, ones[one], ones[one], True
        )
        for x, y in zip(together, alone[1:]):
            assert torch.equal(x[one], y), i


def test_every_synchronisation_is_executed_and_its_absence_noticed(emulator):
    assert mutate_cuda.executed_sites(emulator) == mutate_cuda.sites_in_sources()
    found = mutate_cuda.survey(emulator)
    missed = [mutation for mutation, detection in found.items() if detection is None]
    assert not missed, f"nothing shows that these do nothing: {missed}"


# --- The whole objective -------------------------------------------------------------------------


def on_device(gpu, made):
    for name, value in vars(made).items():
        moved = value.detach().to(gpu.device).requires_grad_(value.requires_grad)
        setattr(made, name, moved)
    return made


@pytest.mark.parametrize("inplace_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("V", [33, 1000])
def test_the_objective_and_its_gradients(gpu, V, dtype, inplace_grad):
    made = outputs(7, (2, 3, 4, V), dtype)
    expected = oracle.objective(made, **OBJECTIVE)
    made = on_device(gpu, made)
    leaf = made.draft_logits
    made.draft_logits = leaf * 1
    loss, terms = compute_dspark_loss(
        outputs=made, return_terms=True, inplace_grad=inplace_grad, **OBJECTIVE
    )
    (loss * 2).backward()
    tolerance = TOLERANCES[dtype]
    assert float(loss.detach()) == pytest.approx(expected.loss, rel=tolerance.sums)
    for name, value in expected.terms.items():
        torch.testing.assert_close(
            terms[name].double().cpu(),
            torch.as_tensor(value, dtype=torch.float64),
            rtol=tolerance.sums,
            atol=tolerance.sums,
            msg=lambda message, name=name: f"{name}: {message}",
        )
    error = (leaf.grad.cpu().double() - 2 * expected.draft_gradient).norm()
    assert float(error) <= 2 * tolerance.gradient * float(expected.draft_gradient.norm())
    confidence = made.confidence_pred.grad.cpu().double() - 2 * expected.confidence_gradient
    assert float(confidence.norm()) <= 2e-6 * float(expected.confidence_gradient.norm())


# Operations that look at a tensor's values on the host, whatever device it is on.
HOST_READS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "allclose"}


def host_reads(run: Callable[[], object]) -> set[str]:
    """Those that are executed, in the bodies of the custom ops too."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run()
    return HOST_READS & {event.name.removeprefix("aten::") for event in profile.events()}


@pytest.mark.parametrize("inplace_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_step_looks_at_no_value_on_the_host(emulator, dtype, inplace_grad, monkeypatch):
    made = outputs(7, dtype=dtype)
    leaf = made.draft_logits
    meter = dspark_ext.AcceptanceMeter(block_size=4)
    hidden = normal(8, *leaf.shape[:-1], 16).to(dtype).requires_grad_()
    from_hidden = dspark_ext.DSparkLinearOutput(
        hidden,
        normal(9, leaf.shape[-1], 16).to(dtype).requires_grad_(),
        made.target_ids,
        made.eval_mask,
        made.block_keep_mask,
        made.confidence_pred,
        target_hidden=hidden.detach() + 1,
    )

    def no_copy(*arguments: object) -> None:
        raise AssertionError("a tensor's values were copied to the host")

    def run() -> None:
        made.draft_logits = leaf * 1
        loss, terms = compute_dspark_loss(
            outputs=made, return_terms=True, inplace_grad=inplace_grad, **OBJECTIVE
        )
        (loss * 3).backward()
        meter.update(terms)
        loss, terms = dspark_ext.compute_dspark_linear_loss(
            outputs=from_hidden, return_terms=True, **OBJECTIVE
        )
        (loss * 3).backward()
        meter.update(terms)
        log_prob = dspark_ext.token_log_prob(leaf, made.target_ids, active=made.eval_mask)
        ce, l1 = dspark_ext.ce_and_l1(
            leaf, made.aligned_target_logits, made.target_ids, active=made.eval_mask
        )
        distance = dspark_ext.l1_distance(leaf, made.aligned_target_logits, active=made.eval_mask)
        (ce.sum() + l1.square().sum() + distance.sum() - log_prob.sum()).backward()

    for name in ("tolist", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, no_copy)
    monkeypatch.delenv("DSPARK_EXT_CHECK", raising=False)
    assert host_reads(run) == set()
    monkeypatch.setenv("DSPARK_EXT_CHECK", "1")
    assert "item" in host_reads(run), "a read would not be seen"


def test_float64_takes_the_torch_path_on_a_device():
    device = torch.device("cuda")
    if _backend.cuda_architectures() is None:
        pytest.skip("this build has no CUDA kernels")
    assert _backend.has_kernels(device, bf16, f32)
    assert not _backend.uses_kernel("auto", device, torch.float64)
    with pytest.raises(RuntimeError, match="float64"):
        _backend.uses_kernel("kernel", device, torch.float64)


@pytest.mark.parametrize("op", ["log_softmax", "gradient"])
def test_more_strides_than_a_kernel_takes_are_refused_with_a_way_out(gpu, op):
    x = torch.zeros([2] * 8 + [16], device=gpu.device)
    x = x.repeat_interleave(2, -2)[..., ::2, :].permute(7, 6, 5, 4, 3, 2, 1, 0, 8)
    ids = torch.zeros(x.shape[:-1], dtype=torch.int64, device=gpu.device)
    with pytest.raises(ValueError, match="contiguous"):
        dspark_ext.token_log_prob(x, ids) if op == "log_softmax" else dspark_ext.ce_and_l1(
            x, x, ids
        )
