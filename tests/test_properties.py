"""Whatever the input: the objective and its rows are those of float64 mathematics.

hypothesis draws a forward (``drawn.Drawn``), options and upstream gradients; the answer is judged
by the oracle under bounds that follow from the arithmetic, and by what must hold without one:
ranges, sums, symmetries. The default suite tries a few hundred examples, ``-m slow`` thousands;
both are the same at every run. A failure prints the smallest example that fails, as an expression.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional

import oracle
import pytest
import torch
from conftest import TOLERANCES
from drawn import Drawn, bf16, f16, f32, f64, forwards
from emulated import load
from gpu import emulate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import DTYPES, generator, replace
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


def examples(count: int, **options: Any) -> settings:
    """The same ``count`` examples at every run; no time limit for one, since machines are busy."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
        **options,
    )


ALPHAS = st.sampled_from([0.0, 0.1, 0.9, 2.5, 1e-3])
GAMMAS = st.sampled_from([None, 0, 0.0, -1.0, 1e-320, 0.05, 0.5, 1, 4.0, 1e6, math.inf])
UPSTREAM = st.sampled_from([1.0, 1.0, 3.0, -0.37, 1e-3, 0.0])
options_of_a_loss = st.fixed_dictionaries(
    {
        "loss_decay_gamma": GAMMAS,
        "ce_loss_alpha": ALPHAS,
        "l1_loss_alpha": st.one_of(ALPHAS, st.just(-1.0)),
        "confidence_head_alpha": ALPHAS,
    }
)


# --- Bounds --------------------------------------------------------------------------------------


def arithmetic(draft: Tensor, target: Optional[Tensor]) -> torch.dtype:
    """The dtype a row is computed in."""
    wide = f64 in (draft.dtype, None if target is None else target.dtype)
    return f64 if wide else f32


def underflow(draft: Tensor, target: Optional[Tensor]) -> float:
    """Below it an exponential may be 0: the smallest normal number, for each column."""
    return draft.shape[-1] * torch.finfo(arithmetic(draft, target)).tiny


class Row:
    """What float64 says of one active row, and how far from it the row's results may be."""

    def __init__(self, draft: Tensor, target: Optional[Tensor], label: int) -> None:
        self.dtype = draft.dtype
        self.tolerance = TOLERANCES[draft.dtype]
        self.label = label
        self.x = oracle.softmax(draft)
        self.t = None if target is None else oracle.softmax(target)
        self.tiny = underflow(draft, target)
        self.epsilon = 2.0**-52 if arithmetic(draft, target) == f64 else 2.0**-23
        self.defined = math.isfinite(self.x.m)
        self.has_l1 = self.t is not None and self.defined and math.isfinite(self.t.m)
        self.ce = oracle.cross_entropy(self.x, label) if self.defined else math.nan
        self.l1 = oracle.l1_distance(self.x, self.t) if self.has_l1 else math.nan
        # Two rows of the same numbers agree in every column, in any arithmetic.
        self.is_tie = target is not None and torch.equal(draft.double(), target.double())

    def check_ce(self, actual: float, what: str) -> None:
        if not self.defined and self.label != oracle.IGNORE_INDEX:
            assert math.isnan(actual), what
            return
        if self.label == oracle.IGNORE_INDEX:
            assert actual == 0, what
            return
        tolerance = self.tolerance.ce if self.ce >= 1e-3 else self.tolerance.small_ce
        result = float(torch.tensor(self.ce, dtype=f64 if self.dtype == f64 else f32))
        bound = tolerance * abs(result) + self.tiny if math.isfinite(result) else 0.0
        assert actual == result or abs(actual - result) <= bound, (
            f"{what}: ce {actual} for {result}"
        )

    def check_l1(self, actual: float, what: str) -> None:
        if not self.has_l1:
            assert math.isnan(actual), what
            return
        assert 0 <= actual <= 2 and not (self.is_tie and actual), what
        assert abs(actual - self.l1) <= self.tolerance.l1, f"{what}: l1 {actual} for {self.l1}"

    def gradient(self, a: float, b: float, roundings: int = 1) -> tuple[Tensor, float, Tensor]:
        """The gradient of ``a * ce + b * l1``, how far from it (L2 norm) one is that was rounded
        so often to its dtype, and how much further in columns whose sign rounding decides."""
        a = 0.0 if self.label == oracle.IGNORE_INDEX else a
        ce = a * oracle.cross_entropy_gradient(self.x, self.label)
        l1, loose = torch.zeros_like(ce), torch.zeros_like(ce)
        if b != 0 and self.t is not None and not self.is_tie:
            l1 = b * oracle.l1_gradient(self.x, self.t)
            unresolved = oracle.unresolved(self.x, self.t, self.epsilon)
            loose[unresolved] = 2 * abs(b) * self.x.p[unresolved]
        # Both parts are formed with the same relative error and may cancel. An unresolved column
        # may have any of the three signs, and moves S and with it all others in proportion to p.
        bound = self.tolerance.gradient * roundings * float(ce.norm() + l1.norm())
        bound += float(loose.sum()) * float(self.x.p.norm())
        # What is too small for an exponential, a coefficient or the gradient's dtype.
        step = {f16: 2.0**-25}.get(self.dtype, torch.finfo(self.dtype).tiny)
        bound += (abs(a) + abs(b)) * self.tiny + math.sqrt(len(ce)) * step * roundings
        return ce + l1, bound, loose

    def check_gradient(
        self, actual: Tensor, a: float, b: float, what: str, roundings: int = 1
    ) -> None:
        if not self.defined or (b != 0 and not self.has_l1):
            # Where both coefficients are 0, or the label is ignored, nothing depends on the row.
            nothing = b == 0 and (a == 0 or self.label == oracle.IGNORE_INDEX)
            assert nothing or actual.isnan().all(), what
            return
        expected, bound, loose = self.gradient(a, b, roundings)
        error = float(((actual.double() - expected).abs() - loose).clamp(min=0).norm())
        assert error <= bound, f"{what}: gradient off by {error:.3e}, bound {bound:.3e}"


