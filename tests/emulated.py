"""The modules of tests/emulation, built once: CUDA kernels that run on the host.

DSPARK_EMULATION_BUILD names a folder to build in and to find the last build in, instead of a
temporary one. With DSPARK_EMULATION_SANITIZE=1 the modules are built with address and undefined
sanitizers, and the interpreter has to be started with their runtimes: `sanitizer_environment`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Dict

import pytest

ROOT = Path(__file__).parent.parent
SANITIZE = os.environ.get("DSPARK_EMULATION_SANITIZE") == "1"
MAX_CLUSTERS = 3  # fewer than rows in almost every test, so that each cluster takes several

_loaded: Dict[str, ModuleType] = {}


def build(target: str, folder: Path) -> Path:
    """The compiled module of one target of tests/emulation/CMakeLists.txt."""
    tools = {name: tool(name) for name in ("cmake", "ninja")}
    configure = [tools["cmake"], "-G", "Ninja", "-S", ROOT, "-B", folder]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-DDSPARK_CUDA=off", "-DDSPARK_EMULATION=ON"]
    configure += [f"-DDSPARK_EMULATION_SANITIZE={'ON' if SANITIZE else 'OFF'}"]
    run(*configure)
    run(tools["cmake"], "--build", folder, "--target", target)
    (module,) = (folder / "tests" / "emulation").glob(f"{target}.*.so")
    return module


def tool(name: str) -> str:
    """A program of the environment that runs the tests, else of the machine."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed; the `test` extra holds it")
    return found


def run(*command: object) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}")


def load(target: str, temporary: pytest.TempPathFactory) -> ModuleType:
    """The module, built by the first call, with all of its settings at their defaults."""
    if target not in _loaded:
        name = "emulation_sanitized" if SANITIZE else "emulation"
        kept = os.environ.get("DSPARK_EMULATION_BUILD")
        parent = Path(kept).absolute() if kept else temporary.getbasetemp()
        spec = importlib.util.spec_from_file_location(target, build(target, parent / name))
        assert spec is not None and spec.loader is not None
        _loaded[target] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_loaded[target])
    module = _loaded[target]
    module.forget()
    module.skip([])
    module.set_device()
    module.set_max_clusters(MAX_CLUSTERS)
    module.set_seed(0)
    module.reset_counters()
    return module


def sanitizer_environment() -> Dict[str, str]:
    """What an interpreter needs that imports sanitized modules."""
    libraries = []
    for library in ("libasan.so", "libstdc++.so"):
        command = [os.environ.get("CXX", "c++"), f"-print-file-name={library}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(found):
            pytest.skip(f"the compiler has no {library}")
        libraries.append(found)
    return {
        "DSPARK_EMULATION_SANITIZE": "1",
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    }


@pytest.fixture
def emulated_cuda(tmp_path_factory) -> ModuleType:
    """The CUDA part of _C over the emulator."""
    return load("emulated_cuda", tmp_path_factory)


@pytest.fixture
def emulated_selftest(tmp_path_factory) -> ModuleType:
    """Kernels that test the emulator."""
    return load("emulated_selftest", tmp_path_factory)
