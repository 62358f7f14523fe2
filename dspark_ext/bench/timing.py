"""Runs the contenders in turn, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import statistics
import sys
import time
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from dspark_ext.bench.contenders import Contender, LossFunction, Unavailable, contenders_of
from dspark_ext.bench.problem import Inputs, Problem

# Largest relative difference from ours at which two results count as the same.
TOLERANCES = {"float32": 1e-3, "float64": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}

_COPY_BYTES = 256 << 20  # far beyond any cache
_COMPARE_ROWS = 64
_REASON_LENGTH = 240
_QUEUED_STEPS = 8


@dataclasses.dataclass
class Result:
    """What is known of one contender.

    Attributes:
        status: ``ok``, ``skipped`` (cannot run here) or ``failed``; ``reason`` says why.
        peak_mib: peak growth of memory over the inputs, None when unknown.
        loss_error, gradient_error: relative (L2) difference from ours; of several gradients,
            that of the one which differs most.
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
    """What the race found: the yardstick's times, and ours of the first two calls.

    Attributes:
        work: of one use of the yardstick: bytes read and bytes written, or operations.
    """

    work: int
    yardstick_ms: list[float] = dataclasses.field(default_factory=list)
    first_call_ms: Optional[float] = None
    second_call_ms: Optional[float] = None

    @property
    def rate(self) -> float:
        """Work per second, at the median: the machine's speed at what bounds a step."""
        return self.work / (statistics.median(self.yardstick_ms) / 1e3)


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
        return self()[1] if self._inputs.draft.device.type != "cuda" else self._queued()

    def _queued(self) -> float:
        """Milliseconds of the median of several steps that a GPU finds queued one behind the other,
        as in a training loop: what the host does for one happens while the one before runs."""
        events = []
        with torch.set_grad_enabled(not self._inputs.problem.evaluation):
            for _ in range(_QUEUED_STEPS):
                self.clean()
                outputs = self._inputs.outputs()
                begin, end = _event(), _event()
                begin.record()
                self._step(outputs)
                end.record()
                events.append((begin, end))
        torch.cuda.synchronize(self._inputs.draft.device)
        return statistics.median(begin.elapsed_time(end) for begin, end in events)

    def clean(self) -> None:
        """Undoes the step's effect on the inputs."""
        self._inputs.forget()
        if self._inplace:
            self._inputs.restore()

    def _step(self, outputs: Any) -> Tensor:
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
    begin, end = _event(), _event()
    torch.cuda.synchronize(device)
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return result, float(begin.elapsed_time(end))


def _event() -> torch.cuda.Event:
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return event(enable_timing=True)


def race(problem: Problem, results: dict[str, Result], rounds: int, warm_up: int) -> Timings:
    """Checks every contender against ours, then times them in turn; fills the results.

    A turn is ``warm_up`` steps untimed and one timed: in a virtual machine, memory that was free
    while the others ran may have gone back to the host, and its first use waits for the host.
    """
    progress("making the inputs")
    inputs = Inputs(problem)
    work, yardstick = _product(inputs) if problem.linear else _copy(problem.device)
    timings = Timings(work)
    if problem.device == "cpu":
        _touch_memory(inputs.draft.nbytes)
    runners = _verified_runners(inputs, results, timings)
    for index in range(rounds):
        progress(f"round {index + 1} of {rounds}")
        timings.yardstick_ms.append(timed(yardstick, inputs.draft.device)[1])
        names = list(runners)
        shift = index % len(names)  # so that nobody always follows the yardstick
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


def _copy(device: str) -> tuple[int, Callable[[], Tensor]]:
    """The yardstick of what memory bounds: bytes read and written, and the copy that does it."""
    # Written to, both of them: untouched zeros would be one page, read from the cache.
    copy_from = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=device)
    copy_to = copy_from.clone()
    return 2 * _COPY_BYTES, lambda: copy_to.copy_(copy_from)


def _product(inputs: Inputs) -> tuple[int, Callable[[], Tensor]]:
    """The yardstick of what arithmetic bounds: operations, and the product for all logits."""
    assert inputs.head is not None
    hidden, head = inputs.draft.flatten(0, -2), inputs.head.detach().t()
    out = hidden @ head
    return 2 * hidden.numel() * head.shape[1], lambda: torch.mm(hidden, head, out=out)


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
    contenders = contenders_of(inputs.problem)
    runners = {"ours": Runner(contenders["ours"], inputs)}
    _, timings.first_call_ms = runners["ours"]()
    loss, timings.second_call_ms = runners["ours"]()
    gradients = inputs.gradients()
    for name, result in results.items():
        if name == "ours" or result.status != "ok":
            continue
        progress(f"checking {name}")
        try:
            runners[name] = Runner(contenders[name], inputs)
            other, _ = runners[name]()
            result.loss_error = relative_l2(other.reshape(1, 1), loss.reshape(1, 1))
            if gradients:
                result.gradient_error = _gradient_error(inputs.gradients(), gradients)
        except Exception as error:
            result.fail(error)
        if name in runners:
            runners[name].clean()
        if result.status != "ok":
            runners.pop(name, None)
    inputs.forget()
    return runners


def _gradient_error(gradients: dict[str, Tensor], references: dict[str, Tensor]) -> float:
    """The largest error of any of them; infinite if one is missing."""
    if gradients.keys() != references.keys():
        return math.inf
    return max(
        relative_l2(gradients[name].flatten(0, -2), reference.flatten(0, -2))
        for name, reference in references.items()
    )


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
