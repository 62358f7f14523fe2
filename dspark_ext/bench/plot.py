"""The benchmark over a range of sizes, as a picture: time and memory against V and against N."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Callable, Optional

import matplotlib

matplotlib.use("Agg")  # draws into files and needs no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dspark_ext.bench.problem import DTYPES, Problem
from dspark_ext.bench.report import Report
from dspark_ext.bench.timing import Result

_STEPS = (1 / 16, 1 / 4, 1)  # of the largest size, in both directions
_MIB = 2**20
_GRADIENT = "memory of the gradient"


def sweep(problem: Problem) -> list[Problem]:
    """The problems to measure: smaller vocabularies, then fewer rows, the problem itself last."""
    vocabularies = [max(round(problem.vocab * step), 1) for step in _STEPS[:-1]]
    blocks = [max(round(problem.rows / 7 * step), 1) for step in _STEPS[:-1]]
    return [
        *(dataclasses.replace(problem, vocab=vocab) for vocab in vocabularies),
        *(dataclasses.replace(problem, rows=7 * count) for count in blocks),
        problem,
    ]


def save(reports: list[Report], path: Path) -> None:
    """Draws the reports of :func:`sweep` into a file whose suffix names the format."""
    largest = reports[-1]
    problem = largest.problem
    by_vocab = [r for r in reports if r.problem.rows == problem.rows]
    by_rows = [r for r in reports if r.problem.vocab == problem.vocab]
    style: dict[Any, Any] = {"axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False}
    style.update({"font.size": 9, "axes.titlesize": 10})
    with plt.rc_context(style):
        figure, ((time_v, time_n), (memory_v, memory_n)) = plt.subplots(
            2, 2, figsize=(10, 7.5), sharex="col", sharey="row", layout="constrained"
        )
        for time, memory, series, size in (
            (time_v, memory_v, by_vocab, _columns),
            (time_n, memory_n, by_rows, _rows),
        ):
            _draw(time, series, size, _median_ms, _floor_ms, "--", _floor_name(problem))
            _draw(memory, series, size, _peak_mib, _gradient_mib, ":", _GRADIENT)
        time_v.set_title(f"{problem.rows} rows")
        time_n.set_title(f"{problem.vocab:,} columns")
        time_v.set_ylabel("milliseconds of a step")
        memory_v.set_ylabel("peak memory above the inputs, MiB")
        memory_v.set_xlabel("columns (V)")
        memory_n.set_xlabel("rows (N)")
        handles, labels = time_v.get_legend_handles_labels()
        for handle, label in zip(*memory_v.get_legend_handles_labels()):
            if label == _GRADIENT:
                handles, labels = [*handles, handle], [*labels, label]
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        figure.suptitle(_heading(largest))
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw(
    axes: Axes,
    series: list[Report],
    size: Callable[[Report], int],
    value: Callable[[Result], Optional[float]],
    floor: Callable[[Report], Optional[float]],
    floor_style: str,
    floor_name: str,
) -> None:
    """One line for each contender that has values, and what none can be below."""
    series = sorted(series, key=size)
    sizes = [size(report) for report in series]
    for index, result in enumerate(series[-1].results):
        values = [_or_nan(value(_named(report, result.name))) for report in series]
        if any(map(math.isfinite, values)):
            axes.plot(
                sizes,
                values,
                marker="o",
                markersize=4,
                color=f"C{index}",
                linewidth=2.4 if result.name == "ours" else 1.3,
                zorder=3 if result.name == "ours" else 2,
                label=result.title,
            )
    floors = [_or_nan(floor(report)) for report in series]
    if any(map(math.isfinite, floors)):
        axes.plot(sizes, floors, floor_style, color="black", linewidth=1.2, label=floor_name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()


def _named(report: Report, name: str) -> Result:
    return next(result for result in report.results if result.name == name)


def _or_nan(value: Optional[float]) -> float:
    return math.nan if value is None else value


def _columns(report: Report) -> int:
    return report.problem.vocab


def _rows(report: Report) -> int:
    return report.problem.rows


def _median_ms(result: Result) -> Optional[float]:
    return result.median_ms


def _peak_mib(result: Result) -> Optional[float]:
    return result.peak_mib


def _floor_ms(report: Report) -> Optional[float]:
    return report.floor_ms


def _floor_name(problem: Problem) -> str:
    if problem.linear:
        return f"floor: the head's {problem.products} products at the machine's speed"
    return "floor: the bytes that must move, at the speed of a copy"


def _gradient_mib(report: Report) -> Optional[float]:
    """What a step from logits must allocate; from hidden states it need not exist."""
    problem = report.problem
    if problem.linear or problem.evaluation:
        return None
    return problem.rows * problem.vocab * DTYPES[problem.dtype].itemsize / _MIB


def _heading(report: Report) -> str:
    machine, problem = report.machine, report.problem
    what = "evaluation" if problem.evaluation else "forward + backward"
    source = " from hidden states" if problem.linear else ""
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return f"DSpark loss, {what}{source}, {problem.dtype}\n{where}, torch {machine['torch']}"
