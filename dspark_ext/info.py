"""``python -m dspark_ext info``: what was built and what will run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any, Optional

import torch

import dspark_ext
from dspark_ext import _C, _backend, integrations

WIDTH = 80

_VARIABLES = {
    "DSPARK_EXT_CPU_LEVEL": "forces an instruction-set level",
    "DSPARK_EXT_CHECK": "1 turns on checks that cost a host synchronisation",
    "OMP_NUM_THREADS": "threads at start",
    "OMP_PROC_BIND": "binding of threads to cores",
    "GOMP_CPU_AFFINITY": "binding of threads to cores",
    "CUDA_VISIBLE_DEVICES": "GPUs that torch may see",
    "LD_PRELOAD": "another allocator or OpenMP runtime",
    "GLIBC_TUNABLES": "allocator settings",
    "MALLOC_MMAP_MAX_": "allocator settings",
    "MALLOC_MMAP_THRESHOLD_": "allocator settings",
    "MALLOC_TRIM_THRESHOLD_": "allocator settings",
    "MALLOC_TOP_PAD_": "allocator settings",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 when the package cannot run as configured."""
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else render(facts))
    return 0 if facts["cpu"]["error"] is None else 1


def collect() -> dict[str, Any]:
    """Everything that the report states, as plain values."""
    level, error = _cpu_level()
    cuda: dict[str, Any] = {
        "architectures": (_backend.cuda_architectures() or "").split() or None,
        "toolkit": _C.cuda_toolkit,
        "torch_cuda": torch.version.cuda,
        "devices": gpu_names(),
    }
    return {
        "dspark_ext": dspark_ext.__version__,
        "path": str(Path(dspark_ext.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": _C.compiler,
        "cpu": {
            "model": cpu_model(),
            "cores": cpu_cores(),
            "threads": torch.get_num_threads(),
            "levels": _C.cpu_available_levels().split(),
            "level": level,
            "error": error,
            "huge_pages": huge_pages(),
        },
        "openmp": {"built": bool(_C.openmp), "runtimes": openmp_runtimes()},
        "cuda": cuda,
        "auto": choices(),
        "warnings": toolkit_warnings(cuda["toolkit"], cuda["torch_cuda"]),
        "trainers": [dataclasses.asdict(trainer) for trainer in integrations.available()],
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
    }


def cpu_model() -> str:
    """The processor's name as the operating system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def cpu_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def huge_pages() -> Optional[str]:
    """The kernel's transparent huge page mode; ``never`` makes fresh gradients slower."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    match = re.search(r"\[(\w+)\]", text)
    return match.group(1) if match else None


def openmp_runtimes() -> Optional[list[str]]:
    """Paths of the OpenMP runtimes in this process, or None where that cannot be read."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return sorted(set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so[^/\s]*", maps)))


def gpu_names() -> list[str]:
    """Names of the GPUs that torch can use."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def choices() -> dict[str, dict[str, str]]:
    """What ``impl="auto"`` picks for each device of this machine, and why.

    Without a GPU, ``cuda`` stands for what one would get.
    """
    gpus = [f"cuda:{index}" for index in range(len(gpu_names()))]
    return {name: _choice(torch.device(name)) for name in ("cpu", *(gpus or ["cuda"]))}


def toolkit_warnings(toolkit: Optional[str], torch_cuda: Optional[str]) -> list[str]:
    """A warning where the kernels and torch come from CUDA toolkits of two major versions."""
    if toolkit is None or torch_cuda is None:
        return []
    majors = [version.split(".")[0] for version in (toolkit, torch_cuda)]
    if majors[0] == majors[1]:
        return []
    return [
        f"the CUDA kernels were built with toolkit {toolkit}, and torch with CUDA {torch_cuda}. "
        "Each brings a runtime of its own, and the driver has to be new enough for both. Where "
        f"kernels fail to start, install dspark_ext again with an nvcc of CUDA {majors[1]} first "
        "on PATH"
    ]


def render(facts: dict[str, Any]) -> str:
    """The report as text of at most 80 columns."""
    cpu, cuda = facts["cpu"], facts["cuda"]
    lines = [
        _line("dspark_ext", f"{facts['dspark_ext']}, Python {facts['python']}"),
        _line("torch", facts["torch"]),
        _line("compiler", facts["compiler"]),
        _line("CPU", f"{cpu['model']}, {_count(cpu['cores'], 'core')}"),
        _line("CPU levels", _levels_text(cpu)),
        _line("threads", f"{cpu['threads']} (torch.get_num_threads())"),
        _line("huge pages", _huge_pages_text(cpu["huge_pages"])),
        _line("OpenMP", _openmp_text(facts["openmp"])),
        _line("CUDA kernels", _cuda_kernels_text(cuda["architectures"], cuda["toolkit"])),
        _line("GPU", _gpu_text(cuda)),
        *_choice_lines(facts["auto"]),
        *_trainer_lines(facts["trainers"]),
        *(_line("WARNING", text) for text in facts["warnings"]),
        "",
        "environment",
    ]
    for name, value in facts["environment"].items():
        text = f"{'not set' if value is None else value} ({_VARIABLES[name]})"
        lines.append(_line(f"  {name}", text, 26))
    return "\n".join(lines)


def _cpu_level() -> tuple[Optional[str], Optional[str]]:
    """The level that the kernels run at, or why none does."""
    try:
        return _C.cpu_level(), None
    except ValueError as error:
        return None, str(error)


def _choice(device: torch.device) -> dict[str, str]:
    """What ``impl="auto"`` picks for a device, and why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = _backend.uses_kernel("auto", device)
    implementation = "compiled kernel" if kernel else "chunked PyTorch path"
    return {"implementation": implementation, "because": _reason(device, kernel)}


def _reason(device: torch.device, kernel: bool) -> str:
    if device.type == "cpu":
        return "every CPU can run it"
    if _backend.cuda_architectures() is None:
        return "this build has no CUDA kernels"
    if device.index is None:
        return "built, and no GPU is visible; float64 takes the chunked PyTorch path"
    major, minor = torch.cuda.get_device_capability(device)
    has = f"compute capability {major}.{minor}"
    if not kernel:
        return f"{has} is older than every architecture of the build"
    path = "row-resident and portable kernels" if major >= 9 else "portable kernels"
    return f"{has}, {path}; float64 takes the chunked PyTorch path"


def _choice_lines(auto: dict[str, dict[str, str]]) -> list[str]:
    texts = [
        f"on {name}: {choice['implementation']} ({choice['because']})"
        for name, choice in auto.items()
    ]
    return [_line("" if i else 'impl="auto"', text) for i, text in enumerate(texts)]


def _levels_text(cpu: dict[str, Any]) -> str:
    available = ", ".join(cpu["levels"])
    return cpu["error"] or f"{available}; this process uses {cpu['level']}"


def _huge_pages_text(mode: Optional[str]) -> str:
    if mode is None:
        return "unknown here"
    return mode + (": fresh gradients are built of 4 KiB pages, slower" if mode == "never" else "")


def _openmp_text(openmp: dict[str, Any]) -> str:
    built = "built with OpenMP" if openmp["built"] else "built without OpenMP: one thread"
    runtimes = openmp["runtimes"]
    if runtimes is None:
        return f"{built}; the loaded runtimes cannot be listed here"
    names = ", ".join(_short(path) for path in runtimes)
    if len(runtimes) == 1:
        return f"{built}; one runtime loaded: {names}"
    if not runtimes:
        return f"{built}; no runtime loaded"
    return (
        f"{built}; {len(runtimes)} runtimes loaded, whose threads compete: {names}. "
        "Import torch before anything else that uses OpenMP"
    )


def _cuda_kernels_text(architectures: Optional[list[str]], toolkit: Optional[str]) -> str:
    if architectures is None:
        return "not built (no nvcc at build time, or DSPARK_CUDA=off)"
    with_toolkit = "" if toolkit is None else f" with CUDA toolkit {toolkit}"
    return f"built for {', '.join(architectures)}{with_toolkit}"


def _gpu_text(cuda: dict[str, Any]) -> str:
    if cuda["devices"]:
        return ", ".join(cuda["devices"])
    if cuda["torch_cuda"] is None:
        return "not visible: this torch is a build without CUDA"
    return f"not visible (torch is built for CUDA {cuda['torch_cuda']})"


def _trainer_lines(trainers: list[dict[str, Any]]) -> list[str]:
    """The installed trainers, those that can be patched first."""
    if not trainers:
        return [_line("trainers", "none of those that dspark_ext.integrations knows")]
    texts = []
    for trainer in sorted(trainers, key=lambda trainer: trainer["problem"] is not None):
        name, problem = trainer["name"], trainer["problem"]
        if problem is None:
            version = f"{name} {trainer['version']}" if trainer["version"] else name
            texts.append(f'{version}: integrations.patch("{name}")')
        else:
            texts.append(f"not {name}: {problem}")
    return [_line("" if i else "trainers", text) for i, text in enumerate(texts)]


def _short(path: str) -> str:
    """A library's path from its installed package on."""
    return re.sub(r"^.*/(?:site|dist)-packages/", "", path)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _line(label: str, text: str, indent: int = 14) -> str:
    """``label  text``, wrapped under the text's first column."""
    return textwrap.fill(
        str(text),
        WIDTH,
        initial_indent=label.ljust(indent - 1) + " ",
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