def rows_of(made: DSparkForwardOutput, with_target: bool) -> dict[tuple, Row]:
    """The active positions."""
    found = {}
    for i in (made.eval_mask != 0).nonzero().tolist():
        i = tuple(i)
        target = made.aligned_target_logits[i] if with_target else None
        found[i] = Row(made.draft_logits.detach()[i], target, int(made.target_ids[i]))
    return found


# --- The objective -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step: the forward, the loss's options, the gradient that arrives from above."""

    drawn: Drawn
    options: dict[str, Any]
    upstream: float
    with_target: bool
    inplace: bool
    impl: str
    threads: int


def steps(**of_forwards: Any) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        drawn=forwards(**of_forwards),
        options=options_of_a_loss,
        upstream=UPSTREAM,
        with_target=st.sampled_from([True, True, True, False]),
        inplace=st.booleans(),
        impl=st.sampled_from(["kernel", "kernel", "torch"]),
        threads=st.sampled_from([1, 1, 2]),
    )


def check_step(step: Step) -> None:
    """Loss, terms and gradients of one step are the oracle's."""
    options = dict(step.options)
    made = step.drawn.outputs()
    if not step.with_target:
        made = replace(made, aligned_target_logits=None, confidence_pred=None)
        options["l1_loss_alpha"] = min(options["l1_loss_alpha"], 0.0)
    alphas = [options[f"{n}_alpha"] for n in ("ce_loss", "l1_loss", "confidence_head")]
    expected = oracle.objective(made, **options)
    leaf, z = made.draft_logits, made.confidence_pred
    scale = step.upstream * (1024 if leaf.dtype == f16 else 1)
    # In place, the logits are no leaf, and a buffer of their own layout.
    draft = torch.empty_like(leaf).copy_(leaf) if step.inplace else leaf
    torch.set_num_threads(step.threads)
    loss, terms = compute_dspark_loss(
        outputs=dataclasses.replace(made, draft_logits=draft),
        return_terms=True,
        inplace_grad=step.inplace,
        impl=step.impl,
        **options,
    )
    inputs = [leaf] if z is None else [leaf, z]
    gradient, *z_gradient = torch.autograd.grad(loss * scale, inputs)

    tolerance = TOLERANCES[leaf.dtype]
    w = oracle.weights(made.eval_mask, options["loss_decay_gamma"])
    den = float(w.sum())
    # Sums of den-weighted values; the BCE of a saturated logit z carries |z| times accept's error.
    z_error = 0.0
    if z is not None:
        z_error = float((w * z.detach().double().abs().nan_to_num()).sum()) * tolerance.l1
    K = made.eval_mask.shape[-1]
    largest = max(1.0, float(made.eval_mask.double().max()) if made.eval_mask.numel() else 1.0)
    rows = rows_of(made, alphas[1] > 0)
    ce = sum(abs(float(w[i]) * row.ce) for i, row in rows.items() if math.isfinite(row.ce))
    largest_ce = max((abs(row.ce) for row in rows.values() if math.isfinite(row.ce)), default=0.0)
    # A row's ce is a number of the result's dtype, and so are the sums.
    overflows = max(ce, largest_ce) > torch.finfo(loss.dtype).max / 2
    for name, value in expected.terms.items():
        if overflows and name in ("loss", "ce_loss") and not terms[name].isfinite():
            continue
        value = torch.as_tensor(value, dtype=f64)
        error = tolerance.sums * (1 + den) + z_error / (den + oracle.EPSILON)
        if name == "tau_num":  # each of a block's products of up to K accept rates
            error += len(made.block_keep_mask.flatten()) * K * K * largest**K * tolerance.l1
        if name == "confidence_cumprod_bias_num":
            error += den * K * largest**K * tolerance.l1
        assert_close(terms[name], value, tolerance.sums, error, f"{name} of {step}")
    error = tolerance.sums * (1 + sum(map(abs, alphas))) + z_error * alphas[2] / (
        den + oracle.EPSILON
    )
    if not overflows or loss.isfinite():
        assert_close(loss.detach(), expected.loss, tolerance.sums, error, f"loss of {step}")

    factor = scale / (den + oracle.EPSILON) if den > 0 else 0.0
    active = made.eval_mask != 0
    assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
    assert (gradient[~active] == 0).all(), f"gradient of an inactive row of {step}"
    roundings = 1 if abs(step.upstream) in (0, 1) or leaf.dtype == f16 else 2
    for i, row in rows.items():
        a, b = float(w[i]) * factor * alphas[0], float(w[i]) * factor * max(alphas[1], 0.0)
        # A kernel writes its gradient before it knows the upstream factor, and 0 * NaN is NaN.
        if step.upstream == 0 and not (row.defined and (row.has_l1 or alphas[1] <= 0)):
            continue
        row.check_gradient(gradient[i], a, b, f"row {i} of {step}", roundings)
    if z is not None:
        wanted = step.upstream * (scale / step.upstream if step.upstream else 0.0)
        wanted = expected.confidence_gradient * wanted
        # w * factor * (sigmoid(z) - accept): accept carries half of l1's error.
        error = float(w.max()) * abs(factor) * alphas[2] * tolerance.l1 if w.numel() else 0.0
        assert_close(z_gradient[0], wanted, tolerance.sums, error, f"confidence gradient of {step}")


