"""Runs the contenders in turn, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import statistics
import sys
import time
from typing import Callable, Optional

import torch
from torch import Tensor

from dspark_ext import DSparkForwardOutput
from dspark_ext.bench.contenders import CONTENDERS, Contender, LossFunction, Unavailable
from dspark_ext.bench.problem import Inputs, Problem

# Largest relative difference from ours at which two results count as the same.
TOLERANCES = {"float32": 1e-3, "float64": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}

_COPY_BYTES = 256 << 20  # far beyond any cache
_COMPARE_ROWS = 64
_REASON_LENGTH = 240


@dataclasses.dataclass
class Result:
    """What is known of one contender.

    Attributes:
        status: ``ok``, ``skipped`` (cannot run here) or ``failed``; ``reason`` says why.
        peak_mib: peak growth of memory over the inputs, None when unknown.
        loss_error, gradient_error: relative (L2) difference from ours.
    """

    name: str
    title: str
    status: str = "ok"
    reason: Optional[str] = None
    times_ms: list[float] = dataclasses.field(default_factory=list)
    peak_mib: Optional[float] = None
    loss_error: Optional[float] = None
    gradient_error: Optional[float] = None

    @property
    def median_ms(self) -> Optional[float]:
        return statistics.median(self.times_ms) if self.times_ms else None

    @property
    def min_ms(self) -> Optional[float]:
        return min(self.times_ms) if self.times_ms else None

    def agrees(self, problem: Problem) -> Optional[bool]:
        """Whether loss and gradient are ours, to the dtype's tolerance; None if not compared."""
        errors = [e for e in (self.loss_error, self.gradient_error) if e is not None]
        if not errors:
            return None
        return all(error <= TOLERANCES[problem.dtype] for error in errors)

    def fail(self, error: BaseException) -> None:
        """Takes the contender out of the race, with the reason."""
        self.status = "skipped" if isinstance(error, Unavailable) else "failed"
        text = " ".join(str(error).split()) or type(error).__name__
        self.reason = text if len(text) <= _REASON_LENGTH else text[:_REASON_LENGTH] + " ..."


@dataclasses.dataclass
class Timings:
    """What the race found: the copy's times, and ours of the first two calls."""

    copy_bytes: int
    copy_ms: list[float] = dataclasses.field(default_factory=list)
    first_call_ms: Optional[float] = None
    second_call_ms: Optional[float] = None

    @property
    def bandwidth(self) -> float:
        """Bytes read and bytes written per second by a copy, at the median."""
        return 2 * self.copy_bytes / (statistics.median(self.copy_ms) / 1e3)


class Runner:
    """One contender on the inputs: forward and backward, or the forward alone."""

    def __init__(self, contender: Contender, inputs: Inputs) -> None:
        self._loss: LossFunction = contender.build()
        self._inplace = contender.inplace
        self._inputs = inputs
        if contender.inplace:
            inputs.keep_copy()

    def __call__(self) -> tuple[Tensor, float]:
        """The loss of one step and its milliseconds; the gradient is left in the inputs."""
        inputs = self._inputs
        inputs.forget()
        with torch.set_grad_enabled(not inputs.problem.evaluation):
            outputs = inputs.outputs()
            loss, elapsed = timed(lambda: self._step(outputs), inputs.draft.device)
        return loss, elapsed

    def turn(self, warm_up: int) -> float:
        """Milliseconds of one step after ``warm_up`` untimed ones."""
        for _ in range(warm_up):
            self()
            self.clean()
        return self()[1]

    def clean(self) -> None:
        """Undoes the step's effect on the inputs."""
        self._inputs.forget()
        if self._inplace:
            self._inputs.restore()

    def _step(self, outputs: DSparkForwardOutput) -> Tensor:
        loss = self._loss(outputs)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return loss.detach()


def timed(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """The call's result and its milliseconds, by events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        result = call()
        return result, (time.perf_counter() - start) * 1e3
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return result, float(begin.elapsed_time(end))


def race(problem: Problem, results: dict[str, Result], rounds: int, warm_up: int) -> Timings:
    """Checks every contender against ours, then times them in turn; fills the results.

    A turn is ``warm_up`` steps untimed and one timed: in a virtual machine, memory that was free
    while the others ran may have gone back to the host, and its first use waits for the host.
    """
    progress("making the inputs")
    inputs = Inputs(problem)
    # Written to, both of them: untouched zeros would be one page, read from the cache.
    copy_from = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=problem.device)
    copy_to = copy_from.clone()
    timings = Timings(_COPY_BYTES)
    if problem.device == "cpu":
        _touch_memory(inputs.draft.nbytes)
    runners = _verified_runners(inputs, results, timings)
    for index in range(rounds):
        progress(f"round {index + 1} of {rounds}")
        timings.copy_ms.append(timed(lambda: copy_to.copy_(copy_from), copy_to.device)[1])
        names = list(runners)
        shift = index % len(names)  # so that nobody always follows the copy
        for name in names[shift:] + names[:shift]:
            try:
                results[name].times_ms.append(runners[name].turn(warm_up))
            except Exception as error:
                if name == "ours":
                    raise
                results[name].fail(error)
            runners[name].clean()
            if results[name].status != "ok":
                del runners[name]
    progress("")
    return timings


def _touch_memory(size: int) -> None:
    """Writes to fresh memory of the gradient's size and frees it, so that the process's first
    step does not wait for the host of a virtual machine."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    memory.close()


def _verified_runners(
    inputs: Inputs, results: dict[str, Result], timings: Timings
) -> dict[str, Runner]:
    """Runners of the contenders that work, each run once untimed (ours twice, first of all)."""
    progress("checking ours")
    runners = {"ours": Runner(CONTENDERS["ours"], inputs)}
    _, timings.first_call_ms = runners["ours"]()
    loss, timings.second_call_ms = runners["ours"]()
    gradient = inputs.gradient
    for name, result in results.items():
        if name == "ours" or result.status != "ok":
            continue
        progress(f"checking {name}")
        try:
            runners[name] = Runner(CONTENDERS[name], inputs)
            other, _ = runners[name]()
            result.loss_error = relative_l2(other.reshape(1, 1), loss.reshape(1, 1))
            if gradient is not None:
                result.gradient_error = _gradient_error(inputs.gradient, gradient)
        except Exception as error:
            result.fail(error)
        if name in runners:
            runners[name].clean()
        if result.status != "ok":
            runners.pop(name, None)
    inputs.forget()
    return runners


def _gradient_error(gradient: Optional[Tensor], reference: Tensor) -> float:
    if gradient is None:
        return math.inf
    columns = reference.shape[-1]
    return relative_l2(gradient.reshape(-1, columns), reference.reshape(-1, columns))


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """``|value - reference| / |reference|`` of two matrices, a few rows at a time in float64."""
    difference = norm = 0.0
    chunks = [torch.split(matrix, _COMPARE_ROWS) for matrix in (value, reference)]
    for v, r in zip(*chunks):
        difference += float((v.double() - r.double()).square().sum())
        norm += float(r.double().square().sum())
    if difference == 0:
        return 0.0
    return math.sqrt(difference / norm) if norm > 0 else math.inf


def progress(message: str) -> None:
    """One line on stderr that the next one replaces; lines below each other in a log."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
    elif message:
        print(message, file=sys.stderr, flush=True)
