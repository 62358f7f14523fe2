"""The kernels as plain executables, without Python and without torch: right, and nothing for a
sanitizer, a fuzzer or valgrind to report. tests/native holds the programs.

DSPARK_NATIVE_BUILD names a folder to build in and to find the last builds in, instead of a
temporary one; DSPARK_NATIVE_FUZZ_SECONDS how long each fuzzer runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Callable

import pytest
from conftest import TESTS, run_python
from emulated import ROOT, emulated_cuda, run, sanitizer_environment, tool

from dspark_ext import _C

__all__ = ["emulated_cuda"]

FUZZ_SECONDS = os.environ.get("DSPARK_NATIVE_FUZZ_SECONDS", "25")
CLANG = next(filter(None, map(shutil.which, ("clang++", "clang++-14"))), None)
ARM = shutil.which("aarch64-linux-gnu-g++")
ARM_EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
NO_WARNING = "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"
NO_OPENMP = "-DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON"

Build = Callable[..., Path]

# (file of csrc, what stands there, what takes its place): faults of the kinds that are looked for.
FAULTS = {
    "a_read_past_a_row": (
        "cpu/log_softmax.h",
        "if (i < size) {\n    E padded",
        "if (i + 1 < size) {\n    E padded",
    ),
    "a_block_read_too_far": (
        "cpu/log_softmax.h",
        "for (; i + kBlock<Real> <= size; i += kBlock<Real>) f(i, x + i);",
        "for (; i + kBlock<Real> <= size + 1; i += kBlock<Real>) f(i, x + i);",
    ),
    "a_gradient_written_too_far": (
        "cpu/gradient.h",
        "static_cast<size_t>(size - i) * sizeof(E)",
        "static_cast<size_t>(size - i + 1) * sizeof(E)",
    ),
    "a_streamed_head_of_the_wrong_length": (
        "cpu/gradient.h",
        "i = head < size ? head : size;",
        "i = head;",
    ),
    "scratch_of_one_thread_for_all": (
        "cpu/weighted.h",
        "thread * weighted_scratch_bytes",
        "0 * thread * weighted_scratch_bytes",
    ),
    "an_inactive_row_that_is_read": (
        "cpu/log_softmax.h",
        "return active == nullptr || active[row] != 0;",
        "return active == nullptr || active[row] != 0 || row == 1;",
    ),
    "a_tie_with_a_sign": (
        "cpu/gradient.h",
        "select<Real>(p > q, above,",
        "select<Real>(p >= q, above,",
    ),
    "dimensions_that_do_not_join": (
        "rows.cpp",
        "if (!sizes_.empty() && strides_.back() == strides[i] * sizes[i])",
        "if (!sizes_.empty())",
    ),
}


def build_in(folder: Path, target: str, sanitize: str, *settings: str, source: Path = ROOT) -> Path:
    """The compiled program of one target of tests/native/CMakeLists.txt."""
    tools = {name: tool(name) for name in ("cmake", "ninja")}
    configure = [tools["cmake"], "-G", "Ninja", "-S", source, "-B", folder]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-DDSPARK_CUDA=off", "-DDSPARK_NATIVE_TESTS=ON"]
    run(*configure, f"-DDSPARK_NATIVE_SANITIZE={sanitize}", *settings)
    run(tools["cmake"], "--build", folder, "--target", target)
    return folder / "tests" / "native" / target


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    kept = os.environ.get("DSPARK_NATIVE_BUILD")
    parent = Path(kept).absolute() if kept else tmp_path_factory.mktemp("native")

    def build(name: str, target: str, sanitize: str, *settings: str) -> Path:
        return build_in(parent / name, target, sanitize, *settings)

    return build


def execute(*command: object) -> tuple[int, str]:
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",  # threads that spin take the time of those that compute
        "ASAN_OPTIONS": "detect_stack_use_after_return=0",
    }
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout[-8000:] + done.stderr[-8000:]


def assert_clean(*command: object) -> str:
    code, printed = execute(*command)
    assert code == 0, printed
    return printed


def assert_all_right(*command: object) -> None:
    printed = assert_clean(*command)
    (runs,) = re.findall(r"^(\d+) runs, 0 failures$", printed, re.MULTILINE)
    assert int(runs) > 0


def test_rows_refuse_what_they_cannot_describe(emulated_cuda):
    """Python never asks for it; whoever else calls the kernels is told."""
    with pytest.raises(ValueError, match="one stride per leading dimension"):
        _C.Rows(0, _C.DType.float32, [2, 3], [8], 8)
    dtype = emulated_cuda.DType

    def launch(sizes: list[int], strides: list[int]) -> None:
        rows = emulated_cuda.Rows(64, dtype.float32, sizes, strides, 8)
        emulated_cuda.cuda_log_softmax(rows, rows, 0, 0, 64, 0, 64, 0, 0)

    with pytest.raises(ValueError, match="more than 6 independent leading strides"):
        launch([2] * 7, [9 * 4**i for i in range(7)])
    with pytest.raises(ValueError, match="2147483648 rows; a device kernel takes at most"):
        launch([2**31], [0])


def test_device_kernels_refuse_dtypes_that_they_do_not_have(emulated_cuda):
    dtype = emulated_cuda.DType
    wide = emulated_cuda.Rows(64, dtype.float64, [1], [8], 8)
    with pytest.raises(ValueError, match="float64 logits have no CUDA kernel"):
        emulated_cuda.cuda_l1_distance(wide, wide, 0, 64, 64, 64, 64, 64, 0, 0)
    with pytest.raises(ValueError, match="expected float32 or float64"):
        emulated_cuda.cuda_ordered_sum(64, 64, dtype.bfloat16, 1, 1, 0, 0)


def test_the_cpu_kernels_are_right_and_clean_on_memory_of_exact_size(build):
    assert_all_right(build("sanitized", "native_grid", "address,undefined"), "fast")


@pytest.mark.slow
def test_the_cpu_kernels_are_right_and_clean_on_the_whole_grid(build):
    assert_all_right(build("sanitized", "native_grid", "address,undefined"), "full")


@pytest.mark.slow
def test_threads_do_not_race(build):
    """Not even for what is read beyond a chunk and never used."""
    assert_all_right(build("threads", "native_grid", "thread"), "threads")


@pytest.mark.slow
def test_valgrind_has_nothing_to_report(build):
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    program = build("plain", "native_grid", "")
    # Results and scratch count as uninitialised until a kernel has written them.
    assert_all_right("valgrind", "--quiet", "--error-exitcode=9", program, "small")


@pytest.mark.slow
def test_the_cpu_kernels_are_right_on_an_arm_processor(build):
    if ARM is None or ARM_EMULATOR is None:
        pytest.skip("aarch64-linux-gnu-g++ or qemu-aarch64 is not installed")
    settings = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    # CMake does not look for this interpreter's headers when it builds for another processor.
    settings += [f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}"]
    program = build("arm", "native_grid", "", f"-DCMAKE_CXX_COMPILER={ARM}", NO_WARNING, *settings)
    command = [ARM, "-print-file-name=libc.so.6"]
    library = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    assert_all_right(ARM_EMULATOR, "-L", library.resolve().parent.parent, program, "fast")


@pytest.mark.slow
def test_the_cpu_kernels_are_right_and_clean_compiled_by_clang(build):
    if CLANG is None:
        pytest.skip("clang++ is not installed")
    compiler = f"-DCMAKE_CXX_COMPILER={CLANG}"
    build("clang_module", "_C", "", compiler, NO_WARNING)
    program = build("clang", "native_grid", "address,undefined", compiler, NO_WARNING)
    assert_all_right(program, "fast")


@pytest.mark.slow
def test_the_cpu_kernels_are_right_and_clean_without_openmp(build):
    build("serial_module", "_C", "", NO_OPENMP, NO_WARNING)
    program = build("serial", "native_grid", "address,undefined", NO_OPENMP, NO_WARNING)
    assert_all_right(program, "fast")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["small", "fast"])
def test_the_emulated_cuda_kernels_are_right_and_clean_on_memory_of_exact_size(build, part):
    assert_all_right(build("sanitized", "native_device_grid", "address,undefined"), part)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["native_random", "native_device_random"])
def test_random_inputs_find_nothing(build, target):
    assert_clean(build("sanitized", target, "address,undefined"), FUZZ_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["native_fuzz", "native_device_fuzz"])
def test_a_coverage_guided_fuzzer_finds_nothing(build, target, tmp_path):
    if CLANG is None:
        pytest.skip("clang++, whose libFuzzer this takes, is not installed")
    program = build("fuzz", target, "address,undefined", f"-DCMAKE_CXX_COMPILER={CLANG}")
    options = [f"-max_total_time={FUZZ_SECONDS}", "-len_control=0", "-max_len=400", "-timeout=120"]
    options += ["-rss_limit_mb=4096", "-print_final_stats=1", f"-artifact_prefix={tmp_path}/"]
    printed = assert_clean(program, *options)
    assert int(re.findall(r"number_of_executed_units: (\d+)", printed)[0]) > 10


@pytest.mark.slow
def test_the_cuda_kernels_tests_are_clean_under_the_sanitizers():
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    arguments += [str(TESTS / "test_cuda_kernels.py")]
    chosen = "emulated and not large and not 49152 and not 151936 and not mutat"
    chosen += " and not brought_into_order"  # thousands of rows, minutes each
    printed = run_python(*arguments, "-k", chosen, timeout=3000, **sanitizer_environment())
    assert " passed" in printed and "failed" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernels_does_not_pass(fault, tmp_path):
    file, right, wrong = FAULTS[fault]
    for part in ("csrc", "tests/native", "tests/emulation"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    path = tmp_path / "csrc" / file
    text = path.read_text()
    assert text.count(right) == 1, f"{file} does not hold {right!r} once"
    path.write_text(text.replace(right, wrong))
    program = build_in(tmp_path / "build", "native_grid", "address,undefined", source=tmp_path)
    code, printed = execute(program, "fast")
    assert code != 0, printed
