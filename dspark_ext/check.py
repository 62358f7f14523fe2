"""``python -m dspark_ext check``: is what is installed here right, on the devices that are here?

Every figure compares a result of this build with float64 mathematics in plain PyTorch, written
in this file from the formulas and differentiated by autograd: nothing of the package and none of
its tests takes part. The CPU is checked at every instruction-set level that the processor has,
each GPU with its kernels, or with the PyTorch path where the build has none for it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

import dspark_ext
from dspark_ext import _C, _backend

WIDTH = 80

GAMMA, CE_ALPHA, L1_ALPHA, CONFIDENCE_ALPHA = 4.0, 0.1, 0.9, 1.0
SETTINGS: dict[str, Any] = dict(
    loss_decay_gamma=GAMMA,
    ce_loss_alpha=CE_ALPHA,
    l1_loss_alpha=L1_ALPHA,
    confidence_head_alpha=CONFIDENCE_ALPHA,
)
BLOCKS = (2, 2, 5)  # B, A, K

# Fewer columns than a kernel's unit of work, an odd number of them, and two real vocabularies.
VOCABULARIES = (250, 4099, 49152, 151936)
SMALL = 4099

f32, bf16, f16, f64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@dataclasses.dataclass(frozen=True)
class Limit:
    """The largest error that passes: of values, and of gradients in the L2 norm."""

    value: float
    gradient: float


# fp32 arithmetic for the first three; a gradient's dtype adds its rounding.
LIMITS = {
    f32: Limit(5e-6, 5e-6),
    bf16: Limit(5e-6, 4e-3),
    f16: Limit(5e-6, 5e-4),
    f64: Limit(1e-12, 1e-12),
}
# Low-precision gradients underflow without a loss scale. A power of two, so that the factor itself
# rounds nothing and is still one that backward has to multiply by.
SCALES = {f32: 2.0, bf16: 2.0, f16: 2.0**14, f64: 2.0}


@dataclasses.dataclass(frozen=True)
class Result:
    """One line: the ``figure`` passes if it is at most ``limit``; ``error`` says why none is."""

    place: str
    check: str
    figure: Optional[float]
    limit: float
    error: Optional[str] = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.figure is not None and self.figure <= self.limit


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the checks run: a device, what it is called, and the implementation to check there."""

    name: str
    device: torch.device
    impl: str