def assert_close(
    actual: Tensor, expected: Any, relative: float, absolute: float, what: str
) -> None:
    expected = torch.as_tensor(expected, dtype=f64)
    # An overflow of the result's dtype is its infinity.
    expected = expected.to(actual.dtype).double()
    assert torch.allclose(
        actual.double(), expected, rtol=relative, atol=absolute, equal_nan=True
    ), f"{what}: {actual.tolist()} for {expected.tolist()}"


@examples(150)
@given(step=steps())
def test_every_step_is_that_of_float64_mathematics(step):
    check_step(step)


@pytest.mark.slow
@examples(3000)
@given(step=steps())
def test_thousands_of_steps_are_those_of_float64_mathematics(step):
    check_step(step)


# --- Rows ----------------------------------------------------------------------------------------

LAYOUTS_OF_UPSTREAM = {
    "contiguous": lambda g: g,
    "expanded": lambda g: g.flatten()[:1].expand(g.shape) if g.numel() else g,
    "strided": lambda g: torch.stack([g, -g], -1)[..., 0],
    "transposed": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
}


@dataclasses.dataclass(frozen=True)
class RowsStep:
    """Per-row results under upstream gradients of their own, for ce and for l1; None: not used."""

    drawn: Drawn
    ce: Optional[str]
    l1: Optional[str]
    zeros: float  # share of the upstream gradients that are 0
    impl: str
    threads: int


