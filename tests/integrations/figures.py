"""The table of docs/integrations.md: a step of each installed trainer, with and without the patch.

``python tests/integrations/figures.py [TRAINER ...]`` prints a Markdown table. The speculators
step without the patch has its eager losses: the fused ones need Triton and a GPU.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from comparison import compare, judge
from trainer_steps import STEPS, K, Step

import dspark_ext.integrations

ROUNDS = 6


def measure(step: Step) -> tuple[float, float]:
    """Milliseconds of the fastest step without and with the patch, in turn: other work on the
    machine only ever adds time."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for patched in (False, True):
            handle = dspark_ext.integrations.patch(step.trainer) if patched else None
            begin = time.perf_counter()
            step.run()
            times[patched].append((time.perf_counter() - begin) * 1e3)
            if handle is not None:
                handle.undo()
    return min(times[0]), min(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainers", nargs="*", default=list(STEPS), metavar="TRAINER")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=448, help="draft positions of a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    versions = {trainer.name: trainer.version for trainer in dspark_ext.integrations.available()}
    print(f"{args.rows} rows of {args.vocab:,} float32 columns, {args.threads} threads")
    print("| trainer | what was run | loss | gradient | without | with |")
    print("|---|---|--:|--:|--:|--:|")
    for name in args.trainers:
        batch = 1 if name == "speculators" else 2
        step = STEPS[name](args.vocab, args.rows // (batch * K))
        difference = compare(step)
        without, patched = measure(step)
        print(
            f"| {name} {versions[name]} | {step.what} | {difference.loss:.1e} | "
            f"{difference.gradient:.1e} | {without:,.0f} ms | {patched:,.0f} ms |",
            flush=True,
        )
        if name == "nemo_automodel":
            judged = "{:.1e} without, {:.1e} with".format(*judge(step))
    if "nemo_automodel" in args.trainers:
        print(f"nemo_automodel's gradient of the logits, error against float64: {judged}")


if __name__ == "__main__":
    main()
