"""The compiled module stands alone: one build serves every torch, with or without a GPU driver."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import TESTS

from dspark_ext import _C

MODULE = _C.__file__
CSRC = TESTS.parent / "csrc"
# libgomp-<hash> is a copy that a wheel tool bundled; libpython ties a module to one interpreter.
FOREIGN = re.compile(r"libtorch|libc10|libcudart|libcuda\.|libpython|libgomp-", re.IGNORECASE)


def output_of(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    command = [tool, *arguments, MODULE]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_module_links_neither_torch_nor_cuda():
    linked = output_of("ldd")
    assert "libstdc++" in linked
    assert not FOREIGN.search(linked), linked


def test_the_module_needs_no_symbol_of_torch_or_the_cuda_driver():
    undefined = output_of("nm", "-D", "--undefined-only", "--demangle")
    assert "Py" in undefined
    foreign = re.findall(r"^.*\b(?:c10::|at::|torch|THP|cuda[A-Z]|cu[A-Z]\w+).*$", undefined, re.M)
    assert not foreign, foreign


def test_the_module_exports_its_entry_point_alone():
    # Weak symbols (V, W, u) are the standard library's templates and an enum's type information.
    defined = (line.split()[-2:] for line in output_of("nm", "-D", "--defined-only").splitlines())
    assert {name for kind, name in defined if kind in "TBDR"} == {"PyInit__C"}


@pytest.mark.skipif(not CSRC.is_dir(), reason="no source tree beside the tests")
def test_no_source_includes_torch_and_no_kernel_includes_python():
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert len(sources) > 5
    for path in sources:
        included = re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)", path.read_text(), re.M)
        foreign = [name for name in included if re.match(r"(torch|ATen|c10)/", name)]
        if not path.name.startswith("bindings"):
            foreign += [name for name in included if re.match(r"(pybind11/|Python\.h)", name)]
        assert not foreign, f"{path.relative_to(CSRC)} includes {foreign}"


def test_importing_loads_no_second_openmp_runtime():
    mapped = Path("/proc/self/maps")
    if not mapped.exists() or not _C.openmp:
        pytest.skip("needs /proc and OpenMP")
    runtimes = {line.split()[-1] for line in mapped.read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) <= 1, runtimes