def rows_steps(**of_forwards: Any) -> st.SearchStrategy[RowsStep]:
    layout = st.sampled_from([None, *LAYOUTS_OF_UPSTREAM])
    return st.builds(
        RowsStep,
        drawn=forwards(**of_forwards),
        ce=layout,
        l1=layout,
        zeros=st.sampled_from([0.0, 0.0, 0.5]),
        impl=st.sampled_from(["kernel", "kernel", "torch"]),
        threads=st.sampled_from([1, 1, 2]),
    )


def check_rows(step: RowsStep) -> None:
    """``ce_and_l1``, ``l1_distance`` and ``token_log_prob``, value and gradient."""
    made = step.drawn.outputs()
    draft, target, ids = made.draft_logits, made.aligned_target_logits, made.target_ids
    active = made.eval_mask != 0
    g = generator(step.drawn.seed + 1)
    scale = 1024 if draft.dtype == f16 else 1

    def upstream(layout: Optional[str], like: Tensor) -> Tensor:
        if layout is None:
            return torch.zeros_like(like)
        values = torch.randn(like.shape, generator=g, dtype=f64) * scale
        values = torch.where(torch.rand(like.shape, generator=g) < step.zeros, 0, values)
        return LAYOUTS_OF_UPSTREAM[layout](values.to(like.dtype))

    torch.set_num_threads(step.threads)
    options = {"active": made.eval_mask, "impl": step.impl}
    ce, l1 = ce_and_l1(draft, target, ids, **options)
    distance = l1_distance(draft, target, **options)
    log_prob = token_log_prob(draft, ids, **options)
    a, b = upstream(step.ce, ce), upstream(step.l1, l1)
    outputs = [(ce, a, step.ce), (l1, b, step.l1)]
    used = [(value, grad) for value, grad, layout in outputs if layout is not None]
    both = torch.zeros_like(draft)
    if used:
        values, grads = zip(*used)
        (both,) = torch.autograd.grad(values, draft, grads)
    (of_distance,) = torch.autograd.grad(distance, draft, b)
    (of_log_prob,) = torch.autograd.grad(log_prob, draft, -a)
    ce, l1, distance, log_prob = (v.detach() for v in (ce, l1, distance, log_prob))
    for value in (ce, l1, distance, log_prob, both, of_distance, of_log_prob):
        assert (value[~active] == 0).all(), step
    alone = rows_of(made, False)
    for i, row in rows_of(made, True).items():
        what = f"row {i} of {step}"
        row.check_ce(float(ce[i]), what)
        row.check_l1(float(l1[i]), what)
        row.check_l1(float(distance[i]), what)
        alone[i].check_ce(-float(log_prob[i]), what)
        row.check_gradient(both[i], float(a[i]), float(b[i]), what)
        row.check_gradient(of_distance[i], 0.0, float(b[i]), f"l1_distance, {what}")
        alone[i].check_gradient(of_log_prob[i], float(a[i]), 0.0, f"token_log_prob, {what}")


@examples(150)
@given(step=rows_steps())
def test_every_row_is_that_of_float64_mathematics(step):
    check_rows(step)


@pytest.mark.slow
@examples(2500)
@given(step=rows_steps())
def test_thousands_of_rows_are_those_of_float64_mathematics(step):
    check_rows(step)


