"""A training process: threads, forks, exits, interrupts, too little memory.

What could hang, or take the interpreter with it, runs in a process of its own, as a function of
this file that the process imports; what it prints comes back as JSON.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Optional

import pytest
import torch
from conftest import TESTS, TOLERANCES, relative_error, run_json
from inputs import DTYPES, USUAL, generator, name_of, outputs, replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_ext import (
    AcceptanceMeter,
    DSparkLinearOutput,
    DSparkLoss,
    ce_and_l1,
    compute_dspark_linear_loss,
    compute_dspark_loss,
    l1_distance,
    token_log_prob,
)

f32, bf16, f16, f64 = DTYPES


def in_a_process(function: str, *arguments: Any, **keywords: Any) -> Any:
    """What a function of this file returns in a fresh interpreter."""
    code = (
        "import json, sys, test_process\n"
        f"print(json.dumps(test_process.{function}(*map(json.loads, sys.argv[1:]))))"
    )
    return run_json(code, *arguments, **keywords)


# --- The same bits -------------------------------------------------------------------------------


def linear_outputs(seed: int, dtype: torch.dtype, V: int = 301) -> DSparkLinearOutput:
    """Hidden states and heads in eighths, so that every logit is exact and the order in which a
    BLAS adds cannot show in one."""
    random = generator(seed)

    def eighths(*shape: int) -> Tensor:
        return (torch.randint(-8, 9, shape, generator=random) / 8).to(dtype)

    B, A, K, H = 2, 3, 4, 16
    result = f64 if dtype == f64 else f32
    return DSparkLinearOutput(
        draft_hidden=eighths(B, A, K, H).requires_grad_(),
        lm_head_weight=eighths(V, H).requires_grad_(),
        target_ids=torch.randint(V, (B, A, K), generator=random),
        eval_mask=torch.rand(B, A, K, generator=random) < 0.75,
        block_keep_mask=torch.ones(B, A),
        confidence_pred=torch.randn(B, A, K, generator=random).to(result).requires_grad_(),
        target_hidden=eighths(B, A, K, H),
    )


def linear_step(seed: int, dtype: torch.dtype, impl: str, **options: Any) -> list[Tensor]:
    """The gradient of hidden states, which is a BLAS's sum over the vocabulary, then loss, terms
    and other gradients of the linear loss."""
    made = linear_outputs(seed, dtype)
    loss, terms = compute_dspark_linear_loss(
        outputs=made, return_terms=True, impl=impl, **USUAL, **options
    )
    leaves = (made.draft_hidden, made.lm_head_weight, made.confidence_pred)
    hidden, *others = torch.autograd.grad(loss, leaves)
    return [hidden, loss.detach(), *terms.values(), *others]


def step(seed: int, dtype: torch.dtype, impl: str, shape: tuple = (2, 3, 4, 4099)) -> list[Tensor]:
    """Loss, terms and gradients of the loss, and what the functions of rows give."""
    made = outputs(seed, shape, dtype)
    loss, terms = compute_dspark_loss(outputs=made, return_terms=True, impl=impl, **USUAL)
    found = [loss.detach(), *terms.values()]
    found += torch.autograd.grad(loss, (made.draft_logits, made.confidence_pred))
    draft, target, ids = made.draft_logits, made.aligned_target_logits, made.target_ids
    for value in (
        sum(ce_and_l1(draft, target, ids, active=made.eval_mask, impl=impl)),
        l1_distance(draft, target, impl=impl),
        token_log_prob(draft, ids, impl=impl),
    ):
        found += [value.detach(), *torch.autograd.grad(value.sum(), draft)]
    return found


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def digest(tensors: list[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digests(threads: int) -> dict[str, str]:
    """Of every function's results, by implementation and dtype."""
    torch.set_num_threads(threads)
    found = {}
    for dtype in DTYPES:
        for impl in ("kernel", "torch"):
            found[f"{dtype} {impl}"] = digest(step(1, dtype, impl))
            found[f"{dtype} {impl} linear"] = digest(linear_step(2, dtype, impl)[1:])
    return found


