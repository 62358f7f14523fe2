"""Inputs that broke other loss kernels, each as the whole kind of fault it stands for.

``results`` runs every public function on one input, so that a case holds for all of them at once.
Faults of a kind that has a file of its own are there: overwritten or shared memory, kept graphs,
double backward and the teacher's gradient in test_autograd; strides and thread counts of the
kernels in test_kernels; several ranks in test_distributed; a process's first call in test_memory.
"""

from __future__ import annotations

import itertools
import math
from typing import Callable

import oracle
import pytest
import torch
from conftest import TOLERANCES, relative_error
from inputs import DTYPES, USUAL, labelled_rows, name_of, normal, outputs, replace
from torch import Tensor

from dspark_ext import (
    DSparkForwardOutput,
    DSparkLinearOutput,
    ce_and_l1,
    compute_dspark_linear_loss,
    compute_dspark_loss,
    l1_distance,
    token_log_prob,
)

f32, bf16, f16, f64 = DTYPES
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def results(
    made: DSparkForwardOutput, impl: str, inplace: bool = False, **options
) -> dict[str, Tensor]:
    """Values, terms and gradients of every public function; per-row ones ``[B, A, K, ...]``."""
    target, ids, active = made.aligned_target_logits, made.target_ids, made.eval_mask
    scale = 1024 if made.draft_logits.dtype == f16 else 1
    found = {}

    def backward(name: str, value: Tensor, draft: Tensor) -> None:
        (found[name],) = torch.autograd.grad(value * scale, draft, retain_graph=True)

    # Expanding a leaf keeps its strides, so the functions see the case's own layout.
    draft = made.draft_logits.detach().requires_grad_()
    wanted = replace(made, draft_logits=draft * 1 if inplace else draft)
    loss, terms = compute_dspark_loss(
        outputs=wanted,
        return_terms=True,
        impl=impl,
        inplace_grad=inplace,
        **{**USUAL, **options},
    )
    found.update({f"terms.{name}": term for name, term in terms.items()}, loss=loss.detach())
    backward("loss.gradient", loss, draft)
    if wanted.confidence_pred is not None:
        backward("loss.confidence_gradient", loss / scale, wanted.confidence_pred)
    if target is not None:
        ce, l1 = ce_and_l1(draft, target, ids, active=active, impl=impl)
        found.update(ce=ce.detach(), l1=l1.detach())
        backward("ce_and_l1.gradient", (ce + 2 * l1).sum(), draft)
        l1 = l1_distance(draft, target, active=active, impl=impl)
        found["l1_distance"] = l1.detach()
        backward("l1_distance.gradient", l1.sum(), draft)
    log_prob = token_log_prob(draft, ids, active=active, impl=impl)
    found["token_log_prob"] = log_prob.detach()
    backward("token_log_prob.gradient", log_prob.sum(), draft)
    rows_read = draft.detach()[active != 0]
    if draft.shape[-1] <= WIDEST_IDENTITY and rows_read.isfinite().all():
        found.update(linear_results(made, impl, **options))
    return found


WIDEST_IDENTITY = 400


def linear_results(made: DSparkForwardOutput, impl: str, **options) -> dict[str, Tensor]:
    """The linear loss's, with the logits as hidden states of a head that is the identity: a
    product with it is exact, and so is the gradient that comes back through it."""
    hidden = made.draft_logits.detach().requires_grad_()
    scale = 1024 if hidden.dtype == f16 else 1
    operands = {name: getattr(made, name) for name in ("target_ids", "eval_mask")}
    loss, terms = compute_dspark_linear_loss(
        outputs=DSparkLinearOutput(
            draft_hidden=hidden,
            lm_head_weight=torch.eye(hidden.shape[-1], dtype=hidden.dtype),
            block_keep_mask=made.block_keep_mask,
            confidence_pred=made.confidence_pred,
            aligned_target_logits=made.aligned_target_logits,
            **operands,
        ),
        return_terms=True,
        impl=impl,
        chunk_rows=5 + hidden[..., 0].numel() // 4,
        **{**USUAL, **options},
    )
    found = {f"linear.terms.{name}": term for name, term in terms.items()}
    found["linear.loss"] = loss.detach()
    (found["linear.gradient"],) = torch.autograd.grad(loss * scale, hidden)
    return found


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{what}: {name}"