# --- The linear loss -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LinearStep:
    """Operands that are small whole numbers, so that logits are too, exactly, in every dtype."""

    seed: int
    shape: tuple[int, int, int]
    sizes: tuple[int, int, int]  # V, H, R; without a Markov head where R is 0
    dtype: torch.dtype
    teacher: str  # a head of its own, the draft's head, or logits
    bias: bool  # a tenth of its columns at -inf, as a masked vocabulary has
    keep: float
    ids: torch.dtype
    options: dict[str, Any]
    upstream: float
    chunk_rows: Optional[int]
    impl: str
    threads: int

    def outputs(self) -> DSparkLinearOutput:
        (V, H, R), g = self.sizes, generator(self.seed)

        def whole(largest: int, *shape: int) -> Tensor:
            return torch.randint(-largest, largest + 1, shape, generator=g).to(self.dtype)

        active = torch.rand(self.shape, generator=g) < self.keep
        nowhere = torch.where(active, 0.0, math.nan)[..., None].to(self.dtype)
        ids = torch.randint(min(V, torch.iinfo(self.ids).max + 1), self.shape, generator=g)
        bias = None
        if self.bias:
            bias = torch.where(torch.rand(V, generator=g) < 0.1, -math.inf, whole(4, V))
            bias[int(torch.randint(V, (), generator=g))] = 2.0
            ids = torch.where(bias[ids].isinf(), -100 if self.ids.is_signed else ids, ids)
            bias.requires_grad_()
        own = self.teacher == "own"
        return DSparkLinearOutput(
            draft_hidden=(whole(1, *self.shape, H) + nowhere).requires_grad_(),
            lm_head_weight=whole(3, V, H).requires_grad_(),
            target_ids=torch.where(active, ids, -1).to(self.ids),
            eval_mask=active,
            block_keep_mask=torch.rand(self.shape[:2], generator=g) < 0.8,
            confidence_pred=torch.randn(self.shape, generator=g).requires_grad_(),
            markov_features=(whole(1, *self.shape, R) + nowhere).requires_grad_() if R else None,
            markov_weight=whole(3, V, R).requires_grad_() if R else None,
            target_hidden=None if self.teacher == "logits" else whole(1, *self.shape, H) + nowhere,
            target_lm_head_weight=whole(3, V, H) if own else None,
            target_lm_head_bias=whole(4, V) if own and self.bias else None,
            aligned_target_logits=whole(9, *self.shape, V) if self.teacher == "logits" else None,
            lm_head_bias=bias,
        )


linear_steps = st.builds(
    LinearStep,
    seed=st.integers(0, 2**32),
    shape=st.tuples(*map(st.sampled_from, ((1, 2), (1, 2, 3, 2, 3, 0), (1, 2, 3, 4)))),
    sizes=st.tuples(*map(st.sampled_from, ((1, 2, 7, 33, 300), (1, 4, 8), (0, 0, 1, 3)))),
    dtype=st.sampled_from(DTYPES),
    teacher=st.sampled_from(["own", "tied", "logits"]),
    bias=st.booleans(),
    keep=st.sampled_from([1.0, 1.0, 0.5, 0.5, 0.0]),
    ids=st.sampled_from([torch.int64, torch.int32, torch.int8, torch.uint8]),
    options=options_of_a_loss,
    upstream=UPSTREAM,
    chunk_rows=st.sampled_from([None, None, 1, 3, 100]),
    impl=st.sampled_from(["kernel", "kernel", "torch"]),
    threads=st.sampled_from([1, 1, 2]),
)


