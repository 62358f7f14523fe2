"""By how much a process's peak memory grows during a call."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import torch

# glibc by itself keeps freed blocks of up to 32 MiB, and how much of them stays resident depends on
# what a process did before. Larger blocks than this are given back at once.
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
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


def in_fresh_process(module: str, argument: str) -> Any:
    """What ``python -m module argument`` prints on its last line, which is JSON.

    Raises:
        RuntimeError: it failed, or was killed.
    """
    process = subprocess.run(
        [sys.executable, "-m", module, argument],
        capture_output=True,
        text=True,
        check=False,
        env={**RETURN_FREED, **os.environ},
    )
    if process.returncode < 0:
        reason = signal.Signals(-process.returncode).name
        out_of_memory = ", most likely out of memory" if reason == "SIGKILL" else ""
        raise RuntimeError(f"killed by {reason}{out_of_memory}")
    try:
        return json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"exit code {process.returncode}: {last}") from None


def growth_mib(call: Callable[[], Any], device: str) -> float:
    """MiB above what was in use before at the peak of one call, in this process.

    What earlier calls freed counts as free. Lazy imports and thread pools count when the call
    is the first to need them, so one like it should have gone before. The figure is exact in
    :func:`in_fresh_process`; elsewhere it contains what the heap keeps of blocks freed by the call.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / _MIB
    _trim_heap()
    _reset_host_peak()
    before = _host_kib("VmRSS")
    call()
    return (_host_kib("VmHWM") - before) / 1024


def _reset_host_peak() -> None:
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _host_kib(field: str) -> int:
    match = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(match.group(1))


def _trim_heap() -> None:
    """Gives freed memory back, so that the call cannot reuse it unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
