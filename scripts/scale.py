"""Time per pair of logits, from few rows to many and from small vocabularies to large ones.

``python scripts/scale.py [--dtype bfloat16] [--rounds 7]`` times a training step of the loss with
its gradient in place, and the kernel in it alone, and prints two tables in Markdown. Sizes lie in
the same memory and take turns, so that what disturbs the machine disturbs all of them alike. It
takes two tensors of the largest size, 10 GB as it comes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from dspark_ext import DSparkForwardOutput, compute_dspark_loss
from dspark_ext.bench.problem import DTYPES, LOSS, Layer
from dspark_ext.bench.timing import progress

BLOCK = 8
BANK_ROWS = 8  # random rows that repeat: gigabytes of new ones would take minutes
ROWS = (64, 256, 1024, 4096, 16384)
COLUMNS = (8192, 32768, 65536, 131072, 262144)


class Size:
    """N rows and V columns at the beginning of memory that all sizes share."""

    def __init__(self, rows: int, columns: int, memory: tuple[Tensor, Tensor]) -> None:
        self.rows, self.columns = rows, columns
        blocks = (1, rows // BLOCK)
        self.draft, self.target = (
            flat[: rows * columns].view(*blocks, BLOCK, columns) for flat in memory
        )
        generator = torch.Generator().manual_seed(rows + columns)
        shape = (2, BANK_ROWS, columns)
        self.bank = torch.randn(shape, generator=generator).mul_(2).to(self.draft.dtype)
        self.outputs = DSparkForwardOutput(
            self.draft,
            torch.arange(rows).mul(9973).remainder(columns).view(*blocks, BLOCK),
            torch.ones(*blocks, BLOCK),
            torch.ones(blocks),
            torch.randn(*blocks, BLOCK, generator=generator),
            self.target,
        )
        self.step_ms: list[float] = []
        self.kernel_ms: list[float] = []

    def measure(self) -> None:
        self.step_ms.append(self.milliseconds(self.step))
        self.kernel_ms.append(self.milliseconds(self.kernel))

    def milliseconds(self, call: Callable[[], None]) -> float:
        for logits, bank in zip((self.draft, self.target), self.bank):
            logits.view(-1, BANK_ROWS, self.columns).copy_(bank)
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    def step(self) -> None:
        draft = Layer.apply(torch.zeros((), requires_grad=True), self)
        outputs = dataclasses.replace(self.outputs, draft_logits=draft)
        compute_dspark_loss(outputs=outputs, inplace_grad=True, **LOSS).backward()

    def kernel(self) -> None:
        ids, ones = self.outputs.target_ids, self.outputs.eval_mask
        torch.ops.dspark_ext.weighted_inplace_(self.draft, self.target, ids, None, ones, ones)


def table(sizes: list[Size], rounds: int) -> str:
    for index in range(-1, rounds):
        progress("warming up" if index < 0 else f"round {index + 1} of {rounds}")
        for size in sizes:
            size.measure()
    progress("")
    lines = []
    for size in sizes:
        pairs = size.rows * size.columns
        step, kernel = (statistics.median(ms[1:]) for ms in (size.step_ms, size.kernel_ms))
        lines.append((size.rows, size.columns, step, step / pairs * 1e6, kernel / pairs * 1e6))
    last = lines[-1]
    lines = [(*line, line[3] / last[3], line[4] / last[4]) for line in lines]
    headers = ("rows", "columns", "step ms", "ns a pair", "kernel's", "to the last", "kernel's")
    formats = (",d", ",d", ",.1f", ".3f", ".3f", ".2f", ".2f")
    text = [[format(value, f) for value, f in zip(line, formats)] for line in lines]
    return tabulate(
        text, headers, "pipe", disable_numparse=True, colalign=("right",) * len(headers)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default="bfloat16", help="(default: %(default)s)")
    add("--rounds", type=int, default=7, help="(default: %(default)s)")
    add("--rows", type=int, nargs="+", default=ROWS, help="of the first table, multiples of 8")
    add("--vocab", type=int, default=151936, help="its columns (default: %(default)s)")
    add("--columns", type=int, nargs="+", default=COLUMNS, help="of the second table")
    add("--positions", type=int, default=3584, help="its rows (default: %(default)s)")
    args = parser.parse_args()
    tables = [
        [(rows, args.vocab) for rows in args.rows],
        [(args.positions, columns) for columns in args.columns],
    ]
    largest = max(math.prod(size) for sizes in tables for size in sizes)
    memory = tuple(torch.empty(largest, dtype=DTYPES[args.dtype]) for _ in range(2))
    print(f"{args.dtype}, {torch.get_num_threads()} threads, medians of {args.rounds}")
    for sizes in tables:
        print("\n" + table([Size(*size, memory) for size in sizes], args.rounds))


if __name__ == "__main__":
    main()