def test_every_process_gets_the_same_bits_whatever_its_threads_and_allocator():
    here = digests(1)
    assert len(set(here.values())) == len(here)
    assert in_a_process("digests", 2, OMP_NUM_THREADS="2") == here
    other = {"OMP_NUM_THREADS": "3", "MALLOC_PERTURB_": "85", "PYTHONHASHSEED": "7"}
    assert in_a_process("digests", 3, MALLOC_MMAP_MAX_="0", **other) == here


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_linear_loss_has_the_same_bits_on_any_number_of_threads_and_again(dtype, impl):
    hidden, *expected = linear_step(3, dtype, impl)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        again, *others = linear_step(3, dtype, impl)
        assert same_bits(others, expected), threads
        assert relative_error(again, hidden) <= TOLERANCES[dtype].gradient, threads
        assert torch.equal(again, linear_step(3, dtype, impl)[0]), threads


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=name_of)
def test_the_number_of_threads_may_change_between_forward_and_backward(dtype, impl):
    made = outputs(4, (1, 2, 7, 20000), dtype)
    gradients = []
    for forward, backward in ((1, 1), (1, 3), (3, 1), (2, 3)):
        torch.set_num_threads(forward)
        loss = compute_dspark_loss(outputs=made, impl=impl, **USUAL)
        rows = ce_and_l1(made.draft_logits, made.aligned_target_logits, made.target_ids, impl=impl)
        torch.set_num_threads(backward)
        value = 3 * loss + sum(rows).sum()
        gradients.append(torch.autograd.grad(value, made.draft_logits)[0])
    for other in gradients[1:]:
        assert torch.equal(other, gradients[0])


# --- Threads -------------------------------------------------------------------------------------