Check = tuple[str, float, Callable[[Place], float]]  # what, limit, measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--this-process",
        action="store_true",
        help="check the active CPU level and the GPUs only, and start no process for other levels",
    )
    parser.add_argument("--cpu", action="store_true", help="leave the GPUs out", dest="cpu_only")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each check; 0 if all passed, else 1."""
    started = time.perf_counter()
    try:
        level = _C.cpu_level()
    except ValueError as error:
        print(f"the CPU kernels cannot run: {error}", file=sys.stderr)
        return 1
    results = []
    for result in all_results(level, args.this_process, args.cpu_only):
        results.append(result)
        if not args.json:
            print(render(result), flush=True)
    failed = [result for result in results if not result.ok]
    seconds = time.perf_counter() - started
    if args.json:
        report = {
            "dspark_ext": dspark_ext.__version__,
            "torch": torch.__version__,
            "ok": not failed,
            "seconds": round(seconds, 1),
            "results": [{**dataclasses.asdict(result), "ok": result.ok} for result in results],
        }
        print(json.dumps(report, indent=2))
    else:
        outcome = "all passed" if not failed else f"{len(failed)} FAILED"
        print(f"\n{len(results)} checks in {seconds:.0f} s: {outcome}")
    return 1 if failed else 0


def all_results(level: str, this_process: bool, cpu_only: bool) -> Iterator[Result]:
    """Every result, as it comes: this CPU level, the GPUs, then the other levels."""
    for place in places(level, cpu_only):
        yield from results_of(place)
    if not this_process:
        for other in _C.cpu_available_levels().split():
            if other != level:
                yield from results_of_level(other)


def places(level: str, cpu_only: bool = False) -> list[Place]:
    """The CPU at its active level and, unless ``cpu_only``, every GPU that torch can use."""
    found = [Place(f"cpu {level}", torch.device("cpu"), "kernel")]
    if not cpu_only and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            kernels = _backend.has_kernels(device)
            name = str(device) if kernels else f"{device} torch"
            found.append(Place(name, device, "kernel" if kernels else "torch"))
    return found


def results_of(place: Place) -> Iterator[Result]:
    """The results of every check at one place; a check that raises has failed."""
    for what, limit, measure in checks(place):
        figure: Optional[float] = None
        error: Optional[str] = None
        try:
            figure = float(measure(place))
            if not math.isfinite(figure):
                figure, error = None, f"the largest error is {figure}"
        except Exception as raised:  # whatever is broken, the other checks still say what is not
            error = f"{type(raised).__name__}: {raised}"
        yield Result(place.name, what, figure, limit, error)


def results_of_level(level: str) -> Iterator[Result]:
    """The results of the CPU at another level, which is chosen when a process starts."""
    command = [sys.executable, "-m", "dspark_ext", "check", "--this-process", "--cpu", "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "DSPARK_EXT_CPU_LEVEL": level},
    )
    try:
        results = json.loads(done.stdout)["results"]
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        error = f"the process ended with status {done.returncode}: {reason}"
        yield Result(f"cpu {level}", "a process at this level", None, 0.0, error)
        return
    for result in results:
        result.pop("ok")
        yield Result(**result)


def render(result: Result) -> str:
    """One line of at most 80 columns, and the error of a check that raised below it."""
    if result.figure is None:
        figure = ""
    elif result.limit == 0:
        figure = f"{result.figure:.0f} differ"
    else:
        figure = f"{result.figure:.1e} of {result.limit:.0e}"
    line = f"{result.place:<14}{result.check:<40}{figure:>18}  {'ok' if result.ok else 'FAILED'}"
    if result.error is None:
        return line
    indent = " " * 14
    return f"{line}\n" + textwrap.fill(
        result.error, WIDTH, initial_indent=indent, subsequent_indent=indent
    )


# --- The checks ---------------------------------------------------------------------------------


def checks(place: Place) -> list[Check]:
    """What is checked at a place, in the order of the report."""
    made: list[Check] = []
    for draft, target in ((f32, f32), (bf16, bf16), (f16, f16), (f64, f64), (bf16, f32)):
        limit, name = LIMITS[draft], _pair_name(draft, target)
        arguments = dict(draft=draft, target=target)
        made += [
            (f"objective and terms, {name}", limit.value, _bind(objective_values, **arguments)),
            (f"objective's gradient, {name}", limit.gradient, _bind(objective_grad, **arguments)),
        ]
    for dtype in (f32, bf16, f16, f64):
        limit, name = LIMITS[dtype], _name(dtype)
        made += [
            (f"ce_and_l1, {name}", limit.value, _bind(row_values, dtype=dtype)),
            (f"ce_and_l1's gradient, {name}", limit.gradient, _bind(row_grad, dtype=dtype)),
        ]
    made += [
        ("l1_distance", LIMITS[f32].value, distance_values),
        ("l1_distance's gradient", LIMITS[f32].gradient, distance_grad),
        ("token_log_prob", LIMITS[f32].value, log_prob_values),
        ("token_log_prob's gradient", LIMITS[f32].gradient, log_prob_grad),
        ("confident rows, cross-entropy", 1e-5, confident_values),
        ("confident rows, gradient", 1e-5, confident_grad),
        ("from hidden states, float32", 1e-5, _bind(linear, dtype=f32)),
        ("from hidden states, float64", 1e-12, _bind(linear, dtype=f64)),
        ("the PyTorch path, float32", LIMITS[f32].gradient, torch_path),
        ("a gradient in place", 0.0, in_place),
        ("inactive rows that hold NaN", 0.0, inactive_rows),
        ("a batch without an active row", 0.0, no_active_row),
        ("the id -100", LIMITS[f32].value, ignored_ids),
        ("identical rows have no gradient", 0.0, identical_rows),
        ("tied maxima", LIMITS[f32].gradient, tied_maxima),
        ("logits of -inf", LIMITS[f32].gradient, minus_infinity),
        ("the same bits on every call", 0.0, repeated_calls),
    ]
    if place.device.type == "cpu":
        made += [
            ("a row alone and among others", 0.0, row_alone),
            ("the same bits at any number of threads", 0.0, any_number_of_threads),
            ("an id that is no column is refused", 0.0, refused_ids),
        ]
    return made


def objective_values(place: Place, draft: torch.dtype, target: torch.dtype) -> float:
    """Largest error of the loss and of every term, relative to what is larger, it or 1."""
    errors = []
    for columns in VOCABULARIES:
        made = _case(columns, draft, target)
        loss, terms, _ = _step(place, made, SCALES[draft])
        expected_loss, expected, _ = _expected(columns, draft, target)
        errors += [_error(loss, expected_loss)]
        errors += [_error(terms[name], value) for name, value in expected.items()]
    return _largest(errors)


def objective_grad(place: Place, draft: torch.dtype, target: torch.dtype) -> float:
    """Largest relative error of the gradients by draft logits and by confidence logits."""
    errors = []
    for columns in VOCABULARIES:
        made = _case(columns, draft, target)
        _, _, gradients = _step(place, made, SCALES[draft])
        expected = _expected(columns, draft, target)[2]
        # The confidence logits are fp32 whatever the draft is: their gradient is never coarse.
        errors += [_relative(gradients[name], value) for name, value in expected.items()]
    return _largest(errors)


def row_values(place: Place, dtype: torch.dtype) -> float:
    """Largest error of a row's ce and l1."""
    x, t, y = _rows(dtype)
    ce, l1 = dspark_ext.ce_and_l1(*_on(place, x, t, y), impl=place.impl)
    return _largest([_error(ce, _ce(x, y)), _error(l1, _l1(x, t))])


