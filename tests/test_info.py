"""``python -m dspark_ext info``: what runs on which device, and why."""

from __future__ import annotations

import json
from typing import Optional

import pytest
import torch

from dspark_ext import _backend, info
from dspark_ext.__main__ import main


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    return " ".join(text.split())


@pytest.fixture
def gpu(monkeypatch):
    """One GPU of a compute capability, in the eyes of ``info``."""

    def pretend(major: int, minor: int, architectures: Optional[str]) -> None:
        _backend._supported.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Pretence")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(_backend, "cuda_architectures", lambda: architectures)

    yield pretend
    _backend._supported.cache_clear()


@pytest.mark.parametrize(
    ("capability", "architectures", "implementation", "because"),
    [
        ((9, 0), "80-real 90", "compiled kernel", "compute capability 9.0, row-resident"),
        ((8, 6), "80-real 90", "compiled kernel", "compute capability 8.6, portable kernels"),
        ((7, 5), "80-real 90", "chunked PyTorch path", "capability 7.5 is older than every"),
        ((9, 0), None, "chunked PyTorch path", "this build has no CUDA kernels"),
    ],
)
def test_each_gpu_has_its_implementation_and_the_reason(
    capability, architectures, implementation, because, gpu, capsys
):
    gpu(*capability, architectures)
    choice = info.choices()["cuda:0"]
    assert choice["implementation"] == implementation
    assert because in choice["because"]
    assert f"on cuda:0: {implementation} (" in printed(capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_cuda_stands_for_what_one_would_get(capsys, monkeypatch):
    monkeypatch.setattr(_backend, "cuda_architectures", lambda: "80-real 90")
    text = printed(capsys)
    assert "on cpu: compiled kernel (every CPU can run it)" in text
    assert "on cuda: compiled kernel (built, and no GPU is visible" in text


@pytest.mark.parametrize(
    ("toolkit", "torch_cuda", "warns"),
    [
        ("12.8.93", "13.0", True),
        ("13.0.48", "12.8", True),
        ("12.8.93", "12.4", False),
        ("12.8.93", None, False),
        (None, "13.0", False),
    ],
)
def test_toolkits_of_two_major_versions_are_warned_about(
    toolkit, torch_cuda, warns, capsys, monkeypatch
):
    monkeypatch.setattr(info._C, "cuda_toolkit", toolkit)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    text = printed(capsys)
    assert ("WARNING" in text) is warns
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cuda"]["toolkit"] == toolkit
    assert len(facts["warnings"]) == warns
    if warns:
        assert f"toolkit {toolkit}, and torch with CUDA {torch_cuda}" in text
        assert f"an nvcc of CUDA {torch_cuda.split('.')[0]} first" in text
