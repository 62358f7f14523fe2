"""What only a GPU can show: streams, devices, graphs, host synchronisation."""

from __future__ import annotations

import threading
from typing import Any, Callable

import pytest
import torch
from accuracy import OPS, bf16, f16, f32
from inputs import OBJECTIVE, name_of, normal, outputs
from torch import Tensor

import dspark_ext
from dspark_ext import DSparkForwardOutput, _backend, compute_dspark_loss

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU that torch can use"),
]

# Row-resident, and portable.
SHAPES = ((2, 3, 4, 4096), (2, 3, 4, 4097))


def problem(
    shape: tuple[int, int, int, int], dtype: torch.dtype = bf16, device: Any = "cuda", seed: int = 7
) -> DSparkForwardOutput:
    made = outputs(seed, shape, dtype)
    for name, value in vars(made).items():
        setattr(made, name, value.detach().to(device).requires_grad_(value.requires_grad))
    return made


def step(made: DSparkForwardOutput, **changes: Any) -> list[Tensor]:
    """One training step: the loss, every term, and the gradients."""
    loss, terms = compute_dspark_loss(
        outputs=made, return_terms=True, **{**OBJECTIVE, "impl": "kernel", **changes}
    )
    made.draft_logits.grad = made.confidence_pred.grad = None
    loss.backward()
    return [loss.detach(), *terms.values(), made.draft_logits.grad, made.confidence_pred.grad]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(actual, expected):
        assert torch.equal(x.cpu(), y.cpu())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16, f16], ids=name_of)
def test_the_device_agrees_with_the_host(shape, dtype):
    on_device = step(problem(shape, dtype), impl="kernel")
    for x, y in zip(on_device, step(problem(shape, dtype, "cpu"))):
        rtol = {f32: 2e-5, bf16: 1e-2, f16: 2e-3}[y.dtype] if y.dim() > 2 else 2e-5
        torch.testing.assert_close(x.cpu(), y, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_side_stream_is_the_one_that_is_used(shape):
    expected = step(problem(shape))
    made = problem(shape)
    noise = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # What follows is right only if it runs behind these.
        for _ in range(20):
            noise.fill_(1)
        values = [x.detach().clone() for x in vars(made).values()]
        for x in vars(made).values():
            x.detach().zero_()
        for _ in range(20):
            noise.fill_(2)
        for x, value in zip(vars(made).values(), values):
            x.detach().copy_(value)
        actual = step(made)
    stream.synchronize()
    assert_same_bits(actual, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_on_another_device_than_the_current_one(shape):
    expected = step(problem(shape))
    with torch.cuda.device(0):
        assert_same_bits(step(problem(shape, device="cuda:1")), expected)
        assert torch.cuda.current_device() == 0


@pytest.fixture
def no_synchronisation():
    """The host may not wait for the device in here."""

    def guarded(run: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guarded


@pytest.mark.parametrize("inplace_grad", [False, True])
@pytest.mark.parametrize("dtype", [f32, bf16, f16], ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_never_waits_for_the_device(no_synchronisation, shape, dtype, inplace_grad):
    made = problem(shape, dtype)
    leaf = made.draft_logits

    def run() -> Tensor:
        made.draft_logits = leaf * 1
        loss, terms = compute_dspark_loss(
            outputs=made, return_terms=True, inplace_grad=inplace_grad, impl="kernel", **OBJECTIVE
        )
        (loss * 3).backward()
        return terms["loss"]

    run()
    no_synchronisation(run)


def test_row_functions_and_the_meter_never_wait_for_the_device(no_synchronisation):
    made = problem(SHAPES[0])
    meter = dspark_ext.AcceptanceMeter(made.eval_mask.shape[-1])

    def run() -> None:
        ce, l1 = dspark_ext.ce_and_l1(
            made.draft_logits, made.aligned_target_logits, made.target_ids, active=made.eval_mask
        )
        (ce.sum() + l1.square().sum()).backward()
        dspark_ext.token_log_prob(made.draft_logits, made.target_ids).sum().backward()
        _, terms = compute_dspark_loss(outputs=made, return_terms=True, **OBJECTIVE)
        meter.update(terms)

    run()
    no_synchronisation(run)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_captured_step_replays_with_new_contents(shape):
    made = problem(shape)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(made)
    torch.cuda.current_stream().wait_stream(side)
    made.draft_logits.grad = made.confidence_pred.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(made)
    for seed in (8, 9):
        other = problem(shape, seed=seed)
        for name, value in vars(other).items():
            getattr(made, name).detach().copy_(value.detach())
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, step(other))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_from_another_thread(shape):
    expected = step(problem(shape))
    made = problem(shape)
    loss = compute_dspark_loss(outputs=made, impl="kernel", **OBJECTIVE)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same_bits([made.draft_logits.grad, made.confidence_pred.grad], expected[-2:])


@pytest.mark.parametrize("V", [4096, 4097, 151936])
def test_repeats_have_the_same_bits(V):
    draft, target = (normal(seed, 64, V).to("cuda", bf16) for seed in (1, 2))
    ids = torch.arange(64, device="cuda")
    ones = torch.ones(64, device="cuda")
    expected = OPS.weighted_fwd(draft, target, ids, None, ones, ones, True)
    for _ in range(5):
        for x, y in zip(OPS.weighted_fwd(draft, target, ids, None, ones, ones, True), expected):
            assert torch.equal(x, y)


def test_more_than_two_to_the_31_elements():
    V, N = 151936, (1 << 31) // 151936 + 8
    if torch.cuda.mem_get_info()[0] < 6 * N * V * 2:
        pytest.skip("needs 26 GB of device memory")
    draft = torch.randn(N, V, device="cuda", dtype=bf16)
    target = torch.randn(N, V, device="cuda", dtype=bf16)
    ids, ones = torch.arange(N, device="cuda"), torch.ones(N, device="cuda")
    last = slice(N - 4, N)
    expected = OPS.weighted_fwd(
        draft[last].clone(), target[last], ids[last], None, ones[last], ones[last], True
    )
    _, ce, l1 = OPS.weighted_inplace_(draft, target, ids, None, ones, ones)
    for x, y in zip((ce[last], l1[last], draft[last]), expected[1:]):
        assert torch.equal(x, y)


def test_float64_logits_are_exact_and_take_the_torch_path():
    made = problem((1, 2, 3, 257), torch.float64)
    expected = step(problem((1, 2, 3, 257), torch.float64, "cpu"))
    for x, y in zip(step(made, impl="auto"), expected):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-10, atol=1e-12)
    assert not _backend.has_kernels(made.draft_logits.device, torch.float64)