def row_grad(place: Place, dtype: torch.dtype) -> float:
    """Relative error of the gradient under upstream gradients that differ from row to row."""
    x, t, y = _rows(dtype)
    a, b = _upstream(len(x), SCALES[dtype])
    leaf = _leaf(x, place.device)
    ce, l1 = dspark_ext.ce_and_l1(leaf, *_on(place, t, y), impl=place.impl)
    torch.autograd.backward((ce, l1), (a.to(ce), b.to(l1)))
    wide = _leaf(x.double())
    (a @ _ce(wide, y) + b @ _l1(wide, t)).backward()
    return _relative(_grad(leaf), _grad(wide))


def distance_values(place: Place) -> float:
    x, t, _ = _rows(f32)
    return _error(dspark_ext.l1_distance(*_on(place, x, t), impl=place.impl), _l1(x, t))


def distance_grad(place: Place) -> float:
    x, t, _ = _rows(f32)
    _, b = _upstream(len(x))
    leaf = _leaf(x, place.device)
    l1 = dspark_ext.l1_distance(leaf, t.to(place.device), impl=place.impl)
    l1.backward(b.to(l1))
    wide = _leaf(x.double())
    (b @ _l1(wide, t)).backward()
    return _relative(_grad(leaf), _grad(wide))


def log_prob_values(place: Place) -> float:
    x, _, y = _rows(f32)
    return _error(-dspark_ext.token_log_prob(*_on(place, x, y), impl=place.impl), _ce(x, y))


def log_prob_grad(place: Place) -> float:
    x, _, y = _rows(f32)
    a, _ = _upstream(len(x))
    leaf = _leaf(x, place.device)
    log_prob = dspark_ext.token_log_prob(leaf, y.to(place.device), impl=place.impl)
    log_prob.backward(a.to(log_prob))
    wide = _leaf(x.double())
    (-(a @ _ce(wide, y))).backward()
    return _relative(_grad(leaf), _grad(wide))


def confident_values(place: Place) -> float:
    """Relative error of the small cross-entropies of rows whose label stands 20 above the rest."""
    x, t, y = _confident_rows()
    ce, _ = dspark_ext.ce_and_l1(*_on(place, x, t, y), impl=place.impl)
    expected = _ce(x, y)
    return float(((ce.cpu().double() - expected) / expected).abs().max())


def confident_grad(place: Place) -> float:
    """Largest relative error of a row's gradient, of which ``p_y - 1`` is the largest part."""
    x, t, y = _confident_rows()
    gradient = _row_results(place, x, t, y)[2]
    wide = _leaf(x.double())
    (_ce(wide, y) + _l1(wide, t)).sum().backward()
    return _largest([_relative(mine, right) for mine, right in zip(gradient, _grad(wide))])


