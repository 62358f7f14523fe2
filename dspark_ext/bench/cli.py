"""The ``bench`` command: options, and the order of events."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Optional

import torch

from dspark_ext.bench import memory, peak, report, timing
from dspark_ext.bench.contenders import CONTENDERS, LINEAR_CONTENDERS, contenders_of
from dspark_ext.bench.problem import DTYPES, Problem

_NAMES = list(dict.fromkeys([*CONTENDERS, *LINEAR_CONTENDERS]))
_MIN_ROUNDS = 5
_HIDDEN = 896


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add("--rows", type=_positive, default=448, help="draft positions, B*A*K (default 448)")
    add("--vocab", type=_positive, default=151936, help="columns (default 151936)")
    add("--dtype", choices=DTYPES, default="float32", help="of the draft logits")
    add("--target-dtype", choices=DTYPES, help="of the target logits (default: --dtype)")
    add(
        "--linear",
        action="store_true",
        help="start from hidden states and a head that draft and teacher share: "
        "compute_dspark_linear_loss against head products and a loss on logits",
    )
    add(
        "--hidden",
        type=_positive,
        metavar="WIDTH",
        help=f"of the hidden states, with --linear (default {_HIDDEN})",
    )
    add(
        "--head",
        choices=("frozen", "trained"),
        help="whether the head gets a gradient, with --linear (default frozen)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the logits live")
    add("--threads", type=_positive, help="default: torch's own choice")
    add("--rounds", type=_rounds, default=_MIN_ROUNDS, help=f"at least (and default) {_MIN_ROUNDS}")
    add(
        "--warm-up",
        type=_natural,
        default=1,
        metavar="STEPS",
        help="untimed steps before each timed one (default 1)",
    )
    add("--evaluation", action="store_true", help="the loss alone, under no_grad")
    add("--inplace", action="store_true", help="also time ours with inplace_grad=True")
    add(
        "--inactive",
        type=_fraction,
        default=0.0,
        metavar="FRACTION",
        help="share of rows whose eval_mask is 0 (default 0)",
    )
    add(
        "--contenders",
        nargs="+",
        choices=_NAMES,
        metavar="NAME",
        help=f"which to run besides ours: {' '.join(CONTENDERS)}, or with --linear "
        f"{' '.join(LINEAR_CONTENDERS)} (default: all but inplace, and on a CPU liger)",
    )
    add(
        "--malloc",
        choices=("default", "keep"),
        default="default",
        help="keep: run with glibc keeping freed memory, which speeds PyTorch's own "
        "implementations up (default: the environment as it is)",
    )
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--seed", type=int, default=0, help="of the inputs (default 0)")
    add("--json", type=_new_file, metavar="FILE", help="also write the result as JSON")
    add(
        "--plot",
        type=_new_file,
        metavar="FILE",
        help="also measure smaller vocabularies and fewer rows (a sixteenth and a quarter), and "
        "draw time and memory against both (.png, .svg, .pdf)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark. 0: measured; 1: it could not run, or a contender's result is wrong;
    2: options that do not go together."""
    complaint = _complaint(args)
    if complaint is not None:
        print(f"python -m dspark_ext bench: error: {complaint}", file=sys.stderr)
        return 2
    tabulate = _tabulate()
    if tabulate is None:
        print(
            "The benchmark prints its tables with tabulate, which is not installed here: "
            "pip install 'dspark_ext[bench]'",
            file=sys.stderr,
        )
        return 1
    if args.malloc == "keep":
        _reexecute_keeping_heap(args.command_line)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    plot = None if args.plot is None else _plot()
    if args.plot is not None and plot is None:
        return 1
    problem = _problem(args)
    problems = [problem] if plot is None else plot.sweep(problem)
    try:
        *smaller, result = [_measure(args, problem) for problem in problems]
    except (RuntimeError, ValueError, MemoryError) as error:
        timing.progress("")
        print(f"The benchmark could not run: {error}", file=sys.stderr)
        return 1
    print(report.render(result, tabulate))
    if args.json is not None:
        text = json.dumps(report.as_json(result), indent=2, allow_nan=False)
        args.json.write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        plot.save([*smaller, result], args.plot)
        print(f"\nThe picture is in {args.plot}.")
    return 1 if any(measured.wrong() for measured in (*smaller, result)) else 0


