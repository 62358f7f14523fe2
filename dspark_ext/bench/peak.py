"""By how much a process's peak memory grows during a call."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import torch

_RESET_PEAK = "5"  # see clear_refs in proc(5)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
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


def growth_mib(call: Callable[[], Any], device: str) -> float:
    """MiB above what was in use before at the peak of one call, in this process.

    What was freed counts as free, before the call and during it. Lazy imports and thread pools
    count when the call is the first to need them, so one like it should have gone before.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / _MIB
    with _freed_memory_returned():
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


@contextlib.contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """Within it, memory that is freed is neither reused unseen nor counted any longer.

    By itself glibc keeps freed blocks of up to 32 MiB, and how much of them is resident depends on
    what the process did before.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.malloc_trim(0)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    try:
        yield
    finally:
        # Where glibc's own adjustment ends in a process that allocates tensors.
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