def linear(place: Place, dtype: torch.dtype) -> float:
    """Largest relative error of the loss from hidden states and of its gradients."""
    hidden_size, rank, columns, (B, A, K) = 32, 4, 1031, BLOCKS
    random = _random(5)
    shapes = {
        "draft_hidden": (B, A, K, hidden_size),
        "lm_head_weight": (columns, hidden_size),
        "markov_features": (B, A, K, rank),
        "markov_weight": (columns, rank),
        "target_hidden": (B, A, K, hidden_size),
    }
    values = {
        name: torch.randn(shape, generator=random, dtype=f64).mul(0.4).to(dtype)
        for name, shape in shapes.items()
    }
    trained = [name for name in shapes if name != "target_hidden"]
    positions = _positions(columns, random)

    mine = {name: _leaf(value, place.device) for name, value in values.items()}
    mine["target_hidden"] = mine["target_hidden"].detach()
    on_device = {name: value.to(place.device) for name, value in positions.items()}
    on_device["confidence_pred"] = on_device["confidence_pred"].to(dtype)
    loss, _ = dspark_ext.compute_dspark_linear_loss(
        outputs=types.SimpleNamespace(**mine, **on_device),
        return_terms=True,
        chunk_rows=7,
        impl=_impl(place, dtype),
        **SETTINGS,
    )
    loss.backward()

    wide = {name: _leaf(value.double()) for name, value in values.items()}
    made = dspark_ext.DSparkForwardOutput(
        draft_logits=wide["draft_hidden"] @ wide["lm_head_weight"].T
        + wide["markov_features"] @ wide["markov_weight"].T,
        aligned_target_logits=(wide["target_hidden"] @ wide["lm_head_weight"].T).detach(),
        **{**positions, "confidence_pred": positions["confidence_pred"].to(dtype)},
    )
    expected, _ = _objective(made)
    expected.backward()
    errors = [_error(loss, expected)]
    errors += [_relative(_grad(mine[name]), _grad(wide[name])) for name in trained]
    return _largest(errors)


def torch_path(place: Place) -> float:
    """Largest error of ``impl="torch"``, loss and gradient."""
    loss, _, gradients = _step(place, _case(SMALL, f32, f32), SCALES[f32], impl="torch")
    expected_loss, _, expected = _expected(SMALL, f32, f32)
    errors = [_relative(gradients[name], value) for name, value in expected.items()]
    return _largest([_error(loss, expected_loss), *errors])


def in_place(place: Place) -> int:
    """Elements that differ from the fresh gradient's, and whether other memory was used."""
    made = _case(SMALL, f32, f32)
    fresh = _step(place, made, 1.0)[2]["draft_logits"]
    leaf = _leaf(made.draft_logits, place.device)
    logits = leaf * 1  # a leaf itself may not be written over
    address = logits.data_ptr()
    written: list[Tensor] = []
    logits.register_hook(written.append)
    outputs = _moved(place, made, draft_logits=logits)
    loss, _ = dspark_ext.compute_dspark_loss(
        outputs=outputs, return_terms=True, inplace_grad=True, impl=place.impl, **SETTINGS
    )
    loss.backward()
    elsewhere = place.impl == "kernel" and written[0].data_ptr() != address
    return _differing(_grad(leaf), fresh) + int(elsewhere)


def inactive_rows(place: Place) -> int:
    """Elements that change when every inactive row becomes NaN with an impossible id."""
    made = _case(SMALL, f32, f32)
    inactive = made.eval_mask == 0
    spoilt = types.SimpleNamespace(**vars(made))
    for name in ("draft_logits", "aligned_target_logits", "confidence_pred"):
        value = getattr(made, name)
        where = inactive[..., None] if value.dim() == 4 else inactive
        setattr(spoilt, name, value.masked_fill(where, math.nan))
    spoilt.target_ids = made.target_ids.masked_fill(inactive, 1 << 40)
    (loss, terms, gradients), (loss_, terms_, gradients_) = (
        _step(place, outputs, 1.0) for outputs in (made, spoilt)
    )
    pairs = [(loss, loss_), *((terms[name], terms_[name]) for name in terms)]
    pairs += [(gradients[name], gradients_[name]) for name in gradients]
    not_zero = sum(int(gradients_[name][inactive].count_nonzero()) for name in gradients_)
    return sum(_differing(a, b) for a, b in pairs) + not_zero


def no_active_row(place: Place) -> int:
    """Elements of loss and gradient that are not 0."""
    made = _case(SMALL, f32, f32)
    made = dataclasses.replace(made, eval_mask=torch.zeros_like(made.eval_mask))
    loss, _, gradients = _step(place, made, 1.0)
    return sum(int(value.count_nonzero()) for value in (loss, *gradients.values()))


