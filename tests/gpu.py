"""The two places where the CUDA kernels run: a GPU, and the emulator of tests/emulation.

A test that takes the fixture ``gpu`` runs in both, the GPU's variant under the marker ``cuda`` and
skipped where there is none. In the emulator, tensors stay on the host, and dspark_ext._backend is
made to take them for a device's: it hands the addresses to the kernels that were compiled for the
host. Everything above the kernels is the package's own.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, Optional

import pytest
import torch
from emulated import load
from torch import Tensor

from dspark_ext import _backend


@dataclasses.dataclass
class Gpu:
    """``emulator`` is None on a GPU."""

    device: torch.device
    emulator: Optional[ModuleType]

    @property
    def is_emulated(self) -> bool:
        return self.emulator is not None

    def plan(
        self, draft: Tensor, target: Optional[Tensor], gradient: Optional[Tensor] = None
    ) -> tuple[int, int, int]:
        """Cluster, units and shared memory of the row-resident path; a cluster of 0 without it."""
        rows = (None if x is None else _backend._rows(x) for x in (draft, target, gradient))
        return _backend._C.cuda_resident_plan(*rows, _backend._where(draft)[0])


class _EmulatedModule:
    """``_C`` whose device kernels are the emulated ones, over buffers that it was shown."""

    def __init__(self, emulator: ModuleType, host: Any) -> None:
        self._emulator, self._host = emulator, host

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._emulator, name):
            return getattr(self._host, name)
        function = getattr(self._emulator, name)
        if not name.startswith("cuda_") or name in ("cuda_scratch_bytes", "cuda_resident_plan"):
            return function

        def launch(*arguments: Any) -> None:
            try:
                function(*arguments)
            finally:
                self._emulator.forget()

        return launch


def _span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    elements = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return elements * tensor.element_size() if tensor.numel() else 0


def emulate(emulator: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Has the package run its device path in the emulator, on tensors of the host."""
    address_of = _backend._address

    def address(tensor: Optional[Tensor]) -> int:
        value = address_of(tensor)
        if tensor is not None and value != 0:
            emulator.allow(value, _span(tensor), True, f"a {tuple(tensor.shape)} {tensor.dtype}")
        return value

    patch.setattr(_backend, "_C", _EmulatedModule(emulator, _backend._C))
    patch.setattr(
        _backend,
        "DTYPES",
        {
            dtype: getattr(emulator.DType, str(dtype).removeprefix("torch."))
            for dtype in _backend.DTYPES
        },
    )
    patch.setattr(_backend, "_address", address)
    patch.setattr(_backend, "on_host", lambda tensor: False)
    patch.setattr(_backend, "_where", lambda tensor: (0, 0))


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def gpu(request, monkeypatch, tmp_path_factory):
    """Where the CUDA kernels run. What a kernel does not write is NaN in both places."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU that torch can use")
        if not _backend.has_kernels(torch.device("cuda")):
            pytest.skip("this build has no CUDA kernels for the GPU")
        place = Gpu(torch.device("cuda"), None)
    else:
        emulator = load("emulated_cuda", tmp_path_factory)
        emulate(emulator, monkeypatch)
        place = Gpu(torch.device("cpu"), emulator)
    # With deterministic algorithms torch fills fresh memory with NaN.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield place
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def emulator(gpu) -> ModuleType:
    """The emulator alone, for what no GPU can be asked."""
    if gpu.emulator is None:
        pytest.skip("counts and schedules are the emulator's")
    return gpu.emulator