def _problem(args: argparse.Namespace) -> Problem:
    return Problem(
        rows=args.rows,
        vocab=args.vocab,
        dtype=args.dtype,
        target_dtype=args.target_dtype or args.dtype,
        device=args.device,
        inactive=args.inactive,
        evaluation=args.evaluation,
        seed=args.seed,
        hidden=(args.hidden or _HIDDEN) if args.linear else 0,
        train_head=args.head == "trained",
    )


def _measure(args: argparse.Namespace, problem: Problem) -> report.Report:
    """Peak memory first (what does not fit dies there, not here), then the race."""
    timing.progress(f"{problem.rows} rows x {problem.vocab} columns")
    machine = report.describe_machine(args.device, args.malloc)
    contenders = contenders_of(problem)
    results = {name: timing.Result(name, contenders[name].title) for name in _chosen(args)}
    notes = [] if args.no_memory else _measure_memory(problem, results)
    timings = timing.race(problem, results, args.rounds, args.warm_up)
    return report.Report(
        problem, machine, args.rounds, args.warm_up, timings, list(results.values()), notes
    )


def _measure_memory(problem: Problem, results: dict[str, timing.Result]) -> list[str]:
    """Fills in every contender's peak; notes for the report."""
    try:
        peak.check_measurable(problem.device)
    except peak.Unmeasurable as error:
        return [str(error)]
    for name, result in results.items():
        timing.progress(f"peak memory of {name}")
        try:
            result.peak_mib = memory.peak_growth_mib(name, problem, torch.get_num_threads())
        except Exception as error:
            if name == "ours":
                raise
            result.fail(error)
    return []


def _chosen(args: argparse.Namespace) -> list[str]:
    """The contenders' names in the table's order; ours is always among them."""
    known = LINEAR_CONTENDERS if args.linear else CONTENDERS
    default = (
        name
        for name, contender in known.items()
        if not contender.inplace
        and not (args.evaluation and name == "inplace")
        and (args.device == "cuda" or not contender.gpu_only)
    )
    wanted = {"ours", *(args.contenders or default)}
    if args.inplace:
        wanted.add("inplace")
    return [name for name in known if name in wanted]


def _complaint(args: argparse.Namespace) -> Optional[str]:
    """What is wrong with the options taken together, or None."""
    if args.evaluation and "inplace" in _chosen(args):
        return "--evaluation computes no gradient that could be written in place"
    if args.evaluation and args.head == "trained":
        return "--evaluation computes no gradient that a head could be trained with"
    if not args.linear and (args.hidden or args.head):
        return "--hidden and --head describe what --linear starts from"
    if args.linear and args.target_dtype not in (None, args.dtype):
        return "with --linear the teacher has the dtype of the head it shares; leave --target-dtype"
    for name in args.contenders or []:
        if name not in (LINEAR_CONTENDERS if args.linear else CONTENDERS):
            return f"{name} runs {'without' if args.linear else 'with'} --linear only"
    if args.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda, but torch sees no GPU here"
    if args.malloc == "keep" and platform.libc_ver()[0] != "glibc":
        return "--malloc keep sets glibc's allocator, and this Python does not run on glibc"
    return None


def _tabulate() -> Optional[Callable[..., str]]:
    try:
        import tabulate
    except ImportError:
        return None
    function: Callable[..., str] = tabulate.tabulate
    return function


def _plot() -> Optional[ModuleType]:
    """The module that draws; None, with a word about it, without matplotlib."""
    try:
        from dspark_ext.bench import plot
    except ImportError:
        print(
            "--plot draws with matplotlib, which is not installed here: "
            "pip install 'dspark_ext[bench]'",
            file=sys.stderr,
        )
        return None
    return plot


def _reexecute_keeping_heap(command_line: list[str]) -> None:
    """Starts this process again under allocator settings, which glibc reads at start only."""
    if all(os.environ.get(name) == value for name, value in report.KEEP_HEAP.items()):
        return
    command = [sys.executable, "-m", "dspark_ext", *command_line]
    os.execve(sys.executable, command, {**os.environ, **report.KEEP_HEAP})


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < _MIN_ROUNDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least {_MIN_ROUNDS}; a median of fewer is noise"
        )
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _new_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing folder")
    return path
