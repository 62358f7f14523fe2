"""What the CUDA compiler says of the kernels: no GPU is needed, nvcc is."""

from __future__ import annotations

import shutil
import sys
from types import ModuleType

import pytest
from conftest import load_file
from emulated import ROOT

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


@pytest.fixture(scope="module")
def resources() -> ModuleType:
    return load_file(ROOT / "scripts" / "kernel_resources.py")


@pytest.mark.parametrize(
    "architecture",
    [80, 90, pytest.param(100, marks=pytest.mark.slow)],
)
def test_no_kernel_spills_and_as_many_blocks_fit_as_its_design_says(resources, architecture):
    files = sorted(resources.CUDA.glob("*.cu"))
    kernels = resources.survey(files, [architecture])
    names = {kernel.name.split("<")[0] for kernel in kernels}
    assert {"statistics", "distance", "gradient", "scale", "ordered_sum"} <= names
    assert ("resident" in names) == (architecture >= 90)
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.blocks >= max(kernel.wanted_blocks or 1, 2), kernel
        if kernel.name.startswith("resident"):
            assert (kernel.threads, kernel.wanted_blocks, kernel.blocks) == (192, 2, 2), kernel


def test_the_report_names_every_kernel_and_fits_eighty_columns(resources, capsys, monkeypatch):
    path = resources.CUDA / "scale.cu"
    monkeypatch.setattr(sys, "argv", ["kernel_resources.py", str(path), "--arch", "80"])
    assert resources.main() == 0
    printed = capsys.readouterr().out
    for name in ("scale<BFloat16>", "scale<Half>", "scale<float>"):
        assert name in printed
    assert "3 kernels, 0 with spills" in printed
    assert max(map(len, printed.splitlines())) <= 80
