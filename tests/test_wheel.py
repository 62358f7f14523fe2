"""The compiled module stands alone: one build serves every torch, with or without a GPU driver."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TESTS
from emulated import tool

from dspark_ext import _C

MODULE = _C.__file__
CSRC = TESTS.parent / "csrc"
# libgomp-<hash> is a copy that a wheel tool bundled; libpython ties a module to one interpreter.
FOREIGN = re.compile(r"libtorch|libc10|libcudart|libcuda\.|libpython|libgomp-", re.IGNORECASE)


def output_of(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    command = [name, *arguments, MODULE]
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


@pytest.mark.skipif(not CSRC.is_dir(), reason="no source tree beside the tests")
def test_no_kernel_adds_in_the_order_in_which_threads_arrive():
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert any(path.suffix == ".cu" for path in sources)
    unordered = re.compile(r"atomic|\b(?:atom|red)\.|\breduction\s*\(", re.IGNORECASE)
    for path in sources:
        assert not unordered.search(path.read_text()), path.relative_to(CSRC)


def configured(folder: Path, choice: str) -> subprocess.CompletedProcess[str]:
    """CMake's answer to one DSPARK_CUDA on a machine without nvcc."""
    command = [tool("cmake"), "-G", "Ninja", "-S", str(CSRC.parent), "-B", str(folder)]
    command += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = {**os.environ, "CUDACXX": str(folder / "no_nvcc")}
    return subprocess.run(
        [*command, f"-DDSPARK_CUDA={choice}"], capture_output=True, text=True, env=environment
    )


@pytest.mark.skipif(not CSRC.is_dir(), reason="no source tree beside the tests")
@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("on", "DSPARK_CUDA=on, but no working nvcc was found: put it on PATH, set CUDACXX"),
        ("maybe", "DSPARK_CUDA is 'maybe'; expected auto, on or off."),
    ],
)
def test_a_build_that_cannot_be_had_is_refused_in_one_sentence(choice, words, tmp_path):
    done = configured(tmp_path, choice)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split()), done.stderr


@pytest.mark.skipif(not CSRC.is_dir(), reason="no source tree beside the tests")
def test_without_nvcc_a_build_is_for_the_cpu_and_for_every_cpu(tmp_path):
    done = configured(tmp_path, "auto")
    assert done.returncode == 0, done.stderr
    assert "dspark_ext: CUDA kernels OFF (DSPARK_CUDA=auto)" in done.stdout
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    ours = [c["command"] for c in commands if Path(c["file"]).is_relative_to(CSRC)]
    assert len(ours) >= 5 and not any(".cu" in c["file"] for c in commands)
    for command in ours:
        assert "-ffp-contract=off" in command and "-fvisibility=hidden" in command
        assert not re.search(r"-march=native|-ffast-math|-Ofast|-funsafe", command)
        wide = "DSPARK_LEVEL=avx2" in command
        assert wide or not re.search(r"-m(avx|fma|f16c|sse4|arch)", command)


def test_importing_loads_no_second_openmp_runtime():
    mapped = Path("/proc/self/maps")
    if not mapped.exists() or not _C.openmp:
        pytest.skip("needs /proc and OpenMP")
    runtimes = {line.split()[-1] for line in mapped.read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) <= 1, runtimes
