"""Whether training with the kernel ends where training with float64 mathematics ends.

``python scripts/precision_run.py FILE.json [--steps 300] [--seeds 0 1 2]`` trains the demo drafter
from logits in float32 and in bfloat16, for every seed: with float64 mathematics of the logits, with
the kernel, and with the kernel on logits moved by one unit in their last place, which tells how
far a rounding alone drives two runs apart. It prints, in Markdown, what comes out on held-out text
and how far runs of the same seed are apart, as a root mean square over the seeds. A run lands in
the file when it ends; those that are there are not repeated. The exit status is 1 where kernel and
float64 are further apart than two seeds are, or than five times what a rounding does. It takes the
`demo` extra.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from dspark_ext import DSparkForwardOutput
from dspark_ext.demo import target
from dspark_ext.demo.train import Settings, StepLoss, objective, train

DTYPES, MATHEMATICS = ("float32", "bfloat16"), ("float64", "kernel", "nudged")
WAYS = tuple(itertools.product(DTYPES, MATHEMATICS))
FIGURES = ("loss", "accept_rate", "tau")
SMOOTHED = 20  # steps that a point of the loss curve is the mean of
ROUNDINGS = 5  # a ratio that chance exceeds once in 79 with three seeds: F(3, 3) > 25

Run = dict[str, list[float]]


def step_loss(dtype: str, by: str) -> StepLoss:
    """The objective of logits rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(0)

    def loss(outputs: DSparkForwardOutput, impl: str) -> tuple[Tensor, dict[str, Tensor]]:
        draft, teacher = outputs.draft_logits, outputs.aligned_target_logits
        if by == "nudged":
            up = torch.randint(2, draft.shape, generator=generator, dtype=torch.bool)
            draft = draft * torch.where(up, 1 + torch.finfo().eps, 1 - torch.finfo().eps)
        draft, teacher = (x.to(getattr(torch, dtype)) for x in (draft, teacher))
        if by == "float64":
            draft, teacher = draft.double(), teacher.double()
        rounded = dataclasses.replace(outputs, draft_logits=draft, aligned_target_logits=teacher)
        return objective(rounded, impl)

    return loss


def smooth(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[i : i + SMOOTHED]) for i in range(0, len(losses), SMOOTHED)]


def trained(text: tuple, steps: int, seed: int, dtype: str, by: str) -> Run:
    impl = "torch" if by == "float64" else "kernel"
    settings = Settings(steps=steps, seed=seed, impl=impl, evaluations=1)
    print(f"{dtype}, {by}, seed {seed}", file=sys.stderr, flush=True)
    history = train(*text, settings, step_loss(dtype, by))
    last = history["held_out"][-1]
    curve = smooth([step["loss"] for step in history["steps"]])
    return {"curve": curve, **{name: [last[name]] for name in FIGURES}}


def root_mean_square(differences: list[float]) -> float:
    return math.sqrt(statistics.mean(x * x for x in differences))


def differences(some: list[Run], others: list[Run], name: str) -> list[float]:
    """By which runs differ from their counterparts, of a curve at each of its points."""
    return [x - y for a, b in zip(some, others) for x, y in zip(a[name], b[name])]


def report(runs: dict[str, Run], seeds: list[int]) -> tuple[str, bool]:
    """Both tables, and whether kernel and float64 are as near as they have to be."""

    def of(dtype: str, by: str) -> list[Run]:
        return [runs[f"{dtype} {by} {seed}"] for seed in seeds]

    ends = []
    for dtype, by in WAYS:
        means = [statistics.mean(run[name][0] for run in of(dtype, by)) for name in FIGURES]
        ends.append([dtype, by, *means])
    apart, near = [], True
    for dtype in DTYPES:
        exact, kernel, nudged = (of(dtype, by) for by in MATHEMATICS)
        pairs = list(itertools.combinations(exact, 2))
        for name in (*FIGURES, "curve"):
            errors = differences(kernel, exact, name)
            error, rounding, seed = map(
                root_mean_square,
                (errors, differences(kernel, nudged, name), differences(*zip(*pairs), name)),
            )
            near &= error <= min(seed, ROUNDINGS * rounding)
            figure = "loss curve" if name == "curve" else name.replace("_", " ")
            apart.append([dtype, figure, statistics.mean(errors), error, rounding, seed])
    text = tabulate(ends, ["logits", "by", "loss", "accept rate", "tau"], "pipe", floatfmt=".4f")
    headers = ["logits", "", "mean", "apart", "by a rounding", "by a seed"]
    formats = ("", "", "+.1e", ".1e", ".1e", ".1e")
    return f"{text}\n\n{tabulate(apart, headers, 'pipe', floatfmt=formats)}", near


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON, of all runs")
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    args = parser.parse_args(arguments)
    if len(args.seeds) < 2:
        parser.error("how far seeds are apart takes at least two of them")
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
    tables, near = report(runs, args.seeds)
    print(f"{args.steps} steps, seeds {' '.join(map(str, args.seeds))}\n\n{tables}")
    return 0 if near else 1


if __name__ == "__main__":
    sys.exit(main())
