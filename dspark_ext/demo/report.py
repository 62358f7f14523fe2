"""What a run achieved: a table for the terminal, a picture, and all the numbers in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into files and needs no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from tabulate import tabulate

from dspark_ext.demo.train import CE_ALPHA, CONFIDENCE_ALPHA, L1_ALPHA, History

ROWS = {
    "loss": "loss",
    "ce_loss": "  cross-entropy",
    "l1_loss": "  L1 distance",
    "confidence_loss": "  confidence",
    "confidence_abs_error": "confidence, mean abs. error",
    "accept_rate": "accept rate",
}
NOTE = (
    "An accept rate is the expected one, sum of min(p, q), with the text's own tokens\n"
    "before it. tau counts the target's own token as well: it is at least 1."
)
BEFORE, AFTER, TRAINING, HELD_OUT = "#b8bcc4", "#1f5fa8", "#9dbfe3", "#c8553d"


def accept_rates(numbers: dict[str, float]) -> list[float]:
    """The accept rate of every position of the block, in order."""
    positions = sum(name.startswith("accept_rate@") for name in numbers)
    return [numbers[f"accept_rate@{k}"] for k in range(positions)]


def table(history: History) -> str:
    """Loss terms, accept rate by position and tau on held-out text, before and after."""
    before, after = history["held_out"][0], history["held_out"][-1]
    labels = dict(ROWS)
    labels.update({f"accept_rate@{k}": f"  position {k}" for k in range(len(accept_rates(before)))})
    labels["tau"] = "tau, tokens per verification"
    numbers = tabulate(
        [(label, before[k], after[k], after[k] - before[k]) for k, label in labels.items()],
        headers=["on held-out text", "untrained", "trained", "change"],
        floatfmt=("", ".3f", ".3f", "+.3f"),
        preserve_whitespace=True,
    )
    return f"{numbers}\n\n{NOTE}"


def memory(growth: dict[str, float]) -> str:
    """What a training step takes above what the run holds anyway, one way beside the other."""
    logits, hidden = growth["logits"], growth["hidden states"]
    return (
        "Peak memory of a forward and backward pass, above what is in use before it:\n"
        f"  from hidden states    {hidden:6.1f} MiB\n"
        f"  from whole logits     {logits:6.1f} MiB"
    )


def write_history(history: History, folder: Path) -> Path:
    """Every step's and every evaluation's numbers."""
    path = folder / "history.json"
    path.write_text(json.dumps(history, indent=1) + "\n")
    return path


def smoothed(values: list[float], weight: float = 0.85) -> list[float]:
    """An exponential mean without the usual start at zero."""
    result, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = weight * total + value, weight * mass + 1
        result.append(total / mass)
    return result


def write_picture(history: History, folder: Path) -> Path:
    """Training curves, and the accept rate by position before and after."""
    style: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "figure.constrained_layout.w_pad": 0.12,
        "figure.constrained_layout.h_pad": 0.1,
    }
    with plt.rc_context({**style, "font.size": 9, "axes.titlesize": 10, "legend.frameon": False}):
        figure, ((loss, terms), (tau, accept)) = plt.subplots(
            2, 2, figsize=(10, 7), layout="constrained"
        )
        _curve(loss, history, "loss")
        loss.set_title("Loss")
        loss.set_ylim(bottom=0)
        _terms(terms, history)
        _curve(tau, history, "tau")
        tau.set_title("tau: tokens per verification by the target")
        tau.set_ylim(bottom=1)
        for axes in (loss, terms, tau):
            axes.set_xlabel("training step")
            axes.set_xlim(0, history["held_out"][-1]["step"])
        for axes in (loss, tau):
            axes.grid(alpha=0.25)
        _accept(accept, history)
        path = folder / "training.png"
        figure.savefig(path, dpi=150)
        plt.close(figure)
    return path


def _series(entries: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    return [entry["step"] for entry in entries], [entry[name] for entry in entries]


def _curve(axes: Axes, history: History, name: str) -> None:
    """One quantity: every training batch, their running mean, and the held-out evaluations."""
    steps, values = _series(history["steps"], name)
    axes.plot(steps, values, color=TRAINING, lw=0.6, alpha=0.7)
    axes.plot(steps, smoothed(values), color=AFTER, lw=1.6, label="training batches")
    axes.plot(
        *_series(history["held_out"], name),
        "o--",
        color=HELD_OUT,
        lw=1,
        ms=5,
        label="held-out text",
        clip_on=False,  # the first and the last stand on the frame
        zorder=3,
    )
    axes.legend()


def _terms(axes: Axes, history: History) -> None:
    """The weighted terms on top of one another: their sum is the loss."""
    names = {
        "l1_loss": ("L1", L1_ALPHA),
        "ce_loss": ("cross-entropy", CE_ALPHA),
        "confidence_loss": ("confidence", CONFIDENCE_ALPHA),
    }
    steps, _ = _series(history["steps"], "loss")
    base = [0.0 for _ in steps]
    for (name, (label, weight)), color in zip(names.items(), (AFTER, TRAINING, BEFORE)):
        _, values = _series(history["steps"], name)
        top = [low + weight * value for low, value in zip(base, smoothed(values))]
        axes.fill_between(steps, base, top, color=color, lw=0)
        middle = len(steps) // 2
        axes.text(
            steps[middle],
            (base[middle] + top[middle]) / 2,
            f"{weight:g} x {label}",
            color="white" if color == AFTER else "black",
            ha="center",
            va="center",
        )
        base = top
    axes.set_ylim(bottom=0)
    axes.set_title("What the loss is made of (training batches)")


def _accept(axes: Axes, history: History) -> None:
    """Accept rate by position on held-out text, untrained beside trained."""
    before, after = (accept_rates(history["held_out"][i]) for i in (0, -1))
    places = range(len(before))
    for values, side, color, label in (
        (before, -0.2, BEFORE, "untrained"),
        (after, 0.2, AFTER, "trained"),
    ):
        bars = axes.bar([k + side for k in places], values, 0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_title("Accept rate by position of the block (held-out text)")
    axes.set_xlabel("position")
    axes.set_xticks(list(places))
    axes.set_ylim(0, max(*before, *after) * 1.25)
    axes.legend(loc="upper right", ncols=2)
