"""The picture of :meth:`dspark_ext.AcceptanceMeter.plot`; imports matplotlib when it draws."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dspark_ext.metrics import Reliability

FIRST, LAST, IDEAL, NOTE = "#c3cad4", "#1f5fa8", "#8a8f98", "#5b616b"


def draw(
    windows: Sequence[dict[str, float]],
    reliability: Optional[Reliability],
    path: Union[str, os.PathLike[str], None] = None,
) -> Figure:
    """The figure of some windows' quantities, the oldest first.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no window has a position.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: no display, nothing global
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install 'dspark_ext[metrics]'") from error

    known = [(i + 1, window) for i, window in enumerate(windows) if "accept_rate" in window]
    if not known:
        raise ValueError(
            "there is nothing to plot: no window has a position with an accept rate "
            "(update() adds terms; the loss needs target logits to know acceptance)"
        )
    figure = Figure(figsize=(13.2, 4.2), layout="constrained")
    by_position, over_time, calibration = figure.subplots(1, 3)
    _accept_rates(by_position, known)
    _tau(over_time, known, len(windows))
    _reliability(calibration, reliability)
    for axes in (by_position, over_time, calibration):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(11)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _accept_rates(axes: Any, windows: list[tuple[int, dict[str, float]]]) -> None:
    """Bars by position: the last window's, beside the first one's where there are two."""
    shown = [windows[-1]] if len(windows) == 1 else [windows[0], windows[-1]]
    width = 0.8 / len(shown)
    top = 0.0
    for i, (number, window) in enumerate(shown):
        last = i == len(shown) - 1
        rates = {
            int(name.split("@")[1]): rate
            for name, rate in window.items()
            if name.startswith("accept_rate@")
        }
        top = max(top, *rates.values())
        offset = (i - (len(shown) - 1) / 2) * width
        bars = axes.bar(
            [k + offset for k in rates],
            list(rates.values()),
            width * 0.94,
            color=LAST if last else FIRST,
            label=f"window {number}, mean {window['accept_rate']:.2f}",
        )
        if last and len(rates) <= 12:
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_title("Accept rate by position of the block")
    axes.set_xlabel("position")
    axes.set_ylabel("accept rate")
    axes.set_ylim(0, 1.28 * top if top > 0 else 1)  # room for the legend
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= 1])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def _tau(axes: Any, windows: list[tuple[int, dict[str, float]]], count: int) -> None:
    """Tau of every window that has one."""
    points = [(number, window["tau"]) for number, window in windows if "tau" in window]
    axes.set_title("tau over time: tokens per verification")
    axes.set_xlabel("log window")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if not points:
        _say(axes, "no block was kept")
        return
    numbers, values = zip(*points)
    few = len(points) <= 40
    axes.plot(numbers, values, color=LAST, lw=1.6, marker="o" if few else None, ms=3.5)
    axes.annotate(
        f"{values[-1]:.2f}",
        (numbers[-1], values[-1]),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=LAST,
        fontsize=9,
    )
    axes.set_xlim(0.5, count + 0.5)
    if count == 1:
        axes.set_xticks([1])
    low, high = min(values), max(values)
    # No zoom into noise; and 1 is what a drafter gets that is never right, the target's own token.
    room = max(0.1 * (high - low), (0.5 - (high - low)) / 2)
    axes.set_ylim(max(1.0, low - room), high + room)


def _reliability(axes: Any, reliability: Optional[Reliability]) -> None:
    """Predicted against measured, areas by how many positions there are."""
    axes.set_title("Confidence head: predicted and measured")
    axes.set_xlabel("predicted accept rate")
    axes.set_ylabel("measured accept rate")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    if reliability is None:
        _say(axes, "no predictions were compared:\nupdate(terms, outputs=outputs)")
        return
    axes.plot([0, 1], [0, 1], color=IDEAL, lw=1, ls="--", zorder=1)
    axes.text(0.21, 0.16, "perfect", color=NOTE, fontsize=8, rotation=45, ha="center", va="center")
    bins = list(zip(reliability.predicted, reliability.measured, reliability.share))
    axes.vlines(
        reliability.predicted,
        [min(predicted, measured) for predicted, measured, _ in bins],
        [max(predicted, measured) for predicted, measured, _ in bins],
        color=FIRST,
        lw=2,
        zorder=2,
    )
    axes.plot(reliability.predicted, reliability.measured, color=LAST, lw=1, alpha=0.5, zorder=3)
    areas = [20 + 300 * share for share in reliability.share]
    axes.scatter(
        reliability.predicted, reliability.measured, areas, color=LAST, zorder=4, clip_on=False
    )
    axes.text(0.03, 0.97, "too modest", color=NOTE, fontsize=8, va="top")
    axes.text(0.97, 0.03, "too sure", color=NOTE, fontsize=8, ha="right")
    axes.text(
        0.03,
        0.89,
        f"expected calibration\nerror {reliability.expected_calibration_error:.3f}",
        fontsize=9,
        va="top",
    )
    axes.text(0.97, 0.1, "dot area: positions", color=NOTE, fontsize=8, ha="right")


def _say(axes: Any, text: str) -> None:
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=NOTE, fontsize=9
    )
