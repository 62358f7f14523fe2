"""The objective from hidden states: what the materialised logits give, in less memory.

A ``Case`` names a combination of heads, ``problem`` makes its operands, ``fused`` and
``materialised`` run a step on them. Expected values are ``compute_dspark_loss`` on logits that
exist, and ``plain_loss``, the objective in a few lines of float64 PyTorch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import types
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.nn.functional as F
from conftest import relative_error, run_json
from gpu import gpu
from inputs import generator, name_of, normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dspark_ext import (
    DSparkForwardOutput,
    DSparkLinearOutput,
    compute_dspark_linear_loss,
    compute_dspark_loss,
    linear,
)
from dspark_ext.bench import peak

__all__ = ["gpu"]

f32, bf16, f16, f64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SETTINGS = dict(
    loss_decay_gamma=4.0, ce_loss_alpha=0.3, l1_loss_alpha=0.7, confidence_head_alpha=0.5
)
H, HT, R, V = 16, 12, 4, 33
SHAPE = (2, 3, 5)


# --- Problems ------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Which heads: ``teacher`` is own, own with bias, tied, None, or the layout of logits."""

    markov: str = "vanilla"
    softcap: Optional[float] = 4.0
    bias: bool = True
    teacher: Optional[str] = "own with bias"
    trainable: bool = True


FULL = Case()
MARKOV = ("none", "vanilla", "gated", "rnn")
TEACHERS = ("own", "own with bias", "tied", "contiguous", "strided", "expanded", "transposed")


