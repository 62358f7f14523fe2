"""compute_dspark_loss and the reference's building blocks, against the definitions."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from conftest import TOLERANCES, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DTYPES, name_of, normal, outputs, replace

import dspark_ext
from dspark_ext import DSparkForwardOutput, DSparkLoss, compute_dspark_loss, loss

f32, bf16, f16, f64 = DTYPES
USUAL = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.3,
    "l1_loss_alpha": 0.7,
    "confidence_head_alpha": 0.5,
}


def settings_of(**changes: Any) -> dict[str, Any]:
    return {**USUAL, **changes}


def close(actual: Any, expected: Any, tolerance: float) -> bool:
    actual, expected = (torch.as_tensor(v, dtype=f64) for v in (actual, expected))
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=tolerance, atol=tolerance
    )


def assert_matches_the_oracle(
    made: DSparkForwardOutput, options: dict[str, Any], what: str, **keywords: Any
) -> None:
    """Loss, terms and both gradients."""
    expected = oracle.objective(made, **options)
    value, terms = compute_dspark_loss(outputs=made, return_terms=True, **options, **keywords)
    dtype = made.draft_logits.dtype
    tolerance = TOLERANCES[dtype]
    assert value.shape == () and value.dtype == (f64 if dtype == f64 else f32), what
    assert close(value.detach(), expected.loss, tolerance.sums), f"{what}: loss"
    assert terms.keys() == expected.terms.keys(), what
    for name, term in terms.items():
        assert not term.requires_grad and term.dtype == value.dtype, f"{what}: {name}"
        assert close(term, expected.terms[name], tolerance.sums), (
            f"{what}: {name} is {term}, expected {expected.terms[name]}"
        )
    wanted = [v for v in (made.draft_logits, made.confidence_pred) if v is not None]
    scale = 1024.0 if dtype == f16 else 1.0
    gradients = torch.autograd.grad(value * scale, wanted)
    assert gradients[0].dtype == dtype and gradients[0].shape == made.draft_logits.shape, what
    error = relative_error(gradients[0] / scale, expected.draft_gradient)
    assert error <= tolerance.gradient, f"{what}: gradient off by {error:.3e}"
    if made.confidence_pred is not None:
        error = relative_error(gradients[1] / scale, expected.confidence_gradient)
        assert error <= 2 * tolerance.l1, f"{what}: confidence gradient off by {error:.3e}"


# --- The objective -------------------------------------------------------------------------------


@pytest.mark.parametrize("target_dtype", DTYPES, ids=lambda d: f"target-{name_of(d)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_loss_terms_and_gradients_of_every_dtype(dtype, target_dtype, impl):
    made = outputs(1, (2, 3, 4, 301), dtype, target_dtype=target_dtype)
    assert_matches_the_oracle(made, USUAL, f"seed=1 {dtype} {target_dtype} {impl}", impl=impl)


@pytest.mark.parametrize("gamma", [None, 0.0, -1.0, 0.5, 4.0, 1e9])
def test_weights_decay_by_gamma_and_not_at_all_without_one(gamma, impl):
    made = outputs(2, (2, 2, 7, 65))
    options = settings_of(loss_decay_gamma=gamma)
    assert_matches_the_oracle(made, options, f"seed=2 gamma={gamma}", impl=impl)
    if gamma is None or gamma <= 0:
        terms = compute_dspark_loss(outputs=made, return_terms=True, impl=impl, **options)[1]
        assert float(terms["ce_loss_den"]) == float(made.eval_mask.sum())


@pytest.mark.parametrize("confidence", [True, False], ids=["confidence", "no_confidence"])
@pytest.mark.parametrize("alphas", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 3, 4), (1, -1, 1)])
def test_every_weighting_of_the_terms(alphas, confidence, impl):
    made = outputs(3, (2, 2, 3, 65), confidence=confidence)
    names = ("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
    options = settings_of(**dict(zip(names, alphas)))
    assert_matches_the_oracle(made, options, f"seed=3 alphas={alphas} {impl}", impl=impl)


def test_without_a_target_the_loss_is_cross_entropy_and_diagnostics_are_zeros(impl):
    made = replace(outputs(4, confidence=False), aligned_target_logits=None)
    options = settings_of(l1_loss_alpha=0.0)
    assert_matches_the_oracle(made, options, "seed=4 no target", impl=impl)
    terms = compute_dspark_loss(outputs=made, return_terms=True, impl=impl, **options)[1]
    assert terms["accept_rate_per_pos_num"].tolist() == [0.0] * 4
    assert terms["tau_den"] == 0 and terms["l1_loss_den"] == 0


def test_a_target_that_nobody_asks_for_gives_no_diagnostics(impl):
    made = outputs(4, confidence=False)
    options = settings_of(l1_loss_alpha=0.0)
    assert_matches_the_oracle(made, options, "seed=4 unused target", impl=impl)
    terms = compute_dspark_loss(outputs=made, return_terms=True, impl=impl, **options)[1]
    assert float(terms["tau_num"]) == 0 and not terms["accept_rate_per_pos_den"].any()


def test_fractional_masks_weigh_rows_and_sums(impl):
    made = outputs(5, (2, 3, 4, 65))
    mask = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(5))
    made = replace(made, eval_mask=torch.where(mask < 0.3, 0.0, mask))
    assert_matches_the_oracle(made, USUAL, "seed=5 fractional mask", impl=impl)


def test_a_hand_computed_block(impl):
    # p = (1/4, 3/4), q = (1/2, 1/2) at both positions: l1 = 1/2, accept = 3/4, ce = log(4/3).
    draft = torch.tensor([0.25, 0.75], dtype=f64).log().expand(1, 1, 2, 2).clone()
    made = DSparkForwardOutput(
        draft_logits=draft.requires_grad_(),
        target_ids=torch.ones(1, 1, 2, dtype=torch.int64),
        eval_mask=torch.ones(1, 1, 2, dtype=torch.bool),
        block_keep_mask=torch.ones(1, 1, dtype=torch.bool),
        confidence_pred=torch.zeros(1, 1, 2, dtype=f64),  # sigmoid 1/2, error -1/4
        aligned_target_logits=torch.zeros(1, 1, 2, 2, dtype=f64),
    )
    value, terms = compute_dspark_loss(
        outputs=made,
        loss_decay_gamma=1 / math.log(2),  # weights 1 and 1/2
        ce_loss_alpha=1.0,
        l1_loss_alpha=10.0,
        confidence_head_alpha=100.0,
        return_terms=True,
        impl=impl,
    )
    normalise = 1.5 / (1.5 + 1e-6)
    ce, l1, bce = math.log(4 / 3), 0.5, math.log(2)
    by_hand = {
        "loss": (ce + 10 * l1 + 100 * bce) * normalise,
        "ce_loss": ce * normalise,
        "l1_loss": l1 * normalise,
        "confidence_loss": bce * normalise,
        "ce_loss_den": 1.5,
        "l1_loss_den": 1.5,
        "confidence_loss_den": 1.5,
        "accept_rate_per_pos_num": [0.75, 0.75],
        "accept_rate_per_pos_den": [1.0, 1.0],
        "tau_num": 1 + 0.75 + 0.75**2,
        "tau_den": 1.0,
        "confidence_abs_error_num": 1.5 / 4,
        "confidence_bias_num": -1.5 / 4,
        "confidence_cumprod_bias_num": (0.5 - 0.75) + 0.5 * (0.25 - 0.75**2),
        "confidence_diag_den": 1.5,
    }
    assert terms.keys() == by_hand.keys()
    for name, expected in by_hand.items():
        assert close(terms[name], expected, 1e-14), name
    assert close(value.detach(), by_hand["loss"], 1e-14)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(*(st.integers(1, n) for n in (3, 3, 5, 80))),
    dtype=st.sampled_from([f32, bf16, f64]),
    keep=st.floats(0, 1),
    gamma=st.one_of(st.none(), st.floats(0.5, 20)),
    alphas=st.tuples(*[st.sampled_from([0.0, 0.1, 0.9, 2.0])] * 3),
    confidence=st.booleans(),
    impl=st.sampled_from(["kernel", "torch"]),
)
def test_any_combination_of_shape_mask_and_weights(
    seed, shape, dtype, keep, gamma, alphas, confidence, impl
):
    made = outputs(seed, shape, dtype, keep=keep, confidence=confidence)
    options = {
        "loss_decay_gamma": gamma,
        **dict(zip(("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha"), alphas)),
    }
    assert_matches_the_oracle(made, options, "", impl=impl)


# --- Other ways to the same loss -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_both_implementations_agree(dtype):
    made = outputs(6, (2, 3, 4, 301), dtype)
    results = []
    for impl in ("kernel", "torch", "auto"):
        copy = replace(made)
        value, terms = compute_dspark_loss(outputs=copy, return_terms=True, impl=impl, **USUAL)
        value.backward()
        results.append((value.detach(), terms, copy.draft_logits.grad))
    kernel, plain, automatic = results
    assert torch.equal(kernel[0], automatic[0]) and torch.equal(kernel[2], automatic[2])
    sums = TOLERANCES[dtype].sums
    assert close(plain[0], kernel[0], sums)
    for name in kernel[1]:
        assert close(plain[1][name], kernel[1][name], sums), name
    assert relative_error(plain[2], kernel[2]) <= TOLERANCES[dtype].gradient


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=name_of)
@pytest.mark.parametrize("confidence", [True, False], ids=["confidence", "no_confidence"])
def test_numerators_first_and_denominators_first_give_one_loss(dtype, confidence):
    made = outputs(7, (2, 3, 4, 301), dtype, confidence=confidence)
    value = compute_dspark_loss(outputs=made, **USUAL)
    value.backward()

    other = replace(made)
    terms, has_confidence = loss._collect_local_terms(
        outputs=other, loss_decay_gamma=4.0, l1_loss_alpha=0.7
    )
    denominators = loss._all_reduce_loss_denominators(loss_terms=terms, world_size=1)
    composed = loss._build_loss(
        loss_terms=terms,
        global_denominators=denominators,
        ce_loss_alpha=0.3,
        l1_loss_alpha=0.7,
        confidence_head_alpha=0.5,
        has_confidence=has_confidence,
        world_size=1,
    )
    composed.backward()
    assert has_confidence == confidence
    assert close(composed.detach(), value.detach(), TOLERANCES[dtype].sums)
    error = relative_error(other.draft_logits.grad, made.draft_logits.grad)
    assert error <= TOLERANCES[dtype].gradient
    if confidence:
        assert torch.equal(other.confidence_pred.grad, made.confidence_pred.grad)


@pytest.mark.parametrize("return_terms", [True, False])
def test_the_module_is_the_function_with_its_scalars_fixed(return_terms):
    made = outputs(8)
    module = DSparkLoss(**USUAL)
    assert not list(module.parameters()) and not list(module.buffers())
    expected = compute_dspark_loss(outputs=made, return_terms=return_terms, **USUAL)
    actual = module(made, return_terms=return_terms)
    if return_terms:
        for name, term in expected[1].items():
            assert torch.equal(actual[1][name], term), name
        actual, expected = actual[0], expected[0]
    assert torch.equal(actual, expected)
    assert "ce_loss_alpha=0.3" in repr(module)


def test_any_object_with_the_attributes_will_do():
    made = outputs(9)
    other = SimpleNamespace(**vars(made))
    assert torch.equal(
        compute_dspark_loss(outputs=other, **USUAL), compute_dspark_loss(outputs=made, **USUAL)
    )


def test_given_denominators_replace_the_local_one(impl):
    made = outputs(10)
    denominators = torch.tensor(100.0)
    value = compute_dspark_loss(outputs=made, denominators=denominators, impl=impl, **USUAL)
    expected = oracle.objective(made, denominator=100.0, **USUAL)
    assert close(value.detach(), expected.loss, TOLERANCES[f32].sums)
    (gradient,) = torch.autograd.grad(value, made.draft_logits)
    assert relative_error(gradient, expected.draft_gradient) <= TOLERANCES[f32].gradient


def test_micro_batches_of_a_window_sum_to_the_joined_batch(impl):
    parts = [outputs(seed, (2, 3, 4, 65), keep=keep) for seed, keep in ((11, 0.9), (12, 0.2))]
    masks = [part.eval_mask for part in parts]
    denominators = dspark_ext.loss_denominators(masks, 4.0)
    assert close(denominators, sum(oracle.weights(m, 4.0).sum() for m in masks), 1e-6)
    total = sum(
        compute_dspark_loss(outputs=part, denominators=denominators, impl=impl, **USUAL)
        for part in parts
    )
    joined = DSparkForwardOutput(
        **{
            name: torch.cat([getattr(part, name).detach() for part in parts])
            for name in vars(parts[0])
        }
    )
    expected = oracle.objective(joined, **USUAL)
    assert close(total.detach(), expected.loss, TOLERANCES[f32].sums)
    gradients = torch.autograd.grad(total, [part.draft_logits for part in parts])
    assert relative_error(torch.cat(gradients), expected.draft_gradient) <= 5e-6


def test_denominators_of_one_mask_and_of_masks_with_other_block_sizes():
    masks = [outputs(13, (2, 3, K, 5)).eval_mask for K in (1, 4, 7)]
    one = dspark_ext.loss_denominators(masks[1], 2.0)
    assert one.shape == () and one.dtype == f32 and not one.requires_grad
    assert close(one, oracle.weights(masks[1], 2.0).sum(), 1e-6)
    together = dspark_ext.loss_denominators(masks, 2.0)
    assert close(together, sum(oracle.weights(m, 2.0).sum() for m in masks), 1e-6)


# --- The reference's names -----------------------------------------------------------------------

REFERENCE_PARAMETERS = {
    "compute_dspark_loss": (
        "outputs loss_decay_gamma ce_loss_alpha l1_loss_alpha confidence_head_alpha return_terms"
    ),
    "_collect_local_terms": "outputs loss_decay_gamma l1_loss_alpha",
    "_build_loss_weight_mask": "eval_mask block_size device loss_decay_gamma",
    "_l1_probability_distance_chunk": "draft_logits target_logits",
    "_compute_l1_dist_per_token": "draft_logits aligned_target_logits chunk_size",
    "_compute_accept_rate_3d": "l1_dist_per_token",
    "_compute_local_l1_term": "l1_dist_per_token loss_weight_mask",
    "_collect_acceptance_diagnostics": "outputs accept_rate_3d loss_weight_mask has_confidence",
    "_all_reduce_loss_denominators": "loss_terms world_size",
    "_build_loss": (
        "loss_terms global_denominators ce_loss_alpha l1_loss_alpha confidence_head_alpha "
        "has_confidence world_size"
    ),
}


@pytest.mark.parametrize("name", REFERENCE_PARAMETERS)
def test_a_reference_function_takes_the_reference_keywords_and_no_other_required_one(name):
    parameters = inspect.signature(getattr(loss, name)).parameters
    expected = REFERENCE_PARAMETERS[name].split()
    assert [p for p in parameters if p in expected] == expected
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    optional = [p for p in parameters if parameters[p].default is not inspect.Parameter.empty]
    assert set(parameters) - set(expected) <= set(optional)


def test_the_reference_constants():
    assert loss.__all__ == ["compute_dspark_loss"]
    assert loss._PROBABILITY_CHUNK_TOKENS == 128
    default = inspect.signature(loss._compute_l1_dist_per_token).parameters["chunk_size"].default
    assert default == 128


@pytest.mark.parametrize("gamma", [None, 0, 2.5])
def test_weight_mask(gamma):
    mask = outputs(14).eval_mask
    made = loss._build_loss_weight_mask(
        eval_mask=mask, block_size=4, device=torch.device("cpu"), loss_decay_gamma=gamma
    )
    assert made.dtype == f32 and made.shape == mask.shape
    assert close(made, oracle.weights(mask, gamma), 1e-7)


L1_FUNCTIONS = {
    "_l1_probability_distance_chunk": "target_logits",
    "_compute_l1_dist_per_token": "aligned_target_logits",
}


@pytest.mark.parametrize("function", L1_FUNCTIONS)
def test_l1_functions_give_a_differentiable_distance_per_row(function):
    made = outputs(15, (2, 2, 3, 65))
    draft = made.draft_logits
    target = {L1_FUNCTIONS[function]: made.aligned_target_logits}
    l1 = getattr(loss, function)(draft_logits=draft, **target)
    assert l1.shape == (2, 2, 3) and l1.dtype == f32
    l1.sum().backward()
    for i in [(b, a, k) for b in range(2) for a in range(2) for k in range(3)]:
        rows = [oracle.softmax(x[i]) for x in (draft.detach(), made.aligned_target_logits)]
        assert abs(float(l1[i].detach()) - oracle.l1_distance(*rows)) <= TOLERANCES[f32].l1
        assert relative_error(draft.grad[i], oracle.l1_gradient(*rows)) <= 5e-6


@pytest.mark.parametrize("chunk_size", [1, 5, 128, 10**6])
def test_the_chunk_size_changes_nothing(chunk_size):
    made = outputs(15, requires_grad=False)
    arguments = dict(
        draft_logits=made.draft_logits, aligned_target_logits=made.aligned_target_logits
    )
    assert torch.equal(
        loss._compute_l1_dist_per_token(**arguments, chunk_size=chunk_size),
        loss._compute_l1_dist_per_token(**arguments),
    )


def test_accept_rate_is_one_minus_the_total_variation_clamped():
    l1 = torch.tensor([[[0.0, 0.5, 2.0, 2.5, -0.5]]])
    assert loss._compute_accept_rate_3d(l1_dist_per_token=l1).tolist() == [[[1, 0.75, 0, 0, 1]]]
    assert loss._compute_accept_rate_3d(l1_dist_per_token=None) is None


def test_local_l1_term_is_a_weighted_sum_and_its_weight():
    l1, w = torch.tensor([[[0.5, 1.0]]]), torch.tensor([[[1.0, 0.25]]])
    pair = loss._compute_local_l1_term(l1_dist_per_token=l1, loss_weight_mask=w)
    assert [v.item() for v in pair] == [0.75, 1.25]
    pair = loss._compute_local_l1_term(l1_dist_per_token=None, loss_weight_mask=w)
    assert [v.item() for v in pair] == [0, 0]


DIAGNOSTICS = {
    "accept_rate_pos_num": (4,),
    "accept_rate_pos_den": (4,),
    "tau_num": (),
    "tau_den": (),
    "confidence_abs_error_num": (),
    "confidence_bias_num": (),
    "confidence_cumprod_bias_num": (),
    "confidence_diag_den": (),
}


@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("with_rate", [True, False])
def test_diagnostics_have_their_shapes_and_are_zeros_without_a_rate(confidence, with_rate):
    made = outputs(16, confidence=confidence)
    w = oracle.weights(made.eval_mask, 4.0).float()
    rate = normal(16, 2, 3, 4).abs().clamp(max=1).float() if with_rate else None
    diagnostics = loss._collect_acceptance_diagnostics(
        outputs=made, accept_rate_3d=rate, loss_weight_mask=w, has_confidence=confidence
    )
    assert {name: tuple(v.shape) for name, v in diagnostics.items()} == DIAGNOSTICS
    if not with_rate:
        assert not any(v.any() for v in diagnostics.values())
        return
    sigmoid = torch.zeros(2, 3, 4, dtype=f64)
    if confidence:
        sigmoid = torch.sigmoid(made.confidence_pred.detach().double()) * made.eval_mask
    accept = rate.double() * made.eval_mask
    expected = oracle._diagnostics(made, accept, sigmoid, w.double())
    for name, value in diagnostics.items():
        public = name.replace("accept_rate_pos", "accept_rate_per_pos")
        assert close(value, expected[public], 1e-6), name


def test_local_terms_have_the_reference_keys():
    made = outputs(17)
    terms, has_confidence = loss._collect_local_terms(
        outputs=made, loss_decay_gamma=4.0, l1_loss_alpha=0.7
    )
    losses = [
        f"{name}_loss_{part}" for name in ("ce", "l1", "confidence") for part in ("num", "den")
    ]
    assert has_confidence and set(terms) == {*losses, *DIAGNOSTICS}
    assert all(terms[f"{name}_loss_num"].requires_grad for name in ("ce", "l1", "confidence"))
    expected = oracle.objective(made, **USUAL).terms
    for name in ("ce", "l1", "confidence"):
        assert close(
            terms[f"{name}_loss_num"].detach() / (terms[f"{name}_loss_den"] + 1e-6),
            expected[f"{name}_loss"],
            TOLERANCES[f32].sums,
        )


def test_reduced_denominators_leave_the_terms_alone():
    terms = {
        f"{name}_loss_den": torch.tensor(float(i), requires_grad=True)
        for i, name in enumerate(("ce", "l1", "confidence"), 1)
    }
    reduced = loss._all_reduce_loss_denominators(loss_terms=terms, world_size=1)
    assert {name: v.item() for name, v in reduced.items()} == {
        "ce_loss_den": 1,
        "l1_loss_den": 2,
        "confidence_loss_den": 3,
    }
    assert not any(v.requires_grad for v in reduced.values())
    assert [v.item() for v in terms.values()] == [1, 2, 3]


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("has_confidence", [True, False])
def test_build_loss_weighs_each_term_over_its_own_denominator(world_size, has_confidence):
    terms = {
        f"{n}_loss_num": torch.tensor(v) for n, v in (("ce", 3.0), ("l1", 5.0), ("confidence", 7.0))
    }
    denominators = {
        "ce_loss_den": torch.tensor(2.0),
        "l1_loss_den": torch.tensor(0.0),
        "confidence_loss_den": torch.tensor(4.0),
    }
    value = loss._build_loss(
        loss_terms=terms,
        global_denominators=denominators,
        ce_loss_alpha=0.5,
        l1_loss_alpha=1.0,
        confidence_head_alpha=2.0,
        has_confidence=has_confidence,
        world_size=world_size,
    )
    expected = 0.5 * 3 / (2 + 1e-6) + (2 * 7 / (4 + 1e-6) if has_confidence else 0)
    assert value.item() == pytest.approx(world_size * expected, rel=1e-6)
