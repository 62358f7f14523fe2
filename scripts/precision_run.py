"""Whether training with the kernel ends where training with float64 mathematics ends.

``python scripts/precision_run.py FILE.json [--steps 300] [--seeds 0 1 2]`` trains the demo drafter
from logits in float32 and in bfloat16, each with the kernel's loss and gradient and with those of
float64 mathematics on the same logits, for every seed. It prints what comes out on held-out text,
in Markdown, and the difference of the two beside the difference that a seed makes. A run lands in
the file when it ends; those that are there are not repeated. The exit status is 1 where a
difference is larger than a seed's. It takes the `demo` extra.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from dspark_ext import DSparkForwardOutput
from dspark_ext.demo import target
from dspark_ext.demo.train import Settings, StepLoss, objective, train

DTYPES, JUDGES = ("float32", "bfloat16"), ("kernel", "float64")
WAYS = tuple(itertools.product(DTYPES, JUDGES))
FIGURES = ("loss", "accept_rate", "tau")
SMOOTHED = 20  # steps that a point of the loss curve is the mean of

Run = dict[str, list[float]]


def step_loss(dtype: str, judge: str) -> StepLoss:
    """The objective of logits rounded to ``dtype``."""

    def loss(outputs: DSparkForwardOutput, impl: str) -> tuple[Tensor, dict[str, Tensor]]:
        logits = [outputs.draft_logits, outputs.aligned_target_logits]
        draft, teacher = (x.to(getattr(torch, dtype)) for x in logits)
        if judge == "float64":
            draft, teacher = draft.double(), teacher.double()
        rounded = dataclasses.replace(outputs, draft_logits=draft, aligned_target_logits=teacher)
        return objective(rounded, impl)

    return loss


def smooth(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[i : i + SMOOTHED]) for i in range(0, len(losses), SMOOTHED)]


def trained(text: tuple, steps: int, seed: int, dtype: str, judge: str) -> Run:
    impl = "kernel" if judge == "kernel" else "torch"
    settings = Settings(steps=steps, seed=seed, impl=impl, evaluations=1)
    print(f"{dtype}, {judge}, seed {seed}", file=sys.stderr, flush=True)
    history = train(*text, settings, step_loss(dtype, judge))
    last = history["held_out"][-1]
    curve = smooth([step["loss"] for step in history["steps"]])
    return {"curve": curve, **{name: [last[name]] for name in FIGURES}}


def spread(runs: list[Run], name: str) -> float:
    """The standard deviation over seeds; of a curve, at the point where it is largest."""
    return max(statistics.stdev(values) for values in zip(*(run[name] for run in runs)))


def report(runs: dict[str, Run], seeds: list[int]) -> tuple[str, bool]:
    """Both tables, and whether every difference is smaller than a seed's."""

    def of(dtype: str, judge: str) -> list[Run]:
        return [runs[f"{dtype} {judge} {seed}"] for seed in seeds]

    ends = []
    for dtype, judge in WAYS:
        found = of(dtype, judge)
        means = [statistics.mean(run[name][0] for run in found) for name in FIGURES]
        ends.append([dtype, judge, *means])
    differences, within = [], True
    for dtype in DTYPES:
        kernel, exact = (of(dtype, judge) for judge in JUDGES)
        for name in (*FIGURES, "curve"):
            difference = max(
                abs(x - y) for k, e in zip(kernel, exact) for x, y in zip(k[name], e[name])
            )
            noise = spread(exact, name)
            within &= difference <= noise
            figure = "loss curve" if name == "curve" else name.replace("_", " ")
            differences.append([dtype, figure, difference, noise, difference / noise])
    text = tabulate(ends, ["logits", "by", "loss", "accept rate", "tau"], "pipe", floatfmt=".4f")
    headers = ["logits", "", "largest difference", "of seeds", "ratio"]
    formats = ("", "", ".1e", ".1e", ".2f")
    return f"{text}\n\n{tabulate(differences, headers, 'pipe', floatfmt=formats)}", within


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON, of all runs")
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    args = parser.parse_args(arguments)
    if len(args.seeds) < 2:
        parser.error("the noise of seeds takes at least two of them")
    kept = json.loads(args.file.read_text()) if args.file.exists() else {}
    runs = kept.setdefault(f"{args.steps} steps", {})
    text = None
    for seed in args.seeds:
        for way in WAYS:
            name = " ".join((*way, str(seed)))
            if name not in runs:
                if text is None:
                    path = target.target_file()
                    if path is None:
                        parser.error("the target's file is missing: pip install 'dspark_ext[demo]'")
                    text = target.prepare(path)
                runs[name] = trained(text, args.steps, seed, *way)
                args.file.write_text(json.dumps(kept, indent=1) + "\n")
    tables, within = report(runs, args.seeds)
    print(f"{args.steps} steps, seeds {' '.join(map(str, args.seeds))}\n\n{tables}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
