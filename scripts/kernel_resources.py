"""What each CUDA kernel takes of a multiprocessor, as the compiler reports it.

``python scripts/kernel_resources.py [--arch 90 ...] [FILE ...]`` compiles csrc/cuda/*.cu with nvcc
for each architecture and prints registers, spills and blocks per multiprocessor of every kernel
instance. No GPU is needed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

from tabulate import tabulate

CUDA = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
ARCHITECTURES = (80, 90, 100)
# Files whose kernels need more than the oldest architecture has.
FIRST_ARCHITECTURE = {"resident.cu": 90}

REGISTERS = 65536  # of a multiprocessor, on every architecture above
REGISTERS_AT_ONCE = 256  # a warp gets them in such portions
WARP = 32
MAX_WARPS = 64
MAX_BLOCKS = 32


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instance of a kernel on one architecture.

    Attributes:
        threads: of a block, from the kernel's launch bounds.
        wanted_blocks: on a multiprocessor, from the launch bounds; None where they name none.
        spilled_bytes: written to local memory for want of registers.
    """

    file: str
    name: str
    architecture: int
    threads: int
    wanted_blocks: Optional[int]
    registers: int
    spilled_bytes: int
    stack_bytes: int

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor's registers and warps have room for at once."""
        per_warp = -(-self.registers * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        warps = -(-self.threads // WARP)
        return min(min(REGISTERS // per_warp, MAX_WARPS) // warps, MAX_BLOCKS)


def compile_kernels(file: Path, architecture: int) -> list[Kernel]:
    """The kernels of one file on one architecture.

    Raises:
        RuntimeError: nvcc does not accept the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-std=c++17", "--fmad=false", "-cubin", f"-arch=sm_{architecture}"]
        command += ["-I", str(CUDA / "hardware"), "-Xptxas", "-v", "-keep", "-keep-dir", folder]
        command += [str(file), "-o", str(Path(folder) / "out.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        (ptx,) = Path(folder).glob("*.ptx")
        bounds = launch_bounds(ptx.read_text())
    kernels = []
    for report in re.split(r"Compiling entry function ", done.stderr)[1:]:
        symbol = re.match(r"'(\w+)'", report)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
        registers = re.search(r"Used (\d+) registers", report)
        assert symbol and stack and registers, report
        threads, wanted = bounds[symbol.group(1)]
        kernels.append(
            Kernel(
                file.name,
                readable(symbol.group(1)),
                architecture,
                threads,
                wanted,
                int(registers.group(1)),
                int(stack.group(2)),
                int(stack.group(1)),
            )
        )
    return kernels


def launch_bounds(ptx: str) -> dict[str, tuple[int, Optional[int]]]:
    """Threads of a block and wanted blocks of each kernel, by its symbol."""
    bounds = {}
    for entry in re.split(r"\.entry ", ptx)[1:]:
        head = entry.split("{")[0]
        symbol = re.match(r"\w+", head)
        threads = re.search(r"\.maxntid (\d+)", head)
        wanted = re.search(r"\.minnctapersm (\d+)", head)
        assert symbol and threads, f"a kernel without launch bounds: {head[:200]}"
        bounds[symbol.group()] = (int(threads.group(1)), int(wanted.group(1)) if wanted else None)
    return bounds


def readable(symbol: str) -> str:
    """A kernel's name with its template arguments, without namespaces and parameters."""
    filter_ = shutil.which("cu++filt") or shutil.which("c++filt")
    if filter_ is None:
        return symbol
    text = subprocess.run([filter_, symbol], capture_output=True, text=True).stdout.strip()
    scopes = r"\(anonymous namespace\)::|<unnamed>::|dspark::cuda::|_GLOBAL__N__\w+::"
    text = re.sub(scopes, "", text)
    text = re.sub(r"^void |\(.*\)$|\((?:bool|int)\)", "", text)
    return text.replace("_kernel", "")


def survey(files: list[Path], architectures: list[int]) -> list[Kernel]:
    """Every kernel of these files on those of the architectures that it is built for."""
    jobs = [
        (file, architecture)
        for file in files
        for architecture in architectures
        if architecture >= FIRST_ARCHITECTURE.get(file.name, 0)
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda job: compile_kernels(*job), jobs)
        return [kernel for kernels in found for kernel in kernels]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: all of csrc/cuda")
    parser.add_argument("--arch", nargs="+", type=int, default=list(ARCHITECTURES))
    args = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("nvcc is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    kernels = survey(args.files or sorted(CUDA.glob("*.cu")), args.arch)
    rows = [
        (k.name, f"sm_{k.architecture}", k.threads, k.registers, k.spilled_bytes, k.blocks)
        for k in kernels
    ]
    headers = ("kernel", "", "threads", "registers", "spilled", "blocks")
    print(tabulate(rows, headers=headers))
    spilled = sum(k.spilled_bytes > 0 for k in kernels)
    print(f"{len(kernels)} kernels, {spilled} with spills")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