def materialised(made: DSparkLinearOutput) -> DSparkForwardOutput:
    """The logits that the heads give, exactly."""

    def product(rows: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        logits = rows.detach().double() @ weight.detach().double().t()
        return logits if bias is None else logits + bias.detach().double()

    draft = product(made.draft_hidden, made.lm_head_weight, made.lm_head_bias)
    if made.markov_features is not None:
        draft = draft + product(made.markov_features, made.markov_weight, None)
    target = made.aligned_target_logits
    if target is None:
        heads = (made.target_lm_head_weight, made.target_lm_head_bias)
        if heads[0] is None:
            heads = (made.lm_head_weight, made.lm_head_bias)
        target = product(made.target_hidden, *heads)
    dtype = made.draft_hidden.dtype
    return DSparkForwardOutput(
        draft.to(dtype),
        made.target_ids,
        made.eval_mask,
        made.block_keep_mask,
        made.confidence_pred,
        target.to(dtype),
    )


def check_linear(step: LinearStep) -> None:
    made = step.outputs()
    logits = materialised(made)
    expected = oracle.objective(logits, **step.options)
    scale = step.upstream * (1024 if step.dtype == f16 else 1)
    torch.set_num_threads(step.threads)
    loss, terms = compute_dspark_linear_loss(
        outputs=made, return_terms=True, impl=step.impl, chunk_rows=step.chunk_rows, **step.options
    )
    hidden, features = made.draft_hidden, made.markov_features
    operands = {"hidden": hidden, "weight": made.lm_head_weight, "bias": made.lm_head_bias}
    operands.update(features=features, markov_weight=made.markov_weight)
    operands = {name: tensor for name, tensor in operands.items() if tensor is not None}
    found = dict(zip(operands, torch.autograd.grad(loss * scale, [*operands.values()])))

    tolerance = TOLERANCES[step.dtype]
    w = oracle.weights(made.eval_mask, step.options["loss_decay_gamma"])
    den, K = float(w.sum()), step.shape[-1]
    for name, value in {**expected.terms, "loss": expected.terms["loss"]}.items():
        error = tolerance.sums * (1 + den) * (1 + K * K)
        assert_close(terms[name], value, tolerance.sums, error, f"{name} of {step}")
    assert_close(loss.detach(), expected.loss, tolerance.sums, tolerance.sums, f"loss of {step}")

    # Each row's bound goes through the products as an error does.
    V = step.sizes[0]
    G = torch.zeros(*step.shape, V, dtype=f64)
    bounds, loose = torch.zeros(step.shape, dtype=f64), torch.zeros_like(G)
    factor = scale / (den + oracle.EPSILON) if den > 0 else 0.0
    for i, row in rows_of(logits, step.options["l1_loss_alpha"] > 0).items():
        a = float(w[i]) * factor * step.options["ce_loss_alpha"]
        b = float(w[i]) * factor * max(step.options["l1_loss_alpha"], 0.0)
        G[i], bounds[i], loose[i] = row.gradient(a, b, roundings=2)
    wide = {n: t.detach().double().nan_to_num(nan=0.0) for n, t in operands.items()}

    def judge(name: str, value: Tensor, bound: Tensor) -> None:
        # The products accumulate in the operands' arithmetic and round to their dtype.
        rounding = 4 * torch.finfo(step.dtype).eps
        error = (found[name].double() - value).abs()
        bound = bound + rounding * value.abs() + 2.0**-24 * (step.dtype == f16)
        bound = bound + torch.finfo(f32 if step.dtype != f64 else f64).eps * V * value.abs().amax()
        assert (error <= bound).all(), f"{name} of {step}: off by {float(error.max()):.3e}"

    if G.numel() == 0:
        assert all(not value.any() for value in found.values())
        return
    for rows, weight in (("hidden", "weight"), ("features", "markov_weight")):
        if rows in found:
            column_norms = wide[weight].norm(dim=0)
            judge(
                rows,
                G @ wide[weight],
                bounds[..., None] * column_norms + loose @ wide[weight].abs(),
            )
            x, by_row = wide[rows].flatten(0, 2), (bounds[..., None] + loose).flatten(0, 2)
            judge(weight, G.flatten(0, 2).t() @ x, by_row.t() @ x.abs())
    if "bias" in found:
        judge("bias", G.sum((0, 1, 2)), (bounds[..., None] + loose).sum((0, 1, 2)))


@examples(60)
@given(step=linear_steps)
def test_every_linear_step_is_that_of_its_logits(step):
    check_linear(step)


@pytest.mark.slow
@examples(1000)
@given(step=linear_steps)
def test_thousands_of_linear_steps_are_those_of_their_logits(step):
    check_linear(step)


# --- The CUDA kernels ----------------------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch, tmp_path_factory):
    """The device's path, its kernels running on the host. Float64 is not theirs."""
    emulate(load("emulated_cuda", tmp_path_factory), monkeypatch)


NARROW = tuple(dtype for dtype in DTYPES if dtype != f64)


@examples(25)
@given(step=steps(dtypes=NARROW, chunks=False))
def test_every_step_of_the_cuda_kernels_is_that_of_float64_mathematics(emulated, step):
    check_step(dataclasses.replace(step, impl="kernel"))


@examples(25)
@given(step=rows_steps(dtypes=NARROW, chunks=False))
def test_every_row_of_the_cuda_kernels_is_that_of_float64_mathematics(emulated, step):
    check_rows(dataclasses.replace(step, impl="kernel"))


@pytest.mark.slow
@examples(300)
@given(step=steps(dtypes=NARROW))
def test_hundreds_of_steps_of_the_cuda_kernels_are_those_of_float64_mathematics(emulated, step):
    check_step(dataclasses.replace(step, impl="kernel"))


@pytest.mark.slow
@examples(300)
@given(step=rows_steps(dtypes=NARROW))
def test_hundreds_of_rows_of_the_cuda_kernels_are_those_of_float64_mathematics(emulated, step):
    check_rows(dataclasses.replace(step, impl="kernel"))


# --- What holds without an oracle ----------------------------------------------------------------

implementations = st.sampled_from(["kernel", "kernel", "torch"])
defined = forwards(undefined=False)


def rows_with_gradient(
    draft: Tensor, target: Tensor, ids: Tensor, active: Tensor, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``ce``, ``l1`` and the gradient of ``ce + 2 l1`` (in fp16 under a loss scale)."""
    draft = draft.detach().requires_grad_()
    ce, l1 = ce_and_l1(draft, target, ids, active=active, impl=impl)
    scale = 1024 if draft.dtype == f16 else 1
    (gradient,) = torch.autograd.grad((scale * (ce + 2 * l1)).sum(), draft)
    return ce.detach(), l1.detach(), gradient


@examples(40)
@given(drawn=defined, impl=implementations)
def test_distances_rates_and_lengths_stay_in_their_ranges(drawn, impl):
    made = drawn.outputs()
    made = replace(made, eval_mask=made.eval_mask != 0)
    B, A, K, _ = drawn.shape
    options = {"loss_decay_gamma": None, "ce_loss_alpha": 0.0, "l1_loss_alpha": 1.0}
    for b in range(B):
        for a in range(A):
            block = (slice(b, b + 1), slice(a, a + 1))
            one = DSparkForwardOutput(
                **{n: None if v is None else v.detach()[block] for n, v in vars(made).items()}
            )
            _, terms = compute_dspark_loss(
                outputs=one, confidence_head_alpha=1.0, return_terms=True, impl=impl, **options
            )
            accepted, positions = (terms[f"accept_rate_per_pos_{n}"] for n in ("num", "den"))
            assert (accepted >= 0).all() and (accepted <= positions).all()
            assert 0 <= terms["l1_loss"] <= 2
            valid = bool(one.block_keep_mask) and bool(one.eval_mask.any())
            assert terms["tau_den"] == valid
            assert valid <= terms["tau_num"] <= valid * (K + 1)
    l1 = l1_distance(
        made.draft_logits, made.aligned_target_logits, active=made.eval_mask, impl=impl
    )
    assert (l1 >= 0).all() and (l1 <= 2).all()


@examples(40)
@given(drawn=defined, impl=implementations)
def test_a_rows_gradient_sums_to_zero(drawn, impl):
    made = drawn.outputs()
    arguments = (made.draft_logits, made.aligned_target_logits, made.target_ids, made.eval_mask)
    gradient = rows_with_gradient(*arguments, impl)[-1].double()
    # Each element's rounding, and the common relative error of its two parts.
    dtype = drawn.dtypes[0]
    relative = torch.finfo(dtype).eps + TOLERANCES[dtype].gradient
    smallest = {f16: 2.0**-25}.get(dtype, torch.finfo(dtype).tiny)
    bound = relative * gradient.abs().sum(-1) + drawn.shape[-1] * smallest
    assert (gradient.sum(-1).abs() <= bound).all()


@examples(40)
@given(drawn=defined, impl=implementations, seed=st.integers(0, 2**32))
def test_permuted_columns_permute_the_results(drawn, impl, seed):
    made = drawn.outputs()
    V = drawn.shape[-1]
    order = torch.randperm(V, generator=generator(seed))
    place = torch.empty_like(order)
    place[order] = torch.arange(V)
    active, ids = made.eval_mask != 0, made.target_ids.to(torch.int64)
    moved = torch.where(active & (ids != -100), place[ids.clamp(0, V - 1)], ids)
    ce, l1, gradient = rows_with_gradient(
        made.draft_logits[..., order], made.aligned_target_logits[..., order], moved, active, impl
    )
    scale = 1024 if drawn.dtypes[0] == f16 else 1
    for i, row in rows_of(made, True).items():
        what = f"row {i} of {drawn}"
        row.check_ce(float(ce[i]), what)
        row.check_l1(float(l1[i]), what)
        row.check_gradient(gradient[i][place], scale, 2 * scale, what)


@examples(40)
@given(drawn=forwards(), impl=implementations, seed=st.integers(0, 2**32))
def test_permuted_rows_permute_the_results_bit_by_bit(drawn, impl, seed):
    made = drawn.outputs()
    flat = [
        t.flatten(0, 2)
        for t in (
            made.draft_logits,
            made.aligned_target_logits,
            made.target_ids,
            made.eval_mask,
        )
    ]
    order = torch.randperm(len(flat[0]), generator=generator(seed))
    some = order[: len(order) // 2 + 1]  # and with fewer neighbours
    together = rows_with_gradient(*flat, impl)
    for chosen in (order, some):
        apart = rows_with_gradient(*(t[chosen] for t in flat), impl)
        for x, y in zip(apart, together):
            assert torch.equal(x.nan_to_num(nan=7.0), y[chosen].nan_to_num(nan=7.0))


# The largest offset and the finest step that every sum with it keeps, by dtype.
OFFSETS = {
    f32: (2.0**18, 2.0**-4),
    bf16: (96.0, 1.0),
    f16: (64.0, 2.0**-4),
    f64: (2.0**40, 2.0**-6),
}


@examples(40)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    V=st.sampled_from([1, 2, 33, 300, 2049]),
    shares=st.tuples(*[st.sampled_from([-1.0, 0.0, 0.25, 1.0])] * 2),
    impl=implementations,
)
def test_a_constant_added_to_a_row_changes_no_bit_where_it_is_exact(seed, dtype, V, shares, impl):
    g = generator(seed)
    largest, step = OFFSETS[dtype]
    draft, target = (torch.randint(-8, 9, (3, V), generator=g).double() for _ in range(2))
    draft, target = (
        (x + torch.randint(0, 16, (3, V), generator=g) * step) for x in (draft, target)
    )
    ids, active = torch.randint(V, (3,), generator=g), torch.ones(3)
    moved = [(x + share * largest).to(dtype) for x, share in zip((draft, target), shares)]
    plain = rows_with_gradient(draft.to(dtype), target.to(dtype), ids, active, impl)
    for x, y in zip(rows_with_gradient(*moved, ids, active, impl), plain):
        assert torch.equal(x, y)


@examples(40)
@given(drawn=defined, options=options_of_a_loss, impl=implementations, seed=st.integers(0, 99))
def test_the_parts_of_a_batch_add_up_to_the_whole(drawn, options, impl, seed):
    made = drawn.outputs()
    cut = seed % (drawn.shape[1] + 1)
    w = oracle.weights(made.eval_mask, options["loss_decay_gamma"])
    denominators = w.sum().to(f64 if drawn.dtypes[0] == f64 else f32)
    parts = [made, *(part_of(made, s) for s in (slice(0, cut), slice(cut, None)))]
    found = []
    for part in parts:
        part = replace(part)
        loss, terms = compute_dspark_loss(
            outputs=part, return_terms=True, denominators=denominators, impl=impl, **options
        )
        (gradient,) = torch.autograd.grad(loss, part.draft_logits)
        for name in ("loss", "ce_loss", "l1_loss", "confidence_loss"):
            own = "ce_loss" if name == "loss" else name
            terms[name] = terms[name] * (terms[f"{own}_den"] + oracle.EPSILON)
        if options["l1_loss_alpha"] < 0 or part.confidence_pred is None:
            del terms["loss"]  # its parts have other denominators
        found.append((loss.detach(), terms, gradient))
    whole, *others = found
    assert torch.equal(torch.cat([gradient for _, _, gradient in others], 1), whole[2])
    tolerance = TOLERANCES[drawn.dtypes[0]].sums
    for name, value in {"the loss": whole[0], **whole[1]}.items():
        values = [{"the loss": part[0], **part[1]}[name].double() for part in others]
        size = tolerance * (1 + float(sum(v.abs().sum() for v in values)))
        assert_close(sum(values), value.double(), tolerance, size, f"{name} of {drawn}")


def part_of(made: DSparkForwardOutput, anchors: slice) -> DSparkForwardOutput:
    def cut(value: Optional[Tensor]) -> Optional[Tensor]:
        return (
            None
            if value is None
            else value.detach()[:, anchors].requires_grad_(value.requires_grad)
        )

    return DSparkForwardOutput(**{name: cut(value) for name, value in vars(made).items()})