def assert_matches_the_oracle(
    made: DSparkForwardOutput, found: dict[str, Tensor], what: str, **options
) -> None:
    """The loss, its terms and its gradients, and the rows' ce and l1, where ``found`` has them."""
    expected = oracle.objective(made, **{**USUAL, **options})
    dtype = made.draft_logits.dtype
    tolerance = TOLERANCES[dtype]
    scale = 1024 if dtype == f16 else 1
    values = {f"terms.{name}": term for name, term in expected.terms.items()}
    prefixes = ("", "linear.") if "linear.loss" in found else ("",)
    for prefix, (name, value) in itertools.product(
        prefixes, {"loss": expected.loss, **values}.items()
    ):
        actual, value = found[prefix + name], torch.as_tensor(value, dtype=f64)
        assert torch.allclose(
            actual.double(), value, rtol=tolerance.sums, atol=tolerance.sums, equal_nan=True
        ), f"{what}: {prefix}{name} is {actual}, expected {value}"
    for name in ("loss.gradient", "linear.gradient"):
        if name in found:
            error = relative_error(found[name] / scale, expected.draft_gradient)
            assert error <= tolerance.gradient, f"{what}: {name} off by {error:.2e}"


# --- Positions that do not count -----------------------------------------------------------------

ROW = (0, 1, 2)
POISONS = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf, "huge": 6e4}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["draft", "target", "confidence", "everywhere"])
@every_dtype
def test_what_stands_on_an_unsupervised_position_changes_no_bit(dtype, where, poison, impl):
    ordinary = outputs(1, dtype=dtype)
    ordinary.eval_mask[ROW] = False
    poisoned = replace(
        ordinary,
        draft_logits=ordinary.draft_logits.detach().clone(),
        aligned_target_logits=ordinary.aligned_target_logits.clone(),
        confidence_pred=ordinary.confidence_pred.detach().clone(),
    )
    names = {"draft": "draft_logits", "target": "aligned_target_logits"}
    names = {**names, "confidence": "confidence_pred"}
    for name in names.values() if where == "everywhere" else [names[where]]:
        getattr(poisoned, name)[ROW] = POISONS[poison]
    poisoned.confidence_pred.requires_grad_()
    actual = results(poisoned, impl)
    assert_same_bits(actual, results(ordinary, impl), f"seed=1 {dtype} {where} {poison}")
    for name, value in actual.items():
        if name.endswith("gradient"):
            assert not value[ROW].any(), f"{name} of the unsupervised row"


@pytest.mark.parametrize("sentinel", [-1, -100, 33, 2**40, -(2**63)])
def test_ids_of_unsupervised_positions_are_not_read(sentinel, impl):
    ordinary = outputs(2, (2, 3, 4, 33))
    ids = torch.where(ordinary.eval_mask, ordinary.target_ids, sentinel)
    assert not torch.equal(ids, ordinary.target_ids)
    assert_same_bits(
        results(replace(ordinary, target_ids=ids), impl), results(ordinary, impl), str(sentinel)
    )


@every_dtype
def test_an_ignored_label_has_no_cross_entropy_and_keeps_its_weight(dtype, impl):
    ordinary = outputs(3, dtype=dtype, keep=1.0)
    made = replace(ordinary, target_ids=ordinary.target_ids.clone())
    made.target_ids[ROW] = -100
    found, before = results(made, impl), results(ordinary, impl)
    assert found["ce"][ROW] == 0 and found["token_log_prob"][ROW] == 0
    assert not found["token_log_prob.gradient"][ROW].any()
    for name in ("l1", "l1_distance", "l1_distance.gradient", "terms.ce_loss_den", "terms.tau_num"):
        assert torch.equal(found[name], before[name]), name
    assert_matches_the_oracle(made, found, f"seed=3 {dtype}")


@every_dtype
@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_supervised_gives_zeros_and_not_nothing(dtype, inplace, impl):
    made = outputs(4, dtype=dtype)
    made.eval_mask.zero_()
    found = results(made, impl, inplace)
    assert {name for name, value in found.items() if value.any()} == set()
    assert "loss.gradient" in found and "loss.confidence_gradient" in found


@every_dtype
@pytest.mark.parametrize("shape", [(0, 3, 4, 9), (2, 0, 4, 9), (2, 3, 0, 9)], ids=["B", "A", "K"])
@pytest.mark.parametrize("inplace", [False, True])
def test_zero_size_input_gives_a_zero_loss_and_a_zero_size_gradient(shape, dtype, inplace, impl):
    found = results(outputs(5, shape, dtype), impl, inplace)
    assert found["loss"] == 0
    assert found["loss.gradient"].shape == shape
    assert found["loss.confidence_gradient"].shape == shape[:-1]
    assert found["terms.accept_rate_per_pos_num"].tolist() == [0.0] * shape[2]
    assert not any(value.any() for value in found.values())


