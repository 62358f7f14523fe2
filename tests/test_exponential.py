"""The exponential of every kernel, over the float32 arguments it meets.

``sweep`` compares it with float64 at every float32 in [-87.3, -2^-12], about 155 million of them,
and at one in 64 of those nearer to zero, where the result is 1 minus almost nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import run_json
from torch import Tensor

from dspark_ext import _C

LEVELS = _C.cpu_available_levels().split()
# Measured over the sweep, rounded up; the contract is 2.
MAX_ULP = {"avx2": 1.27, "baseline": 1.30}
CHUNK = 1 << 21


def exponential(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _C.cpu_exponential(x.data_ptr(), y.data_ptr(), x.numel())
    return y


def bits(x: float) -> int:
    """The bit pattern of ``-x``, which counts the floats between 0 and x."""
    return int(torch.tensor(-x, dtype=torch.float32).view(torch.int32))


def worst_error(x: Tensor) -> tuple[float, float]:
    """The largest error in units of the last place of the true result, and where it is."""
    true = torch.exp(x.double())
    exponent = (true.view(torch.int64) >> 52) - 1023
    unit = (exponent - 23 + 1023 << 52).view(torch.float64)
    error = (exponential(x).double() - true).abs_().div_(unit)
    worst = int(error.argmax())
    return float(error[worst]), float(x[worst])


def sweep(low: float, high: float, step: int = 1) -> tuple[float, float]:
    """The worst error over every ``step``-th float32 between low and high, and where it is."""
    first, last = bits(high), bits(low)
    worst = (0.0, high)
    for begin in range(first, last + 1, CHUNK * step):
        end = min(begin + CHUNK * step, last + 1)
        pattern = torch.arange(begin, end, step, dtype=torch.int32)
        worst = max(worst, worst_error(-pattern.view(torch.float32)))
    return worst


@pytest.mark.parametrize("level", LEVELS)
def test_error_over_every_float32_argument(level):
    code = (
        "import json, torch; torch.set_num_threads(2)\n"
        "from test_exponential import sweep\n"
        "print(json.dumps(max(sweep(-87.3, -(2.0**-12)), sweep(-(2.0**-12), -0.0, 64))))"
    )
    error, where = run_json(code, level=level)
    assert error <= MAX_ULP[level] <= 2, f"{error:.4f} ulp at {where!r} ({where.hex()})"


@pytest.mark.parametrize("level", LEVELS)
def test_special_arguments(level):
    code = (
        "import json, torch\n"
        "from test_exponential import exponential\n"
        "x = [0.0, -0.0, -float('inf'), float('nan'), -88.5, -103.0, -1e30, -3.4e38]\n"
        "print(json.dumps(exponential(torch.tensor(x)).tolist()))"
    )
    zero, minus_zero, minus_infinity, nan, *far = run_json(code, level=level)
    assert zero == minus_zero == 1
    assert minus_infinity == 0
    assert math.isnan(nan)
    assert far == [0, 0, 0, 0]


@pytest.mark.parametrize("count", [1, 7, 8, 31, 32, 33, 100])
def test_an_argument_gives_the_same_bits_wherever_it_stands(count):
    x = -torch.linspace(0, 80, 100)
    assert torch.equal(exponential(x[-count:].clone()), exponential(x)[-count:])


def test_no_result_is_negative_or_above_one():
    x = torch.linspace(-100, 0, 1_000_001)
    y = exponential(x)
    assert (y >= 0).all() and (y <= 1).all()
