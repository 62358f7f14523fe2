"""What every test shares: tolerances, comparison with the oracle, fresh processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Optional

import pytest
import torch

TESTS = Path(__file__).parent


class Tolerance(NamedTuple):
    """Against float64 mathematics of the same inputs, by the draft's dtype."""

    ce: float  # relative, where ce >= 1e-3
    small_ce: float  # relative, where ce < 1e-3
    l1: float  # absolute
    gradient: float  # relative L2 error
    sums: float  # relative and absolute, of losses and diagnostics


# fp32 arithmetic for the first three; a gradient's dtype adds its one rounding.
TOLERANCES = {
    torch.float32: Tolerance(ce=2e-6, small_ce=1e-5, l1=2e-6, gradient=5e-6, sums=5e-6),
    torch.bfloat16: Tolerance(ce=2e-6, small_ce=1e-5, l1=2e-6, gradient=4e-3, sums=5e-6),
    torch.float16: Tolerance(ce=2e-6, small_ce=1e-5, l1=2e-6, gradient=5e-4, sums=5e-6),
    torch.float64: Tolerance(ce=1e-12, small_ce=1e-12, l1=1e-13, gradient=1e-12, sums=1e-12),
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 error over the expected norm; 0 where both are zeros."""
    error = (actual.double() - expected.double()).norm()
    return float(error / expected.double().norm()) if error > 0 else float(error)


def run_python(
    *arguments: str, level: Optional[str] = None, timeout: float = 300, **environment: str
) -> str:
    """Standard output of a fresh interpreter that can import the tests' own modules."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **environment}
    if level is not None:
        env["DSPARK_EXT_CPU_LEVEL"] = level
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=env
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(arguments)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def run_json(code: str, *arguments: Any, **keywords: Any) -> Any:
    """What a fresh interpreter printed as JSON on its last line; arguments reach it as JSON."""
    printed = run_python("-c", code, *map(json.dumps, arguments), **keywords)
    return json.loads(printed.splitlines()[-1])


def load_file(path: Path) -> ModuleType:
    """A script or an example as a module of its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, for small inputs and busy machines; tests about threads set their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["kernel", "torch"])
def impl(request) -> str:
    return request.param