def test_zero_size_logits_of_any_strides_may_be_overwritten(impl):
    made = outputs(5, (2, 0, 4, 9))
    leaf = torch.zeros(1, 0, 1, 1, requires_grad=True)
    draft = leaf.expand(2, 0, 4, 9) * 1
    draft = draft.as_strided((2, 0, 4, 9), (0, 0, 0, 1))
    made = replace(made, draft_logits=draft)
    compute_dspark_loss(outputs=made, inplace_grad=True, impl=impl, **USUAL).backward()
    assert leaf.grad.shape == leaf.shape


def test_a_dropped_block_counts_everywhere_but_in_tau(impl):
    kept = outputs(6, keep=1.0)
    kept.block_keep_mask.fill_(True)
    dropped = replace(kept, block_keep_mask=kept.block_keep_mask.clone())
    dropped.block_keep_mask[0, 1] = False
    found, before = results(dropped, impl), results(kept, impl)
    changed = {name for name in before if not torch.equal(found[name], before[name])}
    tau = {"terms.tau_num", "terms.tau_den"}
    assert changed == tau | {f"linear.{name}" for name in tau}
    assert before["terms.tau_den"] == 6 and found["terms.tau_den"] == 5
    assert_matches_the_oracle(dropped, found, "seed=6")


def test_a_kept_block_without_a_supervised_position_is_not_in_tau(impl):
    made = outputs(7, keep=1.0)
    made.block_keep_mask.fill_(True)
    made.eval_mask[0, 1] = False
    found = results(made, impl)
    assert found["terms.tau_den"] == 5
    assert_matches_the_oracle(made, found, "seed=7")


def test_positions_whose_weight_underflows_still_count_as_accepted(impl):
    made = outputs(8, (2, 3, 7, 33), keep=1.0)
    found = results(made, impl, loss_decay_gamma=0.05)
    assert found["terms.accept_rate_per_pos_den"].tolist() == [6.0] * 7
    assert (found["terms.accept_rate_per_pos_num"] > 0).all()
    assert_matches_the_oracle(made, found, "seed=8", loss_decay_gamma=0.05)


@pytest.mark.parametrize(
    "mask_dtype",
    [torch.uint8, torch.int8, torch.int32, torch.int64, f16, bf16, f32, f64],
    ids=name_of,
)
def test_masks_of_another_dtype_equal_bool(mask_dtype, impl):
    made = outputs(9)
    other = replace(
        made,
        eval_mask=made.eval_mask.to(mask_dtype),
        block_keep_mask=made.block_keep_mask.to(mask_dtype),
    )
    assert_same_bits(results(other, impl), results(made, impl), str(mask_dtype))


def test_a_nonzero_keep_mask_means_true(impl):
    made = outputs(9)
    other = replace(made, block_keep_mask=made.block_keep_mask * -2.5)
    assert_same_bits(results(other, impl), results(made, impl), "block_keep_mask of -2.5")


@pytest.mark.parametrize(
    "id_dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=name_of
)
def test_ids_of_a_narrower_integer_dtype_are_accepted(id_dtype, impl):
    made = outputs(10)
    other = replace(made, target_ids=made.target_ids.to(id_dtype))
    assert_same_bits(results(other, impl), results(made, impl), str(id_dtype))


# --- Logits that are not finite ------------------------------------------------------------------


def rows(draft: Tensor, target: Tensor, ids: list[int], dtype: torch.dtype) -> DSparkForwardOutput:
    """Rows ``[N, V]`` as N blocks of one position, all supervised."""
    N = len(draft)
    return DSparkForwardOutput(
        draft_logits=draft.to(dtype)[None, :, None],
        target_ids=torch.tensor(ids).reshape(1, N, 1),
        eval_mask=torch.ones(1, N, 1, dtype=torch.bool),
        block_keep_mask=torch.ones(1, N, dtype=torch.bool),
        confidence_pred=torch.zeros(
            1, N, 1, dtype=f64 if dtype == f64 else f32, requires_grad=True
        ),
        aligned_target_logits=target.to(dtype)[None, :, None],
    )


@every_dtype
def test_a_single_finite_logit_far_behind_the_first_columns_is_certain(dtype, impl):
    V, label = 151936, 140000
    draft = torch.full((1, V), -math.inf)
    draft[0, label] = 1.5
    found = results(rows(draft, draft, [label], dtype), impl)
    assert found["ce"] == 0 and found["l1"] == 0 and found["token_log_prob"] == 0
    assert found["terms.tau_num"] == 2
    for name, value in found.items():
        assert value.isfinite().all(), name
    assert not found["loss.gradient"].any()


