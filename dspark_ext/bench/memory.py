"""Peak memory growth of one step, each contender in a process of its own.

``python -m dspark_ext.bench.memory JSON`` is that process. It makes the inputs, runs a step of a
tiny size so that lazy imports and thread pools do not count, resets the peak, runs one step of
the real size and prints by how much the peak lies above what was resident before.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

from dspark_ext.bench.contenders import CONTENDERS, Unavailable
from dspark_ext.bench.problem import Inputs, Problem
from dspark_ext.bench.timing import Runner

_RESET_PEAK = "5"  # see clear_refs in proc(5)
_MIB = 1 << 20


class Unmeasurable(Exception):
    """This system does not tell a process its peak memory; the message says what is missing."""


def check_measurable(device: str) -> None:
    """Raises :class:`Unmeasurable` where the peak cannot be reset and read."""
    if device == "cpu":
        try:
            _reset_host_peak()
            _host_kib("VmHWM")
        except OSError as error:
            raise Unmeasurable(f"peak memory cannot be measured here: {error}") from error


def peak_growth_mib(name: str, problem: Problem, threads: int) -> float:
    """MiB above the inputs at the peak of one step, measured in a fresh process.

    Raises:
        Unavailable: the contender cannot run here.
        RuntimeError: the step failed, or the process was killed.
    """
    request = {"name": name, "problem": dataclasses.asdict(problem), "threads": threads}
    process = subprocess.run(
        [sys.executable, "-m", "dspark_ext.bench.memory", json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode < 0:
        reason = signal.Signals(-process.returncode).name
        out_of_memory = ", most likely out of memory" if reason == "SIGKILL" else ""
        raise RuntimeError(f"killed by {reason}{out_of_memory}")
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"exit code {process.returncode}: {last}") from None
    if answer["status"] == "skipped":
        raise Unavailable(answer["reason"])
    if answer["status"] == "failed":
        raise RuntimeError(answer["reason"])
    return float(answer["peak_mib"])


def measure(name: str, problem: Problem) -> float:
    """MiB above the inputs at the peak of one step in this process."""
    contender = CONTENDERS[name]
    inputs = Inputs(problem)
    # A compiled function is compiled for its size, so only a step of that size warms it up.
    tiny = dataclasses.replace(problem, rows=14, vocab=64)
    warm_up = Runner(contender, inputs if contender.compiled else Inputs(tiny))
    warm_up()
    warm_up.clean()
    runner = warm_up if contender.compiled else Runner(contender, inputs)
    gc.collect()
    if problem.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runner()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / _MIB
    _trim_heap()
    _reset_host_peak()
    before = _host_kib("VmRSS")
    runner()
    return (_host_kib("VmHWM") - before) / 1024


def _reset_host_peak() -> None:
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _host_kib(field: str) -> int:
    match = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(match.group(1))


def _trim_heap() -> None:
    """Gives freed memory back, so that the step cannot reuse it unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main() -> None:
    """Answers one request with one line of JSON."""
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    try:
        answer = {
            "status": "ok",
            "peak_mib": measure(request["name"], Problem(**request["problem"])),
        }
    except Unavailable as error:
        answer = {"status": "skipped", "reason": str(error)}
    except Exception as error:
        answer = {"status": "failed", "reason": str(error) or type(error).__name__}
    print(json.dumps(answer))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
