"""The benchmark's result as text of 80 columns and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import textwrap
from collections.abc import Callable
from typing import Any, Optional

import torch

import dspark_ext
from dspark_ext import _C, info
from dspark_ext.bench.problem import Problem
from dspark_ext.bench.timing import TOLERANCES, Result, Timings

_ALLOCATOR_VARIABLES = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)
# glibc keeps what is freed instead of giving it back and faulting it in again.
KEEP_HEAP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
}


@dataclasses.dataclass
class Report:
    """Everything that was found."""

    problem: Problem
    machine: dict[str, Any]
    rounds: int
    warm_up: int
    timings: Timings
    results: list[Result]
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ours(self) -> Result:
        return next(result for result in self.results if result.name == "ours")

    @property
    def floor_ms(self) -> float:
        problem = self.problem
        floor = problem.floor_flop if problem.linear else problem.floor_bytes
        return floor / self.timings.rate * 1e3

    @property
    def first_call_ratio(self) -> Optional[float]:
        return _ratio(self.timings.first_call_ms, self.timings.second_call_ms)

    def wrong(self) -> list[Result]:
        """The contenders whose results are not ours."""
        return [result for result in self.results if result.agrees(self.problem) is False]


def describe_machine(device: str, malloc: str) -> dict[str, Any]:
    """The machine and the settings that times depend on."""
    return {
        "date": datetime.date.today().isoformat(),
        "dspark_ext": dspark_ext.__version__,
        "torch": torch.__version__,
        "cpu": info.cpu_model(),
        "cores": info.cpu_cores(),
        "threads": torch.get_num_threads(),
        "cpu_level": _C.cpu_level(),
        "huge_pages": info.huge_pages(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "malloc": malloc,
        "allocator": {
            name: os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)
        },
    }


def as_json(report: Report) -> dict[str, Any]:
    """The report as values that JSON can hold."""
    timings = report.timings
    return {
        "machine": report.machine,
        "problem": {
            **dataclasses.asdict(report.problem),
            "block_size": report.problem.block_size,
            "inactive_rows": report.problem.inactive_rows,
        },
        "rounds": report.rounds,
        "warm_up": report.warm_up,
        **_floor_json(report),
        "floor_ms": report.floor_ms,
        "first_call_ms": timings.first_call_ms,
        "second_call_ms": timings.second_call_ms,
        "first_call_ratio": report.first_call_ratio,
        "tolerance": TOLERANCES[report.problem.dtype],
        "contenders": [_result_json(report, result) for result in report.results],
        "notes": report.notes,
    }


def _floor_json(report: Report) -> dict[str, Any]:
    problem, rate = report.problem, report.timings.rate / 1e9
    if problem.linear:
        return {"product_gflop_per_s": rate, "floor_flop": problem.floor_flop}
    return {"copy_gb_per_s": rate, "floor_bytes": problem.floor_bytes}


def _result_json(report: Report, result: Result) -> dict[str, Any]:
    return {
        **{name: _finite(value) for name, value in dataclasses.asdict(result).items()},
        "median_ms": result.median_ms,
        "min_ms": result.min_ms,
        "ratio_to_ours": _ratio(result.median_ms, report.ours.median_ms),
        "floor_fraction": _ratio(report.floor_ms, result.median_ms),
        "agrees": result.agrees(report.problem),
    }


def render(report: Report, tabulate: Callable[..., str]) -> str:
    """The report as text."""
    parts = [_heading(report), _table(report, tabulate), _first_call(report)]
    parts += [_unmeasured(report), _disagreements(report)]
    parts += [_wrap(note) for note in report.notes]
    return "\n\n".join(part for part in parts if part)


def _heading(report: Report) -> str:
    rows = [*_machine_rows(report.machine), *_problem_rows(report)]
    return "\n".join(_wrap(value, f"{label:<10} ") for label, value in rows if value)


def _machine_rows(machine: dict[str, Any]) -> list[tuple[str, Optional[str]]]:
    huge_pages = machine["huge_pages"] or "unknown"
    return [
        ("date", machine["date"]),
        ("machine", f"{machine['cpu']}, {machine['cores']} cores; huge pages: {huge_pages}"),
        (
            "software",
            f"dspark_ext {machine['dspark_ext']} ({machine['cpu_level']}), "
            f"torch {machine['torch']}, {machine['threads']} threads",
        ),
        ("GPU", machine["gpu"]),
        ("allocator", _allocator(machine)),
    ]


def _problem_rows(report: Report) -> list[tuple[str, Optional[str]]]:
    problem = report.problem
    what = "evaluation, no_grad" if problem.evaluation else "forward + backward"
    if problem.linear:
        what += " from hidden states"
    return [
        ("inputs", _inputs_text(problem)),
        (
            "step",
            f"{what}; contenders in turn, {report.rounds} rounds of {report.warm_up} untimed and "
            "1 timed",
        ),
        *(_product_rows(report) if problem.linear else _copy_rows(report)),
    ]


def _inputs_text(problem: Problem) -> str:
    batch, anchors, block = problem.leading
    shape = f"(B={batch} A={anchors} K={block})"
    masked = f", {problem.inactive_rows} rows inactive" if problem.inactive_rows else ""
    if problem.linear:
        head = "trained" if problem.train_head else "frozen"
        return (
            f"{problem.rows} rows {shape}, hidden size {problem.hidden}, a {head} head of "
            f"{problem.vocab} columns for draft and teacher, {problem.dtype}{masked}"
        )
    return (
        f"{problem.rows} rows x {problem.vocab} columns {shape}, draft {problem.dtype}, "
        f"target {problem.target_dtype}{masked}"
    )


def _copy_rows(report: Report) -> list[tuple[str, Optional[str]]]:
    problem = report.problem
    passes = "both logits read once"
    if not problem.evaluation:
        again = " and again in backward" if problem.dtype == "float16" else ""
        passes += f"{again}, the gradient written once"
    return [
        (
            "copy",
            f"{report.timings.rate / 1e9:.1f} GB/s read + written, measured in the same rounds",
        ),
        (
            "floor",
            f"{report.floor_ms:.2f} ms: {problem.floor_bytes / 2**20:.1f} MiB at that speed "
            f"({passes})",
        ),
    ]


def _product_rows(report: Report) -> list[tuple[str, Optional[str]]]:
    problem = report.problem
    return [
        (
            "product",
            f"{report.timings.rate / 1e9:.1f} GFLOP/s for all draft logits in one product, "
            "measured in the same rounds",
        ),
        (
            "floor",
            f"{report.floor_ms:.2f} ms: {problem.products} products of the active rows with the "
            "head at that speed",
        ),
    ]


def _allocator(machine: dict[str, Any]) -> str:
    settings = " ".join(f"{name}={value}" for name, value in machine["allocator"].items())
    if machine["malloc"] == "keep":
        return f"glibc keeps its heap: {settings}"
    return f"as the environment sets it: {settings}" if settings else "default settings"


def _table(report: Report, tabulate: Callable[..., str]) -> str:
    headers = [
        "",
        "median\nms",
        "min\nms",
        "times\nours",
        "floor\n/ time",
        "peak\n+MiB",
        "loss\nerror",
        "gradient\nerror",
    ]
    rows = [
        [
            result.name,
            _number(result.median_ms),
            _number(result.min_ms),
            _number(_ratio(result.median_ms, report.ours.median_ms), ".2f"),
            _number(_ratio(report.floor_ms, result.median_ms), ".1%"),
            _number(result.peak_mib, ".1f"),
            _number(result.loss_error, ".0e"),
            _number(result.gradient_error, ".0e"),
        ]
        for result in report.results
    ]
    legend = "\n".join(_wrap(result.title, f"{result.name:<8} ") for result in report.results)
    table = tabulate(
        rows,
        headers=headers,
        tablefmt="simple",
        disable_numparse=True,
        colalign=("left", *["right"] * (len(headers) - 1)),
    )
    return f"{table}\n\n{legend}"


def _first_call(report: Report) -> str:
    timings = report.timings
    return _wrap(
        f"Ours, first call of the process {_number(timings.first_call_ms)} ms, second "
        f"{_number(timings.second_call_ms)} ms: {_number(report.first_call_ratio, '.2f')} times."
    )


def _unmeasured(report: Report) -> str:
    lines = [
        _wrap(f"{result.status}: {result.reason}", f"{result.name:<8} ")
        for result in report.results
        if result.status != "ok"
    ]
    return "\n".join(lines)


def _disagreements(report: Report) -> str:
    tolerance = TOLERANCES[report.problem.dtype]
    names = [result.name for result in report.wrong()]
    if names:
        return _wrap(
            f"WRONG RESULTS: {', '.join(names)} differ from ours by more than {tolerance:g}; "
            "their times compare nothing."
        )
    if any(result.agrees(report.problem) for result in report.results):
        return _wrap(f"Every contender that ran agrees with ours to {tolerance:g}.")
    return ""


def _ratio(value: Optional[float], base: Optional[float]) -> Optional[float]:
    return None if value is None or not base else value / base


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Optional[float], form: str = "") -> str:
    if value is None:
        return "-"
    if form:
        return format(value, form)
    return format(value, ".0f" if value >= 1000 else ".1f" if value >= 100 else ".2f")


def _wrap(text: str, label: str = "") -> str:
    return textwrap.fill(
        text,
        info.WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_on_hyphens=False,
    )