def test_four_threads_calling_at_once_get_their_own_results(impl):
    """Each thread has inputs of its own, which two of them compute on two OpenMP threads."""
    calls = 100
    inputs = [outputs(10 + i, (1, 3, 4, 2500), (f32, bf16)[i % 2]) for i in range(4)]

    def call(made: Any) -> list[Tensor]:
        leaf = made.draft_logits.detach().requires_grad_()
        loss = compute_dspark_loss(outputs=replace(made, draft_logits=leaf), impl=impl, **USUAL)
        loss.backward()
        rows = token_log_prob(leaf, made.target_ids, impl=impl)
        return [loss.detach(), leaf.grad, rows.detach()]

    expected = [call(made) for made in inputs]
    wrong: list[Any] = []
    ready = threading.Barrier(4)

    def work(i: int) -> None:
        try:
            torch.set_num_threads(1 + i // 2)
            ready.wait()
            wrong.extend(
                (i, n) for n in range(calls) if not same_bits(call(inputs[i]), expected[i])
            )
        except BaseException as error:  # a thread's exception is nobody's
            wrong.append((i, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_other_threads_run_while_a_kernel_does():
    # Rows that share their memory: a long call over little of it.
    row = outputs(5, (1, 1, 1, 151936)).draft_logits.detach()[0, 0]
    rows = row.expand(1500, 151936)
    ids = torch.zeros(1500, dtype=torch.int64)
    span: list[float] = []
    ticks: list[float] = []

    def call() -> None:
        span.append(time.monotonic())
        token_log_prob(rows, ids)
        span.append(time.monotonic())

    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0.001)
    thread.join()
    begin, end = span
    assert end - begin > 0.02, "too short a call to tell"
    assert sum(begin < tick < end for tick in ticks) >= 5


# --- Other processes -----------------------------------------------------------------------------


class Distances(torch.utils.data.Dataset):
    """Items that a loader's worker computes with the package itself."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Tensor:
        made = outputs(i, (1, 3, 4, 2500))
        rows = ce_and_l1(made.draft_logits, made.aligned_target_logits, made.target_ids)
        (gradient,) = torch.autograd.grad(sum(rows).sum(), made.draft_logits)
        return torch.stack([rows[0].detach(), rows[1].detach(), gradient.sum(-1)])


def loading_beside_training(context: str) -> bool:
    """A loader's workers start after the kernels have run on several threads, and work while they
    do again."""
    torch.set_num_threads(2)
    expected = step(6, f32, "kernel")
    loader = torch.utils.data.DataLoader(
        Distances(), batch_size=2, num_workers=2, multiprocessing_context=context
    )
    good, batches = True, []
    for batch in loader:
        batches.append(batch)
        good &= same_bits(step(6, f32, "kernel"), expected)
    alone = [Distances()[i] for i in range(12)]
    return good and same_bits(list(torch.cat(batches)), alone)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_a_data_loaders_workers_compute_beside_a_training_step(context):
    assert in_a_process("loading_beside_training", context, timeout=120)


def forking_after_use() -> list[Any]:
    """A child of a process that has used several threads, with one thread as loaders set it."""
    torch.set_num_threads(2)
    here = digest(step(7, f32, "kernel"))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        os.write(write, digest(step(7, f32, "kernel")).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return [status, os.read(read, 100).decode() == here, digest(step(7, f32, "kernel")) == here]


def test_a_forked_child_gets_the_same_bits_and_leaves_its_parent_alone():
    assert in_a_process("forking_after_use", timeout=120) == [0, True, True]


# --- Exit ----------------------------------------------------------------------------------------

_EXIT = """
import atexit, os, signal, sys, threading, time, torch
import test_process
torch.set_num_threads(2)
expected = test_process.digest(test_process.step(8, torch.float32, "kernel"))

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert test_process.digest(test_process.step(8, torch.float32, "kernel")) == expected
    print("right", flush=True)

print("ready", flush=True)
"""
EXITS = {
    "while a thread works": (
        "threading.Thread(target=work, args=(0.5,)).start()\ntime.sleep(0.1)\nsys.exit(0)",
        0,
        ["ready", "right"],
    ),
    "with a step in an exit handler": (
        "atexit.register(work, 0.1)\nsys.exit(0)",
        0,
        ["ready", "right"],
    ),
    "at once": (
        "threading.Thread(target=work, args=(9,)).start()\ntime.sleep(0.1)\nos._exit(3)",
        3,
        ["ready"],
    ),
    "by a signal": (
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\nwork(60)",
        -signal.SIGTERM,
        ["ready"],
    ),
}


def python(code: str, **keywords: Any) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        **keywords,
    )


@pytest.mark.parametrize("how", EXITS)
def test_a_process_may_end_during_a_step(how):
    code, status, lines = EXITS[how]
    with python(_EXIT + code) as process:
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert printed.split() == lines, errors


# --- Interrupts ----------------------------------------------------------------------------------


class InterruptAt(TorchDispatchMode):
    """KeyboardInterrupt at the n-th operation, as from a signal that arrived before it."""

    def __init__(self, n: Optional[int]) -> None:
        super().__init__()
        self.n, self.count = n, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.n:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def interruptible(name: str, impl: str) -> Callable[[], list[Tensor]]:
    """A step on the same inputs at every call, in several chunks where it has any."""
    if name == "linear":
        return lambda: linear_step(9, bf16, impl, chunk_rows=5)
    made = outputs(9, (2, 3, 4, 2100))
    if name == "rows":

        def rows() -> list[Tensor]:
            ce, l1 = ce_and_l1(
                made.draft_logits, made.aligned_target_logits, made.target_ids, impl=impl
            )
            return [ce.detach(), *torch.autograd.grad((ce * l1).sum(), made.draft_logits)]

        return rows

    def objective() -> list[Tensor]:
        loss, terms = compute_dspark_loss(outputs=made, return_terms=True, impl=impl, **USUAL)
        meter = AcceptanceMeter(block_size=4)
        meter.update(terms)
        gradients = torch.autograd.grad(loss, (made.draft_logits, made.confidence_pred))
        return [*terms.values(), *gradients, torch.tensor([*meter.compute().values()])]

    return objective


@pytest.mark.parametrize("name", ["objective", "rows", "linear"])
def test_an_interrupt_at_any_operation_leaves_nothing_broken(name, impl, monkeypatch):
    monkeypatch.setattr("dspark_ext.reference._CHUNK_ROWS", 7)
    run = interruptible(name, impl)
    expected = run()
    with InterruptAt(None) as counter:
        run()
    assert counter.count >= 10
    for n in range(1, counter.count + 1, max(1, counter.count // 40)):
        with pytest.raises(KeyboardInterrupt), InterruptAt(n):
            run()
        assert same_bits(run(), expected), f"after an interrupt at operation {n}"


def test_an_interrupted_update_is_none():
    _, terms = compute_dspark_loss(outputs=outputs(1), return_terms=True, **USUAL)
    meter = AcceptanceMeter(block_size=4)
    meter.update(terms)
    before = meter.compute()
    twin = copy.deepcopy(meter)
    with InterruptAt(None) as counter:
        twin.update(terms)
    for n in range(1, counter.count + 1):
        with pytest.raises(KeyboardInterrupt), InterruptAt(n):
            meter.update(terms)
        assert meter.compute() == before, n


def interrupted_by_a_signal() -> list[Any]:
    """Ctrl-C while steps run, several times; what a notebook's user does."""
    expected = {impl: linear_step(9, bf16, impl, chunk_rows=1) for impl in ("kernel", "torch")}
    interrupts = 0
    for i in range(12):
        impl = ("kernel", "torch")[i % 2]
        signal.setitimer(signal.ITIMER_REAL, 0.004 * (1 + i))
        try:
            while True:
                linear_step(9, bf16, impl, chunk_rows=1)
                step(9, f32, impl)
        except KeyboardInterrupt:
            interrupts += 1
        if not same_bits(linear_step(9, bf16, impl, chunk_rows=1), expected[impl]):
            return [interrupts, impl]
    return [interrupts, "right"]


def signals_interrupt() -> list[Any]:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    return interrupted_by_a_signal()


def test_a_signal_between_chunks_interrupts_and_later_steps_are_right():
    assert in_a_process("signals_interrupt", timeout=120) == [12, "right"]


# --- Memory --------------------------------------------------------------------------------------


def _limited(function: Callable[[], Any], room: int) -> str:
    """What a call that may take ``room`` more bytes of address space raises."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, hard))
    try:
        function()
        return "nothing"
    except Exception as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def out_of_memory() -> dict[str, Any]:
    """Calls with too little memory for their result, each with a later one that has it."""
    torch.set_num_threads(2)
    made = outputs(11, (1, 2, 8, 100000))  # a gradient of 6 MiB, as the head's is
    hidden = linear_outputs(12, f32, V=100000)
    draft, target, ids = made.draft_logits, made.aligned_target_logits, made.target_ids

    def loss(impl: str, inplace: bool = False) -> list[Tensor]:
        x = draft * 1 if inplace else draft
        value = compute_dspark_loss(
            outputs=replace(made, draft_logits=x), inplace_grad=inplace, impl=impl, **USUAL
        )
        return [value.detach(), *torch.autograd.grad(value, draft)]

    def rows(impl: str) -> list[Tensor]:
        ce, l1 = ce_and_l1(draft, target, ids, impl=impl)
        return [ce.detach(), *torch.autograd.grad(3 * ce.sum() + l1.sum(), draft)]

    def linear(impl: str) -> list[Tensor]:
        value = compute_dspark_linear_loss(outputs=hidden, impl=impl, **USUAL)
        return [value.detach(), *torch.autograd.grad(value, hidden.lm_head_weight)]

    calls: dict[str, Callable[[], list[Tensor]]] = {}
    for impl in ("kernel", "torch"):
        calls[f"loss {impl}"] = lambda impl=impl: loss(impl)
        calls[f"loss in place {impl}"] = lambda impl=impl: loss(impl, True)
        calls[f"rows {impl}"] = lambda impl=impl: rows(impl)
        calls[f"linear {impl}"] = lambda impl=impl: linear(impl)
    found = {}
    for name, call in calls.items():
        before = call()
        errors = [_limited(call, room) for room in (0, 1 << 20, 4 << 20)]
        found[name] = [errors, same_bits(call(), before)]
    return found


def test_too_little_memory_is_an_error_and_later_calls_are_right():
    # glibc keeps no memory of an earlier call, so that every call has to ask for its own.
    found = in_a_process(
        "out_of_memory", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="0"
    )
    assert len(found) == 8
    for name, (errors, right) in found.items():
        assert set(errors) <= {"MemoryError", "RuntimeError"} and right, (name, errors)


# --- Copies --------------------------------------------------------------------------------------


def _through_torch_save(module: DSparkLoss) -> DSparkLoss:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _through_torch_save,
}


@pytest.mark.parametrize("clone", COPIES)
def test_a_copied_module_is_the_same_loss(clone, impl):
    module = DSparkLoss(**USUAL, grad_reduction="sum", impl=impl).eval()
    made = outputs(13)
    loss, terms = module(made, return_terms=True)
    twin = COPIES[clone](module)
    again, terms_again = twin(made, return_terms=True)
    assert torch.equal(loss, again) and same_bits([*terms.values()], [*terms_again.values()])
    assert repr(twin) == repr(module) and twin.training is False and not twin.state_dict()
    twin.ce_loss_alpha = 0.0
    assert module.ce_loss_alpha == 0.3


def unpickled(module: list[int], meter: list[int]) -> list[Any]:
    loss, terms = pickle.loads(bytes(module))(outputs(13), return_terms=True)
    window = pickle.loads(bytes(meter))
    window.update(terms)
    return [loss.item(), window.compute()]


def test_a_pickled_module_and_meter_go_on_in_another_process():
    module, meter = DSparkLoss(**USUAL), AcceptanceMeter(block_size=4)
    loss, terms = module(outputs(13), return_terms=True)
    meter.update(terms)
    pickles = [list(pickle.dumps(value)) for value in (module, meter)]
    meter.update(terms)
    expected = json.loads(json.dumps([loss.item(), meter.compute()]))
    assert in_a_process("unpickled", *pickles) == expected