@dataclasses.dataclass
class Problem:
    """``leaves`` may get a gradient; ``constants`` never do."""

    case: Case
    leaves: dict[str, Tensor]
    constants: dict[str, Tensor]

    def to(self, dtype: torch.dtype) -> Problem:
        def converted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}

        return Problem(self.case, converted(self.leaves), converted(self.constants))

    def on(self, device: torch.device) -> Problem:
        leaves, constants = (
            {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
            for tensors in (self.leaves, self.constants)
        )
        return Problem(self.case, leaves, constants)

    def fresh(self) -> Problem:
        """Leaves of their own, those that are trained requiring a gradient."""
        frozen = () if self.case.trainable else ("weight", "bias", "markov_weight")
        leaves = {
            name: leaf.detach().clone().requires_grad_(name not in frozen)
            for name, leaf in self.leaves.items()
        }
        return Problem(self.case, leaves, self.constants)


# Where two probabilities agree to within rounding, the sign in the gradient of L1 is rounding's
# choice. Rows with such a column are left out: the distance of their logarithms, by dtype.
TOO_CLOSE = {f64: 0.0, f32: 1e-5, f16: 0.01, bf16: 0.05}


def problem(
    case: Case = FULL,
    dtype: torch.dtype = f32,
    seed: int = 0,
    shape: tuple = SHAPE,
    too_close: Optional[float] = None,
) -> Problem:
    """Operands in ``dtype``, whose supervised rows have no column where p and q nearly agree."""
    made = _problem(case, seed, shape).to(dtype)
    wide = made.to(f64)
    target = teacher_logits(wide)
    if target is not None:
        apart = (draft_logits(wide).log_softmax(-1) - target.log_softmax(-1)).abs()
        close = TOO_CLOSE[dtype] if too_close is None else too_close
        made.constants["eval_mask"] &= (apart > close).all(-1)
    return made


def _problem(case: Case, seed: int, shape: tuple) -> Problem:
    leaves = {
        "hidden": normal(seed, *shape, H),
        "weight": normal(seed + 1, V, H, scale=1.5 * H**-0.5),
        "confidence": normal(seed + 2, *shape),
    }
    random = generator(seed)
    constants = {
        "ids": torch.randint(V, shape, generator=random),
        "eval_mask": torch.rand(shape, generator=random) < 0.7,
        "block_keep_mask": torch.rand(shape[:2], generator=random) < 0.8,
        "previous": torch.randint(V, shape, generator=random),
    }
    if case.bias:
        leaves["bias"] = normal(seed + 3, V)
    if case.markov != "none":
        leaves["embedding"] = normal(seed + 4, V, R)
        leaves["markov_weight"] = normal(seed + 5, V, R, scale=0.5)
    if case.markov == "gated":
        leaves["gate"] = normal(seed + 6, H, R, scale=H**-0.5)
    if case.markov == "rnn":
        leaves["recurrence"] = normal(seed + 7, R, R, scale=R**-0.5)
    if case.teacher in ("own", "own with bias"):
        constants["target_hidden"] = normal(seed + 8, *shape, HT)
        constants["target_weight"] = normal(seed + 9, V, HT, scale=1.5 * HT**-0.5)
        if case.teacher == "own with bias":
            constants["target_bias"] = normal(seed + 10, V)
    elif case.teacher == "tied":
        constants["target_hidden"] = leaves["hidden"] + normal(seed + 8, *shape, H, scale=0.7)
    elif case.teacher is not None:
        constants["target_logits"] = normal(seed + 8, *shape, V, scale=1.5)
    return Problem(case, leaves, constants)


def laid_out(logits: Tensor, layout: Optional[str]) -> Tensor:
    """The teacher's logits in the memory layout that the case names."""
    if layout == "strided":
        return torch.cat([logits, logits], dim=-1)[..., : logits.shape[-1]]
    if layout == "expanded":
        return logits[:, :1].expand(logits.shape)
    if layout == "transposed":
        return logits.transpose(-1, -2).contiguous().transpose(-1, -2)
    return logits


def markov_features(made: Problem) -> Optional[Tensor]:
    """What a trainer computes outside: features of the previous tokens, ``[B, A, K, R]``."""
    if made.case.markov == "none":
        return None
    embedded = F.embedding(made.constants["previous"], made.leaves["embedding"])
    if made.case.markov == "gated":
        return embedded * torch.sigmoid(made.leaves["hidden"] @ made.leaves["gate"])
    if made.case.markov == "rnn":
        state, states = torch.zeros_like(embedded[..., 0, :]), []
        for token in embedded.unbind(-2):
            state = torch.tanh(token + state @ made.leaves["recurrence"])
            states.append(state)
        return torch.stack(states, dim=-2)
    return embedded


def _capped(logits: Tensor, softcap: Optional[float]) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def draft_logits(made: Problem) -> Tensor:
    leaves, features = made.leaves, markov_features(made)
    logits = F.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    logits = _capped(logits, made.case.softcap)
    return logits if features is None else logits + F.linear(features, leaves["markov_weight"])


def teacher_logits(made: Problem) -> Optional[Tensor]:
    constants = made.constants
    if made.case.teacher is None:
        return None
    if "target_logits" in constants:
        return laid_out(constants["target_logits"], made.case.teacher)
    weight, bias = constants.get("target_weight"), constants.get("target_bias")
    if weight is None:
        weight, bias = made.leaves["weight"], made.leaves.get("bias")
    return _capped(F.linear(constants["target_hidden"], weight, bias), made.case.softcap).detach()


def linear_output(made: Problem, **changes: Any) -> DSparkLinearOutput:
    leaves, constants = made.leaves, made.constants
    target = constants.get("target_logits")
    fields = dict(
        draft_hidden=leaves["hidden"],
        lm_head_weight=leaves["weight"],
        target_ids=constants["ids"],
        eval_mask=constants["eval_mask"],
        block_keep_mask=constants["block_keep_mask"],
        confidence_pred=leaves.get("confidence"),
        markov_features=markov_features(made),
        markov_weight=leaves.get("markov_weight"),
        target_hidden=constants.get("target_hidden"),
        target_lm_head_weight=constants.get("target_weight"),
        aligned_target_logits=None if target is None else laid_out(target, made.case.teacher),
        lm_head_bias=leaves.get("bias"),
        target_lm_head_bias=constants.get("target_bias"),
        final_logit_softcap=made.case.softcap,
    )
    return DSparkLinearOutput(**{**fields, **changes})


def forward_output(made: Problem) -> DSparkForwardOutput:
    return DSparkForwardOutput(
        draft_logits(made),
        made.constants["ids"],
        made.constants["eval_mask"],
        made.constants["block_keep_mask"],
        made.leaves.get("confidence"),
        teacher_logits(made),
    )


class Result(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]
    terms: dict[str, Tensor]


def gradients_of(loss: Tensor, made: Problem, scale: float = 1.0) -> dict[str, Tensor]:
    wanted = {name: leaf for name, leaf in made.leaves.items() if leaf.requires_grad}
    values = torch.autograd.grad(loss * scale, list(wanted.values()))
    if scale != 1:  # without an underflow of what is returned
        values = tuple(value.float() / scale for value in values)
    return dict(zip(wanted, values))


def fused(made: Problem, scale: float = 1.0, **options: Any) -> Result:
    made = made.fresh()
    loss, terms = compute_dspark_linear_loss(
        outputs=linear_output(made), return_terms=True, **{**SETTINGS, **options}
    )
    return Result(loss.detach(), gradients_of(loss, made, scale), terms)


def materialised(made: Problem, scale: float = 1.0, **options: Any) -> Result:
    made = made.fresh()
    loss, terms = compute_dspark_loss(
        outputs=forward_output(made), return_terms=True, **{**SETTINGS, **options}
    )
    return Result(loss.detach(), gradients_of(loss, made, scale), terms)


def plain_loss(made: Problem, draft: Tensor, target: Tensor, detach_accept: bool = True) -> Tensor:
    """The objective from its definition, in PyTorch and in the dtype of the logits."""
    mask = made.constants["eval_mask"]
    decay = torch.exp(-torch.arange(mask.shape[-1], dtype=draft.dtype) / 4.0)
    weights = mask.to(draft.dtype) * decay
    ids = made.constants["ids"].unsqueeze(-1)
    ce = -draft.log_softmax(-1).gather(-1, ids).squeeze(-1)
    l1 = (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    accept = 1 - l1 / 2
    accept = accept.detach() if detach_accept else accept
    bce = F.binary_cross_entropy_with_logits(
        made.leaves["confidence"].to(draft.dtype), accept, reduction="none"
    )
    return (weights * (0.3 * ce + 0.7 * l1 + 0.5 * bce)).sum() / (weights.sum() + 1e-6)


def assert_equal(actual: Result, expected: Result, tolerance: float, what: object) -> None:
    """Loss, every term and every gradient, relative; terms that cancel, absolutely."""
    pairs = [("loss", actual.loss, expected.loss)]
    pairs += [(n, actual.terms[n], value) for n, value in expected.terms.items()]
    for name, value, wanted in pairs:
        close = torch.allclose(value, wanted, rtol=tolerance, atol=tolerance)
        assert close, f"{name} of {what}: {value.tolist()} for {wanted.tolist()}"
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, wanted in expected.gradients.items():
        value = actual.gradients[name]
        assert value.shape == wanted.shape and value.dtype == wanted.dtype, f"{name} of {what}"
        error = relative_error(value, wanted)
        assert error <= tolerance, f"gradient of {name} of {what}: relative error {error:.3g}"


# --- Values and gradients in fp32 and float64 ----------------------------------------------------

CHUNKS = (1, 7, 10, SHAPE[0] * SHAPE[1] * SHAPE[2] + 3, None)


def cases(markov: str, every: int = 1) -> list[Case]:
    """All cases, or an odd fraction of them that has each value of each field."""
    rest = itertools.product((None, 4.0), (False, True), TEACHERS, (False, True))
    return [Case(markov, *values) for values in rest][MARKOV.index(markov) % every :: every]


@pytest.mark.parametrize("dtype,tolerance", [(f32, 1e-5), (f64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("markov", MARKOV)
def test_every_combination_of_heads_equals_materialised_logits(markov, dtype, tolerance, impl):
    some = cases(markov, 1 if dtype == f32 else 3)
    for seed, (case, chunk_rows) in enumerate(zip(some, itertools.cycle(CHUNKS))):
        made = problem(case, dtype, seed)
        actual = fused(made, impl=impl, chunk_rows=chunk_rows)
        what = f"{case}, chunk_rows={chunk_rows}, seed={seed}"
        assert_equal(actual, materialised(made), tolerance, what)


@pytest.mark.parametrize("markov", MARKOV)
def test_the_objective_is_that_of_its_definition(markov, impl):
    for seed, case in enumerate(cases(markov, 3)):
        made = problem(case, f64, seed).fresh()
        expected = plain_loss(made, draft_logits(made), teacher_logits(made))
        actual = fused(made, impl=impl, chunk_rows=8)
        # Not 1e-12: log_softmax and p - 1 of the definition lose a few digits of their own.
        assert abs(actual.loss - expected) <= 1e-11 * abs(expected), (case, seed)
        for name, value in gradients_of(expected, made).items():
            error = relative_error(actual.gradients[name], value)
            assert error <= 1e-11, f"{name} of {case}, seed={seed}: {error:.3g}"


@pytest.mark.parametrize("dtype,tolerance", [(f32, 1e-5), (f64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_the_result_does_not_depend_on_the_chunks(chunk_rows, dtype, tolerance, impl):
    made = problem(dtype=dtype)
    actual = fused(made, impl=impl, chunk_rows=chunk_rows)
    assert_equal(actual, materialised(made), tolerance, f"chunk_rows={chunk_rows}")


@pytest.mark.parametrize("dtype,tolerance", [(f32, 1e-5), (f64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("teacher", ["own with bias", "tied", "contiguous"])
def test_products_of_some_columns_at_a_time_give_all_logits(
    teacher, dtype, tolerance, impl, monkeypatch
):
    monkeypatch.setattr(linear, "_PRODUCT_COLUMNS", 1)
    for softcap, bias in ((None, False), (4.0, True)):
        made = problem(FULL._replace(teacher=teacher, softcap=softcap, bias=bias), dtype)
        actual = fused(made, impl=impl, chunk_rows=8)
        assert_equal(actual, materialised(made), tolerance, f"softcap {softcap}, bias {bias}")


@pytest.mark.parametrize("bias", [None, "the draft's", "its own"])
def test_a_teacher_may_name_the_draft_head_with_any_bias(bias, impl):
    made = problem(FULL._replace(teacher="tied"))
    fresh = made.fresh()
    draft_bias = fresh.leaves["bias"]
    given = {None: None, "the draft's": draft_bias, "its own": normal(20, V).float()}[bias]
    outputs = linear_output(
        fresh, target_lm_head_weight=fresh.leaves["weight"], target_lm_head_bias=given
    )
    loss, terms = compute_dspark_linear_loss(
        outputs=outputs, return_terms=True, impl=impl, **SETTINGS
    )
    actual = Result(loss.detach(), gradients_of(loss, fresh), terms)
    made.constants["target_weight"] = made.leaves["weight"]
    if given is not None:
        made.constants["target_bias"] = given.detach()
    assert_equal(actual, materialised(made), 1e-5, f"bias {bias}")


@pytest.mark.parametrize("alphas", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("teacher", ["own", "contiguous"])
def test_each_term_alone(alphas, teacher, impl):
    options = dict(
        zip(("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha"), alphas), impl=impl
    )
    made = problem(Case(teacher=teacher))
    assert_equal(fused(made, chunk_rows=4, **options), materialised(made, **options), 1e-5, alphas)


def test_without_a_confidence_head(impl):
    made = problem()
    del made.leaves["confidence"]
    assert_equal(fused(made, impl=impl, chunk_rows=4), materialised(made, impl=impl), 1e-5, impl)


@pytest.mark.parametrize("teacher", [None, "own", "contiguous"])
def test_with_cross_entropy_alone_a_teacher_is_neither_needed_nor_read(teacher, impl):
    made = problem(Case(teacher=teacher))
    del made.leaves["confidence"]
    expected = materialised(made, l1_loss_alpha=0.0)
    for name in ("target_hidden", "target_logits"):
        if name in made.constants:
            made.constants[name].fill_(torch.nan)
    actual = fused(made, impl=impl, chunk_rows=4, l1_loss_alpha=0.0)
    assert_equal(actual, expected, 1e-5, teacher)


def test_ids_to_ignore_and_masks_of_every_kind(impl):
    made = problem()
    made.constants["ids"].view(-1)[::3] = -100
    for dtype in (torch.bool, torch.int64, torch.uint8, f32, bf16, f64):
        mask = made.constants["eval_mask"].to(dtype)
        keep = made.constants["block_keep_mask"].to(dtype)
        if dtype.is_floating_point:
            mask = mask * 0.5
        constants = {**made.constants, "eval_mask": mask, "block_keep_mask": keep}
        constants["ids"] = made.constants["ids"].to(torch.int32)
        variant = Problem(made.case, made.leaves, constants)
        actual = fused(variant, impl=impl, chunk_rows=4)
        assert_equal(actual, materialised(variant, impl=impl), 1e-5, dtype)


# --- Operands as they come -----------------------------------------------------------------------


def test_strided_operands(impl):
    made = problem(Case(teacher="own"))
    expected = materialised(made)

    def spread(tensor: Tensor) -> Tensor:
        """Every second element of a larger tensor."""
        larger = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan)
        larger[..., ::2] = tensor.detach()
        return larger[..., ::2]

    fresh = made.fresh()
    leaves = {
        name: leaf if name in ("embedding",) else spread(leaf).requires_grad_(leaf.requires_grad)
        for name, leaf in fresh.leaves.items()
    }
    leaves["weight"] = made.leaves["weight"].t().contiguous().t().requires_grad_()
    constants = {
        name: spread(value) if value.is_floating_point() else value
        for name, value in made.constants.items()
    }
    fresh = Problem(made.case, leaves, constants)
    loss, terms = compute_dspark_linear_loss(
        outputs=linear_output(fresh), return_terms=True, impl=impl, chunk_rows=7, **SETTINGS
    )
    actual = Result(loss.detach(), gradients_of(loss, fresh), terms)
    assert_equal(actual, expected, 1e-5, "strided operands")


@pytest.mark.parametrize("teacher", ["own with bias", "contiguous", "expanded"])
@pytest.mark.parametrize("dtype", [f32, bf16, f16, f64], ids=name_of)
def test_operands_are_left_as_they_were(dtype, teacher, impl):
    made = problem(Case(teacher=teacher), dtype).fresh()
    before = {**made.leaves, **made.constants}
    before = {name: value.detach().clone() for name, value in before.items()}
    loss = compute_dspark_linear_loss(outputs=linear_output(made), impl=impl, **SETTINGS)
    (loss * 3).backward()
    for name, value in {**made.leaves, **made.constants}.items():
        assert torch.equal(value.detach(), before[name]), f"{name} of {dtype} was overwritten"


def test_a_step_has_the_same_bits_every_time(impl):
    made = problem()
    first, second = (fused(made, impl=impl, chunk_rows=7) for _ in range(2))
    assert torch.equal(first.loss, second.loss)
    for name, value in first.gradients.items():
        assert torch.equal(value, second.gradients[name]), name


def test_any_object_will_do_and_optional_attributes_may_be_missing(impl):
    made = problem(Case("none", None, False, None))
    fresh = made.fresh()
    outputs = types.SimpleNamespace(
        draft_hidden=fresh.leaves["hidden"],
        lm_head_weight=fresh.leaves["weight"],
        target_ids=fresh.constants["ids"],
        eval_mask=fresh.constants["eval_mask"],
        block_keep_mask=fresh.constants["block_keep_mask"],
    )
    options = dict(SETTINGS, l1_loss_alpha=0.0, impl=impl)
    loss, terms = compute_dspark_linear_loss(outputs=outputs, return_terms=True, **options)
    del fresh.leaves["confidence"], made.leaves["confidence"]
    actual = Result(loss.detach(), gradients_of(loss, fresh), terms)
    assert_equal(actual, materialised(made, **options), 1e-5, outputs)


def test_hidden_states_that_a_model_computes_get_their_gradient(impl):
    made = problem(Case(trainable=False))
    gradients = []
    for run in (compute_dspark_linear_loss, compute_dspark_loss):
        fresh = made.fresh()
        body = torch.nn.Linear(H, H)
        with torch.no_grad():
            body.weight.copy_(normal(20, H, H, scale=H**-0.5))
            body.bias.copy_(normal(21, H))
        leaves = {**fresh.leaves, "hidden": torch.tanh(body(fresh.leaves["hidden"]))}
        computed = Problem(made.case, leaves, made.constants)
        is_linear = run is compute_dspark_linear_loss
        outputs = linear_output(computed) if is_linear else forward_output(computed)
        run(outputs=outputs, impl=impl, **SETTINGS).backward()
        gradients.append((body.weight.grad, body.bias.grad, fresh.leaves["embedding"].grad))
    for actual, expected in zip(*gradients):
        assert relative_error(actual, expected) <= 1e-5


# --- Rows that are not supervised ----------------------------------------------------------------


@pytest.mark.parametrize("teacher", ["own", "tied", "contiguous", "strided"])
@pytest.mark.parametrize("dtype,tolerance", [(f32, 1e-5), (f64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_rows_without_supervision_are_never_read(softcap, dtype, tolerance, teacher, impl):
    made = problem(Case(softcap=softcap, teacher=teacher), dtype)
    expected = materialised(made)
    inactive = ~made.constants["eval_mask"]
    made = made.fresh()
    features = markov_features(made).detach()
    poisoned = [features, made.leaves["hidden"].detach(), made.leaves["confidence"].detach()]
    poisoned += [
        made.constants[n] for n in ("target_hidden", "target_logits") if n in made.constants
    ]
    for tensor in poisoned:
        tensor[inactive] = torch.nan
    made.constants["ids"][inactive] = torch.tensor([-7, 2**40, V]).repeat(50)[: inactive.sum()]
    features.requires_grad_()
    made.leaves["features"] = features
    loss, terms = compute_dspark_linear_loss(
        outputs=linear_output(made, markov_features=features),
        return_terms=True,
        impl=impl,
        chunk_rows=7,
        **SETTINGS,
    )
    del made.leaves["embedding"]
    gradients = gradients_of(loss, made)
    for name in ("hidden", "features", "confidence"):
        assert (gradients[name][inactive] == 0).all(), f"{name} where nothing is supervised"
    gradients["embedding"] = torch.zeros(V, R, dtype=dtype).index_put(
        (made.constants["previous"],), gradients.pop("features"), accumulate=True
    )
    assert_equal(Result(loss.detach(), gradients, terms), expected, tolerance, teacher)


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 3, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16, f16, f64], ids=name_of)
@pytest.mark.parametrize("teacher", ["own", "contiguous"])
def test_a_batch_without_supervision_has_loss_0_and_gradient_zeros(teacher, dtype, shape, impl):
    made = problem(Case(teacher=teacher), dtype, shape=shape)
    made.constants["eval_mask"].fill_(False)
    result = fused(made, impl=impl)
    assert result.loss == 0
    assert result.gradients.keys() == made.leaves.keys()
    for name, gradient in result.gradients.items():
        assert gradient.shape == made.leaves[name].shape
        assert (gradient == 0).all(), name


# --- Half precision ------------------------------------------------------------------------------

# Of one rounding to nearest: 8 and 11 significant bits.
ROUNDOFF = {bf16: 2.0**-8, f16: 2.0**-11}
# Enough positions for those that stay supervised.
HALF_SHAPE = (2, 5, 5)
# fp16 gradients need a loss scale here as in any trainer.
SCALE = {bf16: 1.0, f16: 4096.0}


def loss_error_explained_by_rounding(made: Problem, unit: float) -> float:
    """First-order bound of the loss's error when logits are rounded, ``sum |dL/dx| |x| unit``.

    Each product is rounded once; a softcap divides, takes tanh and multiplies, a rounding each,
    the first two of which do not grow on the way to the capped logit; a Markov bias is one more
    product and one more sum.
    """
    wide = made.to(f64)
    features = markov_features(made)
    logits = F.linear(wide.leaves["hidden"], wide.leaves["weight"], wide.leaves.get("bias"))
    moved = logits.abs()
    if made.case.softcap is not None:
        moved = 2 * moved
        logits = _capped(logits, made.case.softcap)
        moved = moved + 2 * logits.abs()
    if features is not None:
        bias = F.linear(features.to(f64), wide.leaves["markov_weight"])
        logits = logits + bias
        moved = moved + bias.abs() + logits.abs()
    target = teacher_logits(wide)
    moved_target = (4 if made.case.softcap is not None else 1) * target.abs()
    if made.case.softcap is not None and "target_logits" not in made.constants:
        moved_target = 4 * _before_cap(target, made.case.softcap).abs()
    draft, target = logits.detach().requires_grad_(), target.requires_grad_()
    loss = plain_loss(wide, draft, target, detach_accept=False)
    slopes = torch.autograd.grad(loss, (draft, target))
    moves = zip(slopes, (moved, moved_target))
    return unit * sum(float((slope.abs() * move).sum()) for slope, move in moves)


def _before_cap(capped: Tensor, softcap: float) -> Tensor:
    return softcap * torch.atanh(capped / softcap)


def assert_explained_by_rounding(
    actual: Result, rounded: Result, made: Problem, unit: float, what: object
) -> None:
    """Against exact float64 logits, no more error than the materialised logits have, which are
    rounded to the same dtype (half as much again, since roundings of a product that is added up
    in another order fall differently), and one rounding of the result."""
    exact = materialised(made.to(f64), impl="torch")
    for name, wanted in exact.gradients.items():
        error = relative_error(actual.gradients[name], wanted)
        allowed = 1.5 * relative_error(rounded.gradients[name], wanted) + unit
        assert error <= allowed, f"{name} of {what}: relative error {error:.3g} > {allowed:.3g}"


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=name_of)
@pytest.mark.parametrize("markov", MARKOV)
def test_half_precision_is_as_good_as_materialised_logits(markov, dtype, impl):
    for seed, (case, chunk_rows) in enumerate(zip(cases(markov, 3), itertools.cycle(CHUNKS))):
        made = problem(case, dtype, seed, HALF_SHAPE)
        # As from a confidence head that is kept in fp32.
        made.leaves["confidence"] = made.leaves["confidence"].float()
        actual = fused(made, SCALE[dtype], impl=impl, chunk_rows=chunk_rows)
        rounded = materialised(made, SCALE[dtype])
        what = f"{case}, {dtype}, chunk_rows={chunk_rows}, seed={seed}"
        assert_explained_by_rounding(actual, rounded, made, ROUNDOFF[dtype], what)
        if markov in ("none", "vanilla"):  # features without a rounding of their own
            wide = made.to(f64)
            exact = plain_loss(wide, draft_logits(wide), teacher_logits(wide))
            error = float((actual.loss.double() - exact).abs())
            allowed = loss_error_explained_by_rounding(made, ROUNDOFF[dtype])
            assert error <= allowed, f"loss of {what}: error {error:.3g} > {allowed:.3g}"


@pytest.mark.parametrize("dtype", [f32, *ROUNDOFF], ids=name_of)
@pytest.mark.parametrize("markov", ["none", "vanilla"])
def test_on_a_device_no_position_without_supervision_takes_part(gpu, markov, dtype):
    scale = SCALE.get(dtype, 1.0)
    for seed, (case, chunk_rows) in enumerate(zip(cases(markov, 7), itertools.cycle((7, None)))):
        made = problem(case, dtype, seed, HALF_SHAPE)
        made.leaves["confidence"] = made.leaves["confidence"].float()
        there = made.on(gpu.device)
        unread = ~there.constants["eval_mask"]
        rounded = host(materialised(there, scale))
        there.leaves["hidden"][unread] = float("nan")
        if "target_hidden" in there.constants:
            there.constants["target_hidden"][unread] = float("inf")
        actual = host(fused(there, scale, impl="kernel", chunk_rows=chunk_rows))
        what = f"{case}, {dtype}, chunk_rows={chunk_rows}, seed={seed}"
        if dtype == f32:
            assert_equal(actual, rounded, 1e-5, what)
        else:
            assert_explained_by_rounding(actual, rounded, made, ROUNDOFF[dtype], what)


def host(result: Result) -> Result:
    gradients, terms = (
        {n: t.cpu() for n, t in x.items()} for x in (result.gradients, result.terms)
    )
    return Result(result.loss.cpu(), gradients, terms)


def test_a_weight_gradient_is_accumulated_in_fp32(impl):
    # 4096 rows with the same sign: in bf16 a running sum stops growing after some 256 of them.
    shape = (4, 128, 8)
    made = problem(Case("vanilla", None, True, None), bf16, 0, shape)
    made.leaves["hidden"] = made.leaves["hidden"].abs()
    made.constants["eval_mask"].fill_(True)
    made.constants["ids"].fill_(3)
    del made.leaves["confidence"]
    options = dict(l1_loss_alpha=0.0, ce_loss_alpha=1.0)
    actual = fused(made, chunk_rows=16, impl=impl, **options)
    exact = materialised(made.to(f64), **options)
    for name in ("weight", "bias", "markov_weight"):
        error = relative_error(actual.gradients[name], exact.gradients[name])
        # Its own rounding, and less than that from the averaged roundings of the logits.
        assert error <= 2 * ROUNDOFF[bf16], f"{name}: {error:.3g}"


def test_a_loss_scale_undoes_the_underflow_of_fp16_gradients(impl):
    # A gradient of logits is about alpha / (rows * V) here, 4e-9: under fp16's smallest number.
    made = problem(Case("vanilla", None, True, "own"), f16, 0, (8, 16, 16))
    alphas = ("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
    options = {name: 2.0**-10 * SETTINGS[name] for name in alphas}
    exact = materialised(made.to(f64), **options)
    actual = fused(made, 65536.0, impl=impl, chunk_rows=128, **options)
    for name, value in exact.gradients.items():
        error = relative_error(actual.gradients[name], value)
        # Roundings of logits, of their gradient and of the result.
        assert error <= 4 * ROUNDOFF[f16], f"{name}: {error:.3g}"


@pytest.mark.parametrize("markov", MARKOV)
@pytest.mark.parametrize("hidden_dtype", [f32, bf16], ids=name_of)
def test_under_autocast_fp32_parameters_are_used_as_a_linear_layer_uses_them(
    hidden_dtype, markov, impl
):
    for seed, case in enumerate(cases(markov, 5)):
        made = problem(case, f32, seed, HALF_SHAPE, TOO_CLOSE[bf16])
        made.leaves["hidden"] = made.leaves["hidden"].to(hidden_dtype)
        with torch.autocast("cpu", bf16):
            actual, rounded = fused(made, impl=impl, chunk_rows=7), materialised(made)
        assert actual.loss.dtype == f32
        what = f"{case} under autocast, seed={seed}"
        assert_explained_by_rounding(actual, rounded, made, ROUNDOFF[bf16], what)


def test_autocast_at_backward_changes_nothing(impl):
    made = problem()
    expected, fresh = fused(made, impl=impl), made.fresh()
    loss = compute_dspark_linear_loss(outputs=linear_output(fresh), impl=impl, **SETTINGS)
    with torch.autocast("cpu", bf16):
        loss.backward()
    for name in ("hidden", "weight", "bias", "markov_weight"):
        assert torch.equal(fresh.leaves[name].grad, expected.gradients[name]), name


# --- What autograd sees --------------------------------------------------------------------------


def test_an_evaluation_gives_the_same_loss_and_no_graph(impl):
    made = problem().fresh()
    outputs = linear_output(made)
    options = dict(SETTINGS, impl=impl, chunk_rows=7, return_terms=True)
    expected, expected_terms = compute_dspark_linear_loss(outputs=outputs, **options)
    with torch.no_grad():
        loss, terms = compute_dspark_linear_loss(outputs=outputs, **options)
    assert not loss.requires_grad
    assert torch.equal(loss, expected)
    for name, value in terms.items():
        assert not value.requires_grad, name
        assert torch.equal(value, expected_terms[name]), name


@pytest.mark.parametrize("only", ["confidence", "hidden", "weight", "bias", "markov_weight"])
def test_one_operand_alone_may_need_a_gradient(only, impl):
    made = problem()
    expected = materialised(made)
    fresh = made.fresh()
    for name, leaf in fresh.leaves.items():
        leaf.requires_grad_(name == only)
    loss = compute_dspark_linear_loss(
        outputs=linear_output(fresh), impl=impl, chunk_rows=7, **SETTINGS
    )
    loss.backward()
    for name, leaf in fresh.leaves.items():
        assert (leaf.grad is not None) == (name == only), name
    assert relative_error(fresh.leaves[only].grad, expected.gradients[only]) <= 1e-5


@pytest.mark.parametrize("dtype,tolerance", [(f32, 1e-5), (f64, 1e-12)], ids=["fp32", "fp64"])
def test_a_kept_graph_gives_its_gradient_again_under_any_upstream(dtype, tolerance, impl):
    made = problem(dtype=dtype)
    expected = materialised(made).gradients
    fresh = made.fresh()
    outputs = linear_output(fresh)
    loss = compute_dspark_linear_loss(outputs=outputs, impl=impl, chunk_rows=7, **SETTINGS)
    leaves = list(fresh.leaves.values())
    for upstream in (1.0, 3.0, 1.0):
        factor = torch.tensor(upstream, dtype=loss.dtype)
        for name, gradient in zip(
            fresh.leaves, torch.autograd.grad(loss, leaves, factor, retain_graph=True)
        ):
            error = relative_error(gradient, upstream * expected[name])
            assert error <= tolerance, f"{name} under {upstream}: {error:.3g}"


def test_two_losses_add_up_in_grad(impl):
    made = problem().fresh()
    outputs = linear_output(made)
    expected = materialised(made).gradients
    for factor in (1.0, 0.5):
        loss = compute_dspark_linear_loss(outputs=outputs, impl=impl, **SETTINGS)
        (factor * loss).backward(retain_graph=True)
    for name in ("hidden", "weight", "bias", "markov_weight"):
        assert relative_error(made.leaves[name].grad, 1.5 * expected[name]) <= 1e-5, name


def test_double_backward_is_refused(impl):
    made = problem().fresh()
    loss = compute_dspark_linear_loss(outputs=linear_output(made), impl=impl, **SETTINGS)
    with pytest.raises(RuntimeError, match="compute_dspark_linear_loss.*create_graph"):
        torch.autograd.grad(loss, made.leaves["hidden"], create_graph=True)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("teacher", ["own with bias", "contiguous"])
def test_gradcheck(teacher, softcap, impl):
    # The teacher has a head of its own: a tied one is, by design, not differentiated. For the
    # same reason the confidence loss, whose goal is the detached accept rate, has no weight.
    made = problem(Case("vanilla", softcap, True, teacher), f64, 0, (1, 2, 2)).fresh()
    made.constants["eval_mask"][0, 0, 0] = False
    names = ("hidden", "weight", "bias", "embedding", "markov_weight")

    def loss(*values: Tensor) -> Tensor:
        leaves = {**made.leaves, **dict(zip(names, values))}
        outputs = linear_output(Problem(made.case, leaves, made.constants))
        options = {**SETTINGS, "confidence_head_alpha": 0.0, "impl": impl, "chunk_rows": 2}
        return compute_dspark_linear_loss(outputs=outputs, **options)

    inputs = tuple(made.leaves[name] for name in names)
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7, atol=1e-7, rtol=1e-6, fast_mode=True)


def test_a_step_compiles_without_a_break_and_gives_equal_results(impl):
    torch._dynamo.reset()
    made = problem()
    inactive = ~made.constants["eval_mask"]
    for tensor in (made.leaves["hidden"], made.constants["target_hidden"]):
        tensor[inactive] = torch.nan  # compiled, such rows are computed, and masked

    def step(leaves: dict[str, Tensor]) -> Tensor:
        outputs = linear_output(Problem(made.case, leaves, made.constants))
        return compute_dspark_linear_loss(outputs=outputs, impl=impl, chunk_rows=16, **SETTINGS)

    backend = "inductor" if impl == "kernel" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    expected, fresh = fused(made, impl=impl, chunk_rows=16), made.fresh()
    loss = compiled(fresh.leaves)
    actual = Result(loss.detach(), gradients_of(loss, fresh), {})
    assert_equal(actual, expected._replace(terms={}), 1e-5, "a compiled step")
    assert (actual.gradients["hidden"][inactive] == 0).all()


# --- Arithmetic ----------------------------------------------------------------------------------


def _addmm_flops(
    self_shape: Any, a: Any, b: Any, *args: Any, out_shape: Any = None, **_: Any
) -> int:
    return 2 * a[0] * a[1] * b[1]


class Products:
    """Matrix products in units of ``2 * rows * V * H``, forward and backward."""

    def __init__(self, made: Problem, **options: Any) -> None:
        # The counter does not know addmm_, which adds a product to what is there.
        counter = FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops}
        )
        made = made.fresh()
        outputs = linear_output(made)
        with counter:
            loss = compute_dspark_linear_loss(outputs=outputs, **{**SETTINGS, **options})
        unit = 2 * made.constants["ids"].numel() * V * H
        self.forward = counter.get_total_flops() / unit
        with counter:
            loss.backward()
        self.backward = counter.get_total_flops() / unit


FROZEN = Case("none", None, False, "tied", trainable=False)


@pytest.mark.parametrize("active", [1.0, 0.5, 0.1])
@pytest.mark.parametrize(
    "case,confidence,l1_loss_alpha,products",
    [
        (FROZEN, True, 0.7, 3),
        (FROZEN, False, 0.7, 3),
        (FROZEN, True, 0.0, 3),
        (FROZEN, False, 0.0, 2),
        (FROZEN._replace(trainable=True), True, 0.7, 4),
        (FROZEN._replace(trainable=True), False, 0.0, 3),
        (FROZEN._replace(teacher="contiguous"), True, 0.7, 2),
        (FROZEN._replace(teacher="contiguous", trainable=True), True, 0.7, 3),
        (FROZEN._replace(softcap=4.0, bias=True), True, 0.7, 3),
        # The Markov factors: a product for the logits and one for each of their gradients.
        (FROZEN._replace(markov="vanilla"), True, 0.7, 3 + 2 * R / H),
        (FROZEN._replace(markov="vanilla", trainable=True), True, 0.7, 4 + 3 * R / H),
    ],
)
def test_each_product_is_taken_once(case, confidence, l1_loss_alpha, products, active, impl):
    made = problem(case, shape=(2, 4, 5))
    mask = torch.arange(40) < 40 * active
    made.constants["eval_mask"] = mask[torch.randperm(40, generator=generator(0))].view(2, 4, 5)
    if not confidence:
        del made.leaves["confidence"]
    counted = Products(made, l1_loss_alpha=l1_loss_alpha, chunk_rows=7, impl=impl)
    assert counted.forward == pytest.approx(products * active, rel=1e-12)
    assert counted.backward == 0


class HeadProducts(TorchDispatchMode):
    """How many rows each product with a head ``[H, V]`` had."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(t.shape) for t in args if isinstance(t, Tensor) and t.dim() == 2]
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.rows += [left[0] for left, right in zip(shapes, shapes[1:]) if right == (H, V)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_draft_and_teacher_take_one_product_with_a_head_they_share(bias, named, impl):
    made = problem(FROZEN._replace(bias=bias))
    made.constants["eval_mask"] = torch.ones(SHAPE, dtype=torch.bool)
    changes = {}
    if named:
        changes["target_lm_head_weight"] = made.leaves["weight"]
        changes["target_lm_head_bias"] = made.leaves.get("bias")
    outputs = linear_output(made, **changes)
    with HeadProducts() as products, torch.no_grad():
        compute_dspark_linear_loss(outputs=outputs, impl=impl, chunk_rows=20, **SETTINGS)
    assert products.rows == [40, 20]


def test_only_the_products_of_gradients_that_are_wanted_are_taken(impl):
    made = problem(FROZEN)
    active = float(made.constants["eval_mask"].float().mean())
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})
    with counter, torch.no_grad():
        compute_dspark_linear_loss(outputs=linear_output(made.fresh()), impl=impl, **SETTINGS)
    unit = 2 * made.constants["ids"].numel() * V * H
    assert counter.get_total_flops() / unit == pytest.approx(2 * active, rel=1e-6)


# --- Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffers", "columns", "itemsize", "device", "rows"),
    [
        (1, 49152, 2, "cpu", 640),  # 682 in 64 MiB
        (2, 49152, 4, "cpu", 128),  # 170
        (3, 151936, 4, "cpu", 128),  # 36: fewer than a product needs
        (2, 151936, 2, "cuda", 768),  # 883 in 512 MiB
        (3, 151936, 4, "cuda", 512),  # 294
    ],
)
def test_a_chunk_fills_its_budget_in_multiples_of_128_rows(
    buffers, columns, itemsize, device, rows
):
    assert linear._default_chunk_rows(buffers * columns * itemsize, device, None) == rows


MEMORY_OF_A_STEP = """
import json, torch
from dspark_ext import *
from dspark_ext.bench import peak
N, H, V, dtype, kind = ARGUMENTS
torch.set_num_threads(2)
dtype = getattr(torch, dtype)

def inputs(N, H, V):
    random = torch.Generator().manual_seed(0)
    def filled(*shape):
        # A bounded range will do, and costs less to fill than a normal distribution.
        return torch.empty(shape, dtype=dtype).uniform_(-1, 1, generator=random)
    shape = (1, N // 7, 7)
    hidden, target = filled(*shape, H).requires_grad_(), filled(*shape, H)
    return DSparkLinearOutput(
        hidden, filled(V, H).mul_(H ** -0.5), torch.randint(V, shape, generator=random),
        torch.ones(shape, dtype=torch.bool), torch.ones(shape[:2], dtype=torch.bool),
        torch.zeros(shape, requires_grad=True), target_hidden=target)

def step(made):
    settings = dict(loss_decay_gamma=4.0, ce_loss_alpha=0.1, l1_loss_alpha=0.9,
                    confidence_head_alpha=1.0)
    if kind == "linear":
        loss = compute_dspark_linear_loss(outputs=made, **settings)
    else:
        with torch.no_grad():
            teacher = made.target_hidden @ made.lm_head_weight.t()
        logits = made.draft_hidden @ made.lm_head_weight.t()
        loss = compute_dspark_loss(outputs=DSparkForwardOutput(
            logits, made.target_ids, made.eval_mask, made.block_keep_mask, made.confidence_pred,
            teacher), **settings)
        del logits, teacher
    loss.backward()
    return float(loss.detach())

step(inputs(14, H, 64))  # lazy imports and thread pools
made = inputs(N, H, V)
losses = []
mib = peak.growth_mib(lambda: losses.append(step(made)), "cpu")
print(json.dumps({"mib": mib, "loss": losses[0]}))
"""


def memory_of_a_step(N: int, H: int, V: int, dtype: str, kind: str) -> tuple[float, float]:
    """MiB by which a step's peak lies above its inputs, in a fresh process, and its loss."""
    code = MEMORY_OF_A_STEP.replace("ARGUMENTS", repr((N, H, V, dtype, kind)))
    made = run_json(code, timeout=900, **peak.RETURN_FREED)
    print(json.dumps({"N": N, "H": H, "V": V, "dtype": dtype, "kind": kind, **made}))
    return made["mib"], made["loss"]


def assert_memory_of_chunks(N: int, H: int, V: int, dtype: str, smaller: int, tolerance: float):
    whole, expected = memory_of_a_step(N, H, V, dtype, "materialised")
    chunks, loss = memory_of_a_step(N, H, V, dtype, "linear")
    assert loss == pytest.approx(expected, rel=tolerance)
    itemsize = getattr(torch, dtype).itemsize
    logits = N * V * itemsize / 2**20
    assert whole >= 2.9 * logits, "the materialised step holds two logits tensors and a gradient"
    assert chunks <= 0.15 * whole, f"{chunks:.0f} MiB in chunks, {whole:.0f} MiB at once"
    few, many = sorted([smaller, N])
    before = chunks if few == N else memory_of_a_step(few, H, V, dtype, "linear")[0]
    after = chunks if many == N else memory_of_a_step(many, H, V, dtype, "linear")[0]
    # What cannot but grow: the gradient of the hidden states, and one copy of it in passing.
    gradient = (many - few) * H * itemsize / 2**20
    assert after - before <= 2 * gradient + 4, f"{before:.0f} MiB, at four times N {after:.0f} MiB"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="too slow without a fast BLAS")
def test_a_step_takes_the_memory_of_its_chunks():
    assert_memory_of_chunks(896, 576, 49152, "float32", 224, 1e-5)


@pytest.mark.slow
def test_a_step_at_151936_columns_takes_the_memory_of_its_chunks():
    # Roundings of bf16 logits average out in a mean over 3584 rows.
    assert_memory_of_chunks(3584, 1024, 151936, "bfloat16", 896, 1e-3)


# --- Errors --------------------------------------------------------------------------------------


def refused(error: type[Exception], *parts: str):
    """``pytest.raises`` whose message contains every part, in any order."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(part)})" for part in parts))


def zeros(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


HIDDEN, HEAD = "draft_hidden (2, 3, 5, 16)", "lm_head_weight (33, 16)"
WRONG_SHAPES = {
    # what is replaced: by what, and what the message says beside both shapes
    "draft_hidden of another rank": ({"draft_hidden": zeros(6, 5, 16)}, "[B, A, K, H]"),
    "lm_head_weight's width": ({"lm_head_weight": zeros(33, 15)}, "[V, 16]", HIDDEN),
    "lm_head_weight's rank": ({"lm_head_weight": zeros(33)}, "[V, 16]", HIDDEN),
    "lm_head_weight transposed": ({"lm_head_weight": zeros(16, 33)}, "[V, 16]", HIDDEN),
    "lm_head_bias": ({"lm_head_bias": zeros(32)}, "(33,)", HEAD),
    "lm_head_bias's rank": ({"lm_head_bias": zeros(33, 1)}, "(33,)", HEAD),
    "target_ids": ({"target_ids": zeros(2, 3, 4, dtype=torch.int64)}, "(2, 3, 5)", HIDDEN),
    "eval_mask": ({"eval_mask": zeros(2, 3, 1)}, "(2, 3, 5)", HIDDEN),
    "block_keep_mask": ({"block_keep_mask": zeros(2, 3, 5)}, "(2, 3)", HIDDEN),
    "confidence_pred": ({"confidence_pred": zeros(2, 3, 5, 1)}, "(2, 3, 5)", HIDDEN),
    "markov_features' rows": ({"markov_features": zeros(2, 3, 4, 4)}, "(2, 3, 5, 4)", HIDDEN),
    "markov_features' rank": ({"markov_features": zeros(30, 4)}, "(2, 3, 5, 4)", HIDDEN),
    "markov_features of no rank": ({"markov_features": zeros()}, "(2, 3, 5"),
    "markov_weight's width": (
        {"markov_weight": zeros(33, 3)},
        "[33, 4]",
        "markov_features (2, 3, 5, 4)",
    ),
    "markov_weight's rows": ({"markov_weight": zeros(32, 4)}, "[33, 4]"),
    "target_hidden's rows": ({"target_hidden": zeros(2, 1, 5, 12)}, "(2, 3, 5, 12)", HIDDEN),
    "target_hidden of no rank": ({"target_hidden": zeros()}, "(2, 3, 5"),
    "target_hidden's width": (
        {"target_hidden": zeros(2, 3, 5, 11)},
        "[33, 11]",
        "target_hidden (2, 3, 5, 11)",
    ),
    "target_lm_head_weight's rows": ({"target_lm_head_weight": zeros(34, 12)}, "[33, 12]"),
    "target_lm_head_weight's width": (
        {"target_lm_head_weight": zeros(33, 16)},
        "[33, 12]",
        "target_hidden (2, 3, 5, 12)",
    ),
    "target_lm_head_bias": ({"target_lm_head_bias": zeros(12)}, "(33,)"),
    "aligned_target_logits' columns": (
        {"target_hidden": None, "aligned_target_logits": zeros(2, 3, 5, 32)},
        "(2, 3, 5, 33)",
        HIDDEN,
        HEAD,
    ),
    "aligned_target_logits' rows": (
        {"target_hidden": None, "aligned_target_logits": zeros(2, 3, 4, 33)},
        "(2, 3, 5, 33)",
    ),
}


@pytest.mark.parametrize("what", WRONG_SHAPES)
def test_a_shape_that_does_not_belong_is_named_with_the_one_that_does(what, impl):
    changes, *parts = WRONG_SHAPES[what]
    name, wrong = list(changes.items())[-1]
    made = linear_output(problem(), **changes)
    named = what.split()[0].rstrip("'").removesuffix("'s")
    shape = str(tuple(wrong.shape)) if named == name else name
    with refused(ValueError, named, shape, *parts):
        compute_dspark_linear_loss(outputs=made, impl=impl, **SETTINGS)


def test_a_head_without_columns_is_refused(impl):
    made = linear_output(problem(Case("none", None, False, None)), confidence_pred=None)
    made.lm_head_weight = zeros(0, 16)
    with refused(ValueError, "lm_head_weight", "(0, 16)", "at least one"):
        compute_dspark_linear_loss(outputs=made, impl=impl, **{**SETTINGS, "l1_loss_alpha": 0.0})


FLOATING = ("float32", "bfloat16", "float16", "float64")
WRONG_KINDS = {
    "draft_hidden": (zeros(2, 3, 5, 16, dtype=torch.int64), "int64", *FLOATING),
    "lm_head_weight": (zeros(33, 16, dtype=torch.int8), "int8", *FLOATING),
    "lm_head_bias": (zeros(33, dtype=torch.int64), "int64", *FLOATING),
    "target_ids": (zeros(2, 3, 5), "float32", "int64"),
    "eval_mask": (zeros(2, 3, 5, dtype=torch.complex64), "complex64", "bool"),
    "block_keep_mask": (zeros(2, 3, dtype=torch.complex64), "complex64", "bool"),
    "confidence_pred": (zeros(2, 3, 5, dtype=torch.int64), "int64", *FLOATING),
    "markov_features": (zeros(2, 3, 5, 4, dtype=torch.int64), "int64", *FLOATING),
    "markov_weight": ([[1.0]], "list", "torch.Tensor"),
    "target_hidden": (zeros(2, 3, 5, 12, dtype=torch.int64), "int64", *FLOATING),
    "target_lm_head_weight": ("weight", "str", "torch.Tensor"),
    "target_lm_head_bias": (zeros(33, dtype=torch.bool), "bool", *FLOATING),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_another_kind_of_tensor_is_named_with_those_that_will_do(name, impl):
    wrong, *parts = WRONG_KINDS[name]
    with refused(TypeError, name, *parts):
        made = linear_output(problem(), **{name: wrong})
        compute_dspark_linear_loss(outputs=made, impl=impl, **SETTINGS)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head_weight",
        "lm_head_bias",
        "markov_features",
        "markov_weight",
        "target_hidden",
        "target_lm_head_weight",
        "target_lm_head_bias",
    ],
)
def test_operands_of_two_dtypes_are_refused_outside_autocast(name, impl):
    made = linear_output(problem())
    other = getattr(made, name).to(bf16)
    with refused(TypeError, name, "bfloat16", "draft_hidden", "float32", "torch.autocast"):
        compute_dspark_linear_loss(
            outputs=dataclasses.replace(made, **{name: other}), impl=impl, **SETTINGS
        )


@pytest.mark.parametrize(
    "name",
    [
        "lm_head_weight",
        "lm_head_bias",
        "target_ids",
        "eval_mask",
        "block_keep_mask",
        "confidence_pred",
        "markov_features",
        "markov_weight",
        "target_hidden",
        "target_lm_head_weight",
        "target_lm_head_bias",
    ],
)
def test_a_tensor_elsewhere_is_named_with_both_devices(name):
    made = linear_output(problem())
    elsewhere = getattr(made, name).to("meta")
    with refused(ValueError, name, "meta", "cpu", "one device"):
        compute_dspark_linear_loss(
            outputs=dataclasses.replace(made, **{name: elsewhere}), **SETTINGS
        )


def test_markov_factors_come_together():
    made = linear_output(problem())
    for missing in ("markov_features", "markov_weight"):
        with refused(ValueError, "markov_features", "markov_weight", "together", "None"):
            compute_dspark_linear_loss(
                outputs=dataclasses.replace(made, **{missing: None}), **SETTINGS
            )


def test_two_teachers_are_one_too_many():
    made = linear_output(problem(), aligned_target_logits=zeros(*SHAPE, V))
    with refused(ValueError, "target_hidden", "aligned_target_logits", "both"):
        compute_dspark_linear_loss(outputs=made, **SETTINGS)


def test_an_l1_term_or_a_confidence_without_a_teacher_is_refused():
    made = linear_output(problem(Case(teacher=None)))
    choices = ("target_hidden", "target_lm_head_weight", "aligned_target_logits")
    with refused(ValueError, "confidence_pred", *choices):
        compute_dspark_linear_loss(outputs=made, **{**SETTINGS, "l1_loss_alpha": 0.0})
    made = dataclasses.replace(made, confidence_pred=None)
    with refused(ValueError, "l1_loss_alpha", *choices):
        compute_dspark_linear_loss(outputs=made, **SETTINGS)


def test_a_teacher_of_another_width_needs_a_head_of_its_own():
    made = linear_output(problem(), target_lm_head_weight=None)
    with refused(ValueError, "target_hidden", "12", "lm_head_weight", "16", "of its own"):
        compute_dspark_linear_loss(outputs=made, **SETTINGS)


@pytest.mark.parametrize("softcap", [0.0, -30.0])
def test_a_softcap_is_positive(softcap):
    made = linear_output(problem(), final_logit_softcap=softcap)
    with refused(ValueError, "final_logit_softcap", str(softcap), "positive", "None"):
        compute_dspark_linear_loss(outputs=made, **SETTINGS)


@pytest.mark.parametrize(
    "softcap,error", [(float("nan"), ValueError), (float("inf"), ValueError), ("30", TypeError)]
)
def test_a_softcap_is_a_finite_number(softcap, error):
    made = linear_output(problem(), final_logit_softcap=softcap)
    with refused(error, "final_logit_softcap", "number"):
        compute_dspark_linear_loss(outputs=made, **SETTINGS)


@pytest.mark.parametrize(
    "options,parts",
    [
        ({"chunk_rows": 0}, ("chunk_rows", "0", "at least 1")),
        ({"chunk_rows": -3}, ("chunk_rows", "-3", "at least 1")),
        ({"grad_reduction": "avg"}, ("grad_reduction", "'avg'", "'mean'", "'sum'")),
        ({"impl": "cuda"}, ("impl", "'cuda'", "'auto'", "'kernel'", "'torch'")),
        ({"vocab_start": 3}, ("vocab_start", "tp_group")),
        ({"vocab_size": 33}, ("vocab_size", "tp_group")),
        ({"denominators": torch.ones(3)}, ("denominators", "(3,)", "()")),
    ],
)
def test_an_unknown_option_is_refused_with_the_known_ones(options, parts):
    with refused(ValueError, *parts):
        compute_dspark_linear_loss(outputs=linear_output(problem()), **{**SETTINGS, **options})


@pytest.mark.parametrize("bad", [-1, V, -101, 2**40])
@pytest.mark.parametrize("chunk_rows", [4, None])
def test_an_id_outside_the_vocabulary_is_named_with_its_position(chunk_rows, bad, impl):
    made = problem()
    made.constants["eval_mask"][1, 2, 3] = True
    made.constants["eval_mask"][0, 0, 1] = False  # rows that are left out shift those behind them
    made.constants["ids"][1, 2, 3] = bad
    with refused(IndexError, "[1, 2, 3]", str(bad), "-100"):
        compute_dspark_linear_loss(
            outputs=linear_output(made), impl=impl, chunk_rows=chunk_rows, **SETTINGS
        )