@every_dtype
@pytest.mark.parametrize("V", [9, 257, 6000, 49152])
def test_columns_of_minus_infinity_have_no_probability(V, dtype, impl):
    """A leading stretch, a trailing one, every other column, and a label among them."""
    draft, target = normal(11, 4, V, scale=2), normal(12, 4, V, scale=2)
    draft[0, : V - 3] = target[0, : V // 2] = -math.inf
    draft[1, 4:] = target[1, V // 2 :] = -math.inf
    draft[2, ::2] = target[2, 1::2] = -math.inf
    draft[3, 1] = -math.inf
    made = rows(draft, target, [V - 1, 2, 1, 2], dtype)
    found = results(made, impl)
    assert_matches_the_oracle(made, found, f"seed=11 V={V} {dtype}")
    disjoint = found["l1"].flatten()[2]
    assert 2 - TOLERANCES[dtype].l1 <= disjoint <= 2
    impossible = rows(draft[3:], target[3:], [1], dtype)
    assert results(impossible, impl)["ce"].item() == math.inf


@every_dtype
@pytest.mark.parametrize("V", [9, 6000])
@pytest.mark.parametrize("values", ["all_minus_infinity", "one_plus_infinity"])
def test_a_row_without_a_distribution_is_nan_as_in_pytorch(values, V, dtype, impl):
    draft = normal(13, 3, V)
    if values == "all_minus_infinity":
        draft[1] = -math.inf
    else:
        draft[1, V // 2] = math.inf
    assert torch.nn.functional.cross_entropy(draft[1:2], torch.tensor([0])).isnan()
    found = results(rows(draft, normal(14, 3, V), [0, 0, 0], dtype), impl)
    ordinary = results(rows(normal(13, 3, V), normal(14, 3, V), [0, 0, 0], dtype), impl)
    for name in ("ce", "l1", "token_log_prob", "l1_distance", "ce_and_l1.gradient"):
        value, before = found[name][0], ordinary[name][0]
        assert value[1].isnan().all(), name
        assert torch.equal(value[::2], before[::2]), name


# Which sums contain position (0, 1, 2) of the draft, of the teacher, of the confidence.
_ACCEPT = {"tau_num", "accept_rate_per_pos_num", "confidence_abs_error_num", "confidence_bias_num"}
_ACCEPT |= {"confidence_cumprod_bias_num"}
NAN_TERMS = {
    "draft": {"loss", "ce_loss", "l1_loss", "confidence_loss", *_ACCEPT},
    "target": {"loss", "l1_loss", "confidence_loss", *_ACCEPT},
    "confidence": {
        "loss",
        "confidence_loss",
        "confidence_abs_error_num",
        "confidence_bias_num",
        "confidence_cumprod_bias_num",
    },
}


@every_dtype
@pytest.mark.parametrize("where", NAN_TERMS)
def test_nan_on_a_supervised_position_is_nan_there_and_nowhere_else(where, dtype, impl):
    ordinary = outputs(15, (2, 3, 4, 2100), dtype, keep=1.0)
    ordinary.block_keep_mask.fill_(True)
    made = replace(
        ordinary,
        draft_logits=ordinary.draft_logits.detach().clone(),
        aligned_target_logits=ordinary.aligned_target_logits.clone(),
        confidence_pred=ordinary.confidence_pred.detach().clone(),
    )
    if where == "confidence":
        made.confidence_pred[ROW] = math.nan
    else:
        name = {"draft": "draft_logits", "target": "aligned_target_logits"}[where]
        getattr(made, name)[ROW][7] = math.nan
    made.confidence_pred.requires_grad_()
    found, before = results(made, impl), results(ordinary, impl)

    assert found["loss"].isnan()
    with_nan = {n.removeprefix("terms.") for n in found if "terms." in n and found[n].isnan().any()}
    assert with_nan == NAN_TERMS[where]
    per_position = found["terms.accept_rate_per_pos_num"].isnan().tolist()
    assert per_position == [False, False, where != "confidence", False]

    others = torch.ones(2, 3, 4, dtype=torch.bool)
    others[ROW] = False
    touched = {
        "draft": {"ce", "l1", "l1_distance", "token_log_prob"},
        "target": {"l1", "l1_distance"},
        "confidence": set(),
    }[where]
    gradients = {
        "draft": {f"{n}.gradient" for n in ("loss", "ce_and_l1", "l1_distance", "token_log_prob")},
        "target": {f"{n}.gradient" for n in ("loss", "ce_and_l1", "l1_distance")},
        "confidence": set(),
    }[where] | {"loss.confidence_gradient"}
    for name, value in found.items():
        if value.shape[:3] != (2, 3, 4):
            continue
        assert torch.equal(value[others], before[name][others]), name
        if name in touched | gradients:
            assert value[ROW].isnan().all(), name
        else:
            assert torch.equal(value, before[name]), name


@every_dtype
def test_nan_in_a_supervised_hidden_state_is_nan_there_and_nowhere_else(dtype, impl):
    ordinary = outputs(15, dtype=dtype, keep=1.0)
    ordinary.block_keep_mask.fill_(True)
    made = replace(ordinary, draft_logits=ordinary.draft_logits.detach().clone())
    made.draft_logits[ROW][7] = math.nan  # in linear_results a hidden state
    found, before = linear_results(made, impl), linear_results(ordinary, impl)
    assert found["linear.loss"].isnan()
    with_nan = {n.split(".")[-1] for n, v in found.items() if "terms" in n and v.isnan().any()}
    assert with_nan == NAN_TERMS["draft"]
    others = torch.ones(2, 3, 4, dtype=torch.bool)
    others[ROW] = False
    gradient = found["linear.gradient"]
    assert gradient[ROW].isnan().all()
    assert torch.equal(gradient[others], before["linear.gradient"][others])


@pytest.mark.parametrize("where", ["mask", "denominators"])
@pytest.mark.parametrize("dtype", [f32, f16], ids=name_of)
def test_a_weight_that_is_nan_is_no_silent_zero(where, dtype, impl):
    made, options = outputs(15, dtype=dtype, keep=1.0), {}
    if where == "mask":
        made.eval_mask = made.eval_mask.float()
        made.eval_mask[ROW] = math.nan
    else:
        options["denominators"] = torch.tensor(math.nan)
    found = results(made, impl, **options)
    assert found["loss"].isnan() and found["loss.gradient"][ROW].isnan().all()
    assert found["linear.loss"].isnan() and found["linear.gradient"][ROW].isnan().all()


def test_a_teacher_that_is_only_reported_on_cannot_poison_the_gradient(impl):
    made = outputs(16, keep=1.0)
    made.aligned_target_logits[ROW] = math.nan
    options = {"l1_loss_alpha": 0.0}
    found = results(made, impl, **options)
    expected = oracle.objective(outputs(16, keep=1.0), **{**USUAL, **options}).draft_gradient
    assert relative_error(found["loss.gradient"], expected) <= TOLERANCES[f32].gradient


# --- Logits near the edges of arithmetic ---------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("V", [2, 257, 32003])
def test_equal_distributions_have_no_distance_and_no_gradient_of_it(V, dtype, impl):
    draft = normal(17, 3, V, scale=4).to(dtype)
    for target in (draft.clone(), draft.double(), draft.float() if dtype != f64 else draft):
        made = rows(draft, draft, [0, 1, 1], dtype)
        made.aligned_target_logits = target[None, :, None]
        found = results(made, impl, ce_loss_alpha=0.0)
        assert not found["l1"].any() and not found["l1_distance.gradient"].any(), target.dtype
        assert not found["loss.gradient"].any() and not found["terms.l1_loss"].any()
        assert found["terms.accept_rate_per_pos_num"].tolist() == [3.0]


@every_dtype
def test_disjoint_distributions_are_at_most_two_apart(dtype, impl):
    N, V = 64, 151
    draft = torch.full((N, V), -60.0)
    target = draft.clone()
    draft[torch.arange(N), torch.arange(N)] = 60
    target[torch.arange(N), torch.arange(N) + 80] = 60
    noise = normal(18, N, V)
    for x, t in ((draft, target), (draft + noise, target - noise)):
        found = results(rows(x, t, list(range(N)), dtype), impl)
        assert (found["l1"] <= 2).all() and (found["l1"] > 1.999).all()
        assert (found["l1_distance"] <= 2).all()
        accept = found["terms.accept_rate_per_pos_num"]
        assert 0 <= accept <= 64e-3
        assert found["terms.l1_loss"] <= 2


# An fp16 gradient over many columns is below the smallest number that fp16 has all digits of.
@pytest.mark.parametrize("dtype,V", [(bf16, 300), (bf16, 32003), (bf16, 151936), (f16, 300)])
def test_gradients_of_nearly_equal_distributions_are_exact_to_one_rounding(dtype, V, impl):
    draft = normal(19, 4, V, scale=2).to(dtype)
    made = rows(draft, draft.double() + normal(20, 4, V, scale=0.05), [1, 2, 3, 4], dtype)
    for options in ({}, {"ce_loss_alpha": 0.0}):
        found = results(made, impl, **options)
        assert 0.97 < float(found["terms.accept_rate_per_pos_num"]) / 4 < 0.99
        assert_matches_the_oracle(made, found, f"seed=19 V={V} {dtype} {options}", **options)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("alphas", [(1.0, 0.0), (0.3, 0.7)], ids=["ce", "ce_and_l1"])
@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=name_of)
def test_confident_rows_keep_the_digits_of_their_loss_and_label_gradient(
    dtype, alphas, inplace, impl
):
    V, ids = 151936, [7, 70000, 151935]
    draft = normal(21, 3, V)
    for i, (label, height) in enumerate(zip(ids, (20, 30, 60))):
        draft[i, label] = height
    made = rows(draft, normal(22, 3, V), ids, dtype)
    options = {"ce_loss_alpha": alphas[0], "l1_loss_alpha": alphas[1]}
    expected = oracle.objective(made, **{**USUAL, **options}).draft_gradient
    found = results(made, impl, inplace, **options)
    relative = {f32: 1e-5, bf16: 2.0**-8, f64: 1e-11}[dtype]
    for i, label in enumerate(ids):
        row = oracle.softmax(made.draft_logits[0, i, 0])
        ce = oracle.cross_entropy(row, label)
        label_gradient = float(expected[0, i, 0, label])
        assert ce > 0 and label_gradient != 0
        what = f"seed=21 {dtype} label {20 + 10 * i} above"
        for actual in (found["ce"][0, i, 0], -found["token_log_prob"][0, i, 0]):
            assert actual.item() == pytest.approx(ce, rel=min(relative, 1e-5), abs=0), what
        actual = found["loss.gradient"][0, i, 0, label].item()
        assert actual == pytest.approx(label_gradient, rel=relative, abs=0), what
        rows_gradient = oracle.cross_entropy_gradient(row, label)[label].item()
        actual = -found["token_log_prob.gradient"][0, i, 0, label].item()
        assert actual == pytest.approx(rows_gradient, rel=relative, abs=0), what


@every_dtype
@pytest.mark.parametrize("height", [200.0, 1e4, 6e4])
def test_saturated_confidence_gives_a_finite_loss_and_gradient(height, dtype, impl):
    made = outputs(23, dtype=dtype)
    signs = torch.where(torch.arange(24).reshape(2, 3, 4) % 2 == 0, 1.0, -1.0)
    confidence = (signs * height).to(made.confidence_pred.dtype).requires_grad_()
    made = replace(made, confidence_pred=confidence)
    found = results(made, impl)
    assert_matches_the_oracle(made, found, f"seed=23 c=+-{height}")
    expected = oracle.objective(made, **USUAL).confidence_gradient
    assert relative_error(found["loss.confidence_gradient"], expected) <= 2 * TOLERANCES[dtype].l1


@every_dtype
@pytest.mark.parametrize("offset", [2.0**12, -(2.0**12)])
def test_a_large_common_offset_changes_nothing(offset, dtype, impl):
    # Multiples of 8 keep their differences under this offset in every dtype but bf16 and fp16.
    step = {bf16: 32, f16: 4}.get(dtype, 1 / 64)
    draft, target = ((normal(s, 4, 300, scale=3) / step).round() * step for s in (24, 25))
    ids = [0, 1, 2, 3]
    moved = results(rows(draft + offset, target - offset, ids, dtype), impl)
    assert_same_bits(moved, results(rows(draft, target, ids, dtype), impl), f"{dtype} {offset}")


@pytest.mark.parametrize("own_head", [True, False])
def test_nothing_of_a_teacher_with_a_head_gets_a_gradient(own_head, impl):
    made = outputs(37, dtype=f64)
    rows_, expected = made.draft_logits.detach(), oracle.objective(made, **USUAL).draft_gradient
    weight = torch.eye(33, dtype=f64).requires_grad_()
    teacher = made.aligned_target_logits.requires_grad_()
    head = weight.detach().clone().requires_grad_() if own_head else None
    loss = compute_dspark_linear_loss(
        outputs=DSparkLinearOutput(
            made.draft_logits,
            weight,
            made.target_ids,
            made.eval_mask,
            made.block_keep_mask,
            made.confidence_pred,
            target_hidden=teacher,
            target_lm_head_weight=head,
        ),
        impl=impl,
        **USUAL,
    )
    loss.backward()
    assert teacher.grad is None and (head is None or head.grad is None)
    # A head that both share is differentiated as the draft's alone.
    product = expected.flatten(0, 2).t() @ rows_.flatten(0, 2)
    assert relative_error(weight.grad, product) <= TOLERANCES[f64].gradient


# --- Layouts -------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns_of_a_wider_buffer": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every_second_position": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "last_dimension_strided": lambda x: x.transpose(-1, 0).contiguous().transpose(-1, 0),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_strided_inputs_equal_contiguous_ones(layout, dtype, inplace, impl):
    made = outputs(26, dtype=dtype)
    arrange = LAYOUTS[layout]
    strided = replace(
        made,
        draft_logits=arrange(made.draft_logits.detach()),
        aligned_target_logits=arrange(made.aligned_target_logits),
        target_ids=arrange(made.target_ids[..., None]).squeeze(-1),
        eval_mask=arrange(made.eval_mask[..., None]).squeeze(-1),
        confidence_pred=arrange(made.confidence_pred.detach()[..., None])
        .squeeze(-1)
        .requires_grad_(),
    )
    assert strided.draft_logits.stride() != made.draft_logits.stride()
    actual, expected = results(strided, impl, inplace), results(made, impl, inplace)
    assert_same_bits(actual, expected, f"seed=26 {layout} {dtype}")


@every_dtype
def test_an_expanded_target_equals_a_copied_one(dtype, impl):
    made = outputs(27, dtype=dtype)
    expanded = made.aligned_target_logits[:1, :1].expand_as(made.aligned_target_logits)
    assert expanded.stride()[:2] == (0, 0)
    assert_same_bits(
        results(replace(made, aligned_target_logits=expanded), impl),
        results(replace(made, aligned_target_logits=expanded.contiguous()), impl),
        "expanded target",
    )


def allocated_by(run: Callable[[], object]) -> int:
    """Bytes of all tensors that are made, in the bodies of the custom ops too."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    return sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())


@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded", "offset_by_one"])
def test_logits_are_read_where_they_stand_unless_their_columns_are_apart(layout):
    arrange = {
        **LAYOUTS,
        "expanded": lambda x: x[:1].expand_as(x),
        "offset_by_one": lambda x: torch.cat([x[0, 0, 0, :1], x.flatten()])[1:].view_as(x),
    }[layout]
    made = outputs(38, (4, 8, 8, 4099), requires_grad=False)
    logits = made.draft_logits.nbytes + made.aligned_target_logits.nbytes
    made = replace(
        made,
        draft_logits=arrange(made.draft_logits),
        aligned_target_logits=arrange(made.aligned_target_logits),
    )
    copies = 1 if layout == "last_dimension_strided" else 0
    rows_of = (made.draft_logits, made.aligned_target_logits, made.target_ids)
    for run in (
        lambda: compute_dspark_loss(outputs=made, impl="kernel", **USUAL),
        lambda: ce_and_l1(*rows_of, impl="kernel"),
    ):
        assert copies <= allocated_by(run) / logits <= copies + 0.1


@pytest.mark.parametrize("V", [7, 257, 32003, 151937])
@every_dtype
def test_rows_at_any_alignment_match_the_oracle(V, dtype, impl):
    buffers = [normal(seed, 1 + 5 * V, scale=2).to(dtype) for seed in (28, 29)]
    draft, target = (buffer[1:].view(5, V) for buffer in buffers)
    made = rows(draft, target, [0, 1, 2, 3, 4], dtype)
    assert made.draft_logits.storage_offset() == 1
    assert_matches_the_oracle(made, results(made, impl), f"seed=28 V={V} {dtype}")


@pytest.mark.parametrize("leading", [(), (5,), (1,), (2, 3), (2, 1, 3, 2)])
def test_rows_may_have_any_number_of_leading_dimensions(leading, impl):
    flat = labelled_rows(30, 301, f32)
    N = math.prod(leading)
    index = torch.arange(N) % 6
    expected = ce_and_l1(flat.draft[index], flat.target[index], flat.ids[index], impl=impl)
    draft = flat.draft[index].reshape((*leading, 301)).requires_grad_()
    target, ids = flat.target[index].reshape((*leading, 301)), flat.ids[index].reshape(leading)
    ce, l1 = ce_and_l1(draft, target, ids, impl=impl)
    assert ce.shape == l1.shape == leading
    assert torch.equal(ce.flatten(), expected[0]) and torch.equal(l1.flatten(), expected[1])
    assert token_log_prob(draft, ids, impl=impl).shape == leading
    (ce + l1).sum().backward()
    assert draft.grad.shape == draft.shape


# --- Sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, bf16], ids=name_of)
def test_rows_more_than_two_to_the_31_elements_apart(dtype):
    # Memory that nobody touches is not there, so this costs two rows and not 2^31 elements.
    V, stride = 4099, 2**31 + 16
    far = [torch.empty(stride + V, dtype=dtype).as_strided((2, V), (stride, 1)) for _ in range(2)]
    near = [normal(seed, 2, V, scale=2).to(dtype) for seed in (31, 32)]
    for apart, together in zip(far, near):
        apart.copy_(together)
    ids = [11, 4098]
    made = rows(*far, ids, dtype)
    assert made.draft_logits.stride(1) == stride
    actual, expected = (results(rows(*pair, ids, dtype), "kernel") for pair in (far, near))
    assert_same_bits(actual, expected, str(dtype))
    a, b = torch.tensor([0.3, 0.4]), torch.tensor([0.6, 0.7])
    fused = torch.ops.dspark_ext
    gradient = fused.weighted_fwd(*near, torch.tensor(ids), None, a, b, True)[-1]
    fused.weighted_inplace_(*far, torch.tensor(ids), None, a, b)
    assert torch.equal(far[0], gradient)


class Produced(torch.autograd.Function):
    """The same memory with a producer, so that it is no leaf; its gradient is not wanted."""

    @staticmethod
    def forward(ctx, x, source):
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return None, None


@pytest.mark.slow
@pytest.mark.parametrize("power", [31, 32])
def test_more_than_two_to_the_31_and_32_logits_in_place(power):
    """Bf16 logits of 151 936 columns, draft and target: nine gigabytes, and seventeen."""
    B, K, V = 1, 7, 151936
    A = 2 ** (power - 20)
    N = B * A * K
    banks = [normal(seed, rows_, V, scale=2).to(bf16) for seed, rows_ in ((33, 64), (34, 56))]
    draft, target = (torch.empty(B, A, K, V, dtype=bf16) for _ in banks)
    for logits, bank in zip((draft, target), banks):
        logits.view(-1, *bank.shape).copy_(bank)
    assert draft.numel() > 2**power
    ids = (torch.arange(N) * 9973 % V).view(B, A, K)
    whole = DSparkForwardOutput(
        draft, ids, torch.ones(B, A, K), torch.ones(B, A), aligned_target_logits=target
    )
    boundary = 2**power // (K * V)  # the block that the logit after the last 2^power is in
    blocks = torch.tensor([0, A // 2 - 1, boundary, boundary + 1, A - 2, A - 1])
    part = replace(
        whole,
        draft_logits=draft[:, blocks].requires_grad_(),
        target_ids=ids[:, blocks],
        eval_mask=whole.eval_mask[:, blocks],
        block_keep_mask=whole.block_keep_mask[:, blocks],
        aligned_target_logits=target[:, blocks],
    )
    denominators = torch.tensor(float(N))
    options = {**USUAL, "loss_decay_gamma": None, "denominators": denominators}
    alone = compute_dspark_loss(outputs=part, **options)
    alone.backward()

    whole.draft_logits = Produced.apply(draft, torch.zeros((), requires_grad=True))
    torch.set_num_threads(2)
    loss, terms = compute_dspark_loss(
        outputs=whole, inplace_grad=True, return_terms=True, **options
    )
    loss.backward()
    assert torch.equal(draft.detach()[:, blocks], part.draft_logits.grad)
    assert loss.isfinite() and terms["tau_den"] == A


# --- Reproducibility -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 2000, 7, 5), (1, 2, 7, 151936)], ids=["rows", "columns"])
def test_loss_and_gradient_have_the_same_bits_on_any_number_of_threads(shape):
    made = outputs(35, shape)
    found = []
    for threads in (1, 2, 3, 1, 2):
        torch.set_num_threads(threads)
        found.append(results(made, "kernel"))
    for other in found[1:]:
        assert_same_bits(other, found[0], f"seed=35 {shape}")


def test_the_same_input_gives_the_same_bits_again(impl):
    made = outputs(36, (2, 8, 7, 4097))
    assert_same_bits(results(made, impl), results(made, impl), "seed=36")