def ignored_ids(place: Place) -> float:
    """Largest error of loss and gradient where every other active row's id is -100."""
    made = _case(SMALL, f32, f32)
    ids = made.target_ids.clone()
    ids.view(-1)[::2] = -100
    made = dataclasses.replace(made, target_ids=ids)
    loss, terms, gradients = _step(place, made, 1.0)
    expected_loss, expected_terms, expected = _differentiated(made, 1.0)
    errors = [_error(loss, expected_loss), _error(terms["ce_loss"], expected_terms["ce_loss"])]
    return _largest(errors + [_relative(gradients[name], expected[name]) for name in expected])


def identical_rows(place: Place) -> int:
    """Elements that are not 0 in the distance of a row to itself, and in its gradient."""
    x, _, _ = _rows(bf16)
    leaf = _leaf(x, place.device)
    l1 = dspark_ext.l1_distance(leaf, leaf.detach().clone(), impl=place.impl)
    l1.sum().backward()
    return int(l1.count_nonzero()) + int(_grad(leaf).count_nonzero())


def tied_maxima(place: Place) -> float:
    """Largest error where several columns share a row's maximum, the label among them or not."""
    x, t, y = _rows(f32)
    x, t = x.round(), x.round() + (t - x)
    tied = x == x.max(-1, keepdim=True).values
    y[::2] = tied.double().argmax(-1)[::2]
    return _row_errors(place, x, t, y)


def minus_infinity(place: Place) -> float:
    """Largest error where most columns, the leading ones among them, are -inf on both sides."""
    x, t, y = _rows(f32)
    banned = torch.arange(x.shape[1]) < x.shape[1] - 100
    y = y % 100 + (x.shape[1] - 100)
    x, t = (side.masked_fill(banned, -math.inf) for side in (x, t))
    return _row_errors(place, x, t, y)


def row_alone(place: Place) -> int:
    """Elements of a row's results that depend on the rows around it."""
    x, t, y = _rows(bf16)
    together = _row_results(place, x, t, y)
    differing = 0
    for i in range(len(x)):
        alone = _row_results(place, x[i : i + 1], t[i : i + 1], y[i : i + 1])
        differing += sum(_differing(a[0], b[i]) for a, b in zip(alone, together))
    return differing


def repeated_calls(place: Place) -> int:
    """Elements that differ between three calls with the same inputs."""
    runs = [_bits(place) for _ in range(3)]
    return sum(_differing(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def any_number_of_threads(place: Place) -> int:
    """Elements that differ between one thread and two, three and five: in many rows, which are
    dealt to the threads, and in fewer rows than threads, whose columns are."""
    few = _rows(f32, 2, 49152)
    runs = []
    for threads in (1, 2, 3, 5):
        with _threads(threads):
            runs.append([*_bits(place), *_row_results(place, *few)])
    return sum(_differing(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def refused_ids(place: Place) -> int:
    """How many of the ids -1, -99 and V are accepted on an active row."""
    x, _, y = _rows(f32)
    accepted = 0
    for bad in (-1, -99, x.shape[1]):
        ids = y.clone()
        ids[1] = bad
        try:
            dspark_ext.token_log_prob(x, ids, impl=place.impl)
        except IndexError:
            continue
        accepted += 1
    return accepted


# --- The mathematics, in float64 ----------------------------------------------------------------


def _ce(x: Tensor, y: Tensor) -> Tensor:
    """``-log softmax(x)_y`` of every row ``[N, V]``; 0 where the id is -100."""
    return F.cross_entropy(x.double(), y, reduction="none", ignore_index=-100)


def _l1(x: Tensor, t: Tensor) -> Tensor:
    """``sum |softmax(x) - softmax(t)|`` of every row; the derivative of |0| is 0 to autograd."""
    return (x.double().softmax(-1) - t.double().softmax(-1)).abs().sum(-1)


def _objective(outputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, differentiable, and the terms, from their definitions; float64."""
    mask, K = outputs.eval_mask.double(), outputs.eval_mask.shape[-1]
    w = mask * torch.exp(-torch.arange(K, dtype=f64) / GAMMA)
    den = w.sum()
    x, t = outputs.draft_logits.flatten(0, -2), outputs.aligned_target_logits.flatten(0, -2)
    ce = _ce(x, outputs.target_ids.flatten()).view(mask.shape)
    l1 = _l1(x, t).view(mask.shape)
    accept = (1 - l1.detach() / 2).clamp(0, 1)
    z = outputs.confidence_pred.double()
    bce = F.binary_cross_entropy_with_logits(z, accept, reduction="none")
    losses = {
        "ce_loss": (w * ce).sum() / (den + 1e-6),
        "l1_loss": (w * l1).sum() / (den + 1e-6),
        "confidence_loss": (w * bce).sum() / (den + 1e-6),
    }
    loss = (
        CE_ALPHA * losses["ce_loss"]
        + L1_ALPHA * losses["l1_loss"]
        + CONFIDENCE_ALPHA * losses["confidence_loss"]
    )
    accepted, claimed = accept * mask, torch.sigmoid(z.detach()) * mask
    error = torch.sigmoid(z.detach()) - accept
    reach = claimed.cumprod(-1) - accepted.cumprod(-1)
    valid = ((outputs.block_keep_mask != 0) & mask.any(-1)).double()
    terms = {
        "loss": loss,
        **losses,
        **dict.fromkeys(("ce_loss_den", "l1_loss_den", "confidence_loss_den"), den),
        "accept_rate_per_pos_num": accepted.sum((0, 1)),
        "accept_rate_per_pos_den": mask.sum((0, 1)),
        "tau_num": (valid * (1 + accepted.cumprod(-1).sum(-1))).sum(),
        "tau_den": valid.sum(),
        "confidence_abs_error_num": (w * error.abs()).sum(),
        "confidence_bias_num": (w * error).sum(),
        "confidence_cumprod_bias_num": (w * reach).sum(),
        "confidence_diag_den": den,
    }
    return loss, {name: value.detach() for name, value in terms.items()}


def _differentiated(
    outputs: Any, scale: float
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, the terms, and ``scale`` times the gradients, by autograd in float64."""
    draft = _leaf(outputs.draft_logits.double())
    confidence = _leaf(outputs.confidence_pred.double())
    made = dataclasses.replace(outputs, draft_logits=draft, confidence_pred=confidence)
    loss, terms = _objective(made)
    (scale * loss).backward()
    return (
        loss.detach(),
        terms,
        {"draft_logits": _grad(draft), "confidence_pred": _grad(confidence)},
    )


@functools.lru_cache(maxsize=len(VOCABULARIES))
def _expected(
    columns: int, draft: torch.dtype, target: torch.dtype
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    return _differentiated(_case(columns, draft, target), SCALES[draft])


# --- Inputs -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=len(VOCABULARIES))
def _case(columns: int, draft: torch.dtype, target: torch.dtype) -> dspark_ext.DSparkForwardOutput:
    """A drafter's outputs on the CPU; about a quarter of the positions are inactive.

    Draft and target logits stand 1 apart in every column, up or down: after normalisation no
    ``p - q`` is so small that rounding decides its sign, which would be no error.
    """
    random = _random(columns)
    x, t = _pair((*BLOCKS, columns), random)
    positions = _positions(columns, random)
    if draft == f64:
        positions["confidence_pred"] = positions["confidence_pred"].double()
    return dspark_ext.DSparkForwardOutput(
        draft_logits=x.to(draft), aligned_target_logits=t.to(target), **positions
    )


def _positions(columns: int, random: torch.Generator) -> dict[str, Tensor]:
    """Ids, masks and confidence logits of ``BLOCKS``, supervised or not."""
    eval_mask = torch.rand(BLOCKS, generator=random) < 0.75
    eval_mask[0, 0, 0], eval_mask[0, 0, 1] = True, False  # both kinds, whatever is drawn
    return dict(
        target_ids=torch.randint(columns, BLOCKS, generator=random),
        eval_mask=eval_mask,
        block_keep_mask=torch.tensor([[True, True], [True, False]]),
        confidence_pred=torch.randn(BLOCKS, generator=random),
    )


def _rows(
    dtype: torch.dtype, rows: int = 10, columns: int = SMALL
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of draft and target logits, and their labels; see ``_case``."""
    random = _random(1)
    x, t = _pair((rows, columns), random)
    return x.to(dtype), t.to(dtype), torch.randint(columns, (rows,), generator=random)


def _pair(shape: tuple[int, ...], random: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(shape, generator=random, dtype=f64) * 1.5
    up = torch.rand(shape, generator=random) < 0.5
    return x, x + torch.where(up, 1.0, -1.0)


def _confident_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Rows that give their label all but a hundred-thousandth, against a target that does not."""
    random = _random(2)
    x, t = (torch.randn((10, SMALL), generator=random) for _ in range(2))
    y = torch.randint(SMALL, (10,), generator=random)
    label = F.one_hot(y, SMALL)
    return x + 20 * label, t + 5 * label, y


def _upstream(rows: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    ramp = torch.linspace(0.5, 2, rows, dtype=f64) * scale
    return ramp, ramp.flip(0)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- One call of the package --------------------------------------------------------------------


def _step(
    place: Place, made: Any, scale: float, impl: Optional[str] = None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The package's loss and terms at a place, and ``scale`` times its gradients."""
    dtypes = made.draft_logits.dtype, made.aligned_target_logits.dtype
    draft = _leaf(made.draft_logits, place.device)
    confidence = _leaf(made.confidence_pred, place.device)
    outputs = _moved(place, made, draft_logits=draft, confidence_pred=confidence)
    loss, terms = dspark_ext.compute_dspark_loss(
        outputs=outputs, return_terms=True, impl=impl or _impl(place, *dtypes), **SETTINGS
    )
    (scale * loss).backward()
    gradients = {"draft_logits": _grad(draft), "confidence_pred": _grad(confidence)}
    return loss.detach(), terms, gradients


def _moved(place: Place, made: Any, **instead: Tensor) -> Any:
    moved = {name: value.to(place.device) for name, value in vars(made).items()}
    return types.SimpleNamespace(**{**moved, **instead})


def _impl(place: Place, *dtypes: torch.dtype) -> str:
    """The kernel where the place has one for these dtypes; GPUs have none for float64."""
    kernel = place.impl == "kernel" and _backend.has_kernels(place.device, *dtypes)
    return "kernel" if kernel else "torch"


def _row_results(place: Place, x: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    leaf = _leaf(x, place.device)
    ce, l1 = dspark_ext.ce_and_l1(leaf, *_on(place, t, y), impl=place.impl)
    (ce + l1).sum().backward()
    return ce.detach(), l1.detach(), _grad(leaf)


def _bits(place: Place) -> list[Tensor]:
    """Everything that a step of the objective gives, for a comparison bit by bit."""
    loss, terms, gradients = _step(place, _case(SMALL, f32, f32), 1.0)
    return [loss, *terms.values(), *gradients.values()]


def _leaf(value: Tensor, device: Optional[torch.device] = None) -> Tensor:
    """A copy that gathers a gradient of its own."""
    return value.detach().to(device, copy=True).requires_grad_()


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "no gradient arrived"
    return leaf.grad


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- Figures ------------------------------------------------------------------------------------


def _error(actual: Tensor, expected: Tensor) -> float:
    """Largest error, relative where the expected value is larger than 1, else absolute."""
    actual, expected = actual.detach().cpu().double(), expected.detach()
    return float(((actual - expected).abs() / expected.abs().clamp(min=1)).max())


def _relative(actual: Tensor, expected: Tensor) -> float:
    """L2 error over the expected norm."""
    return float((actual.cpu().double() - expected).norm() / expected.norm())


def _differing(a: Tensor, b: Tensor) -> int:
    """Elements with different values; NaN differs from everything."""
    return int((a.cpu() != b.cpu()).sum())


def _largest(errors: list[float]) -> float:
    """The maximum, NaN if there is one: ``max`` would depend on where it stands."""
    return float(torch.tensor(errors, dtype=f64).max())


def _row_errors(place: Place, x: Tensor, t: Tensor, y: Tensor) -> float:
    """Largest error of the rows' ce and l1, and of the gradient of their sum."""
    ce, l1, gradient = _row_results(place, x, t, y)
    wide = _leaf(x.double())
    expected_ce, expected_l1 = _ce(wide, y), _l1(wide, t)
    (expected_ce + expected_l1).sum().backward()
    errors = [_error(ce, expected_ce), _error(l1, expected_l1)]
    return _largest([*errors, _relative(gradient, _grad(wide))])


def _on(place: Place, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(value.to(place.device) for value in values)


def _bind(measure: Callable[..., float], **arguments: Any) -> Callable[[Place], float]:
    return functools.partial(measure, **arguments)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def _pair_name(draft: torch.dtype, target: torch.dtype) -> str:
    return _name(draft) if draft == target else f"{_name(draft)}/{_name(target)}"
