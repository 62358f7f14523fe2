"""The emulator that runs CUDA kernels on the host: what it lets pass, and what it notices."""

from __future__ import annotations

import itertools
import re
from typing import Any, Optional

import pytest
import torch
from conftest import TESTS, run_python
from emulated import MAX_CLUSTERS, SANITIZE, emulated_selftest, sanitizer_environment

__all__ = ["emulated_selftest"]

SOURCE = "selftest.cpp"
LINES = (TESTS / "emulation" / SOURCE).read_text().splitlines()
SEEDS = range(20)
SHARED = 64 * 4 + 16  # of the kernels that land 64 floats


def at(comment: str) -> str:
    """file:line of the one line that ends with this comment."""
    (line,) = (i for i, text in enumerate(LINES, 1) if text.endswith(f"// at: {comment}"))
    return f"{SOURCE}:{line}"


def sites_of(module, kernel: str) -> dict[str, list[str]]:
    """The synchronisation in a kernel's own lines that has been executed, by primitive."""
    first = next(i for i, text in enumerate(LINES, 1) if f" {kernel}_kernel(" in text)
    last = next(i for i, text in enumerate(LINES, 1) if i > first and text == "}")
    sites: dict[str, list[str]] = {}
    for file, line, primitive in sorted(module.sites()):
        if file == SOURCE and first <= line <= last:
            sites.setdefault(primitive, []).append(f"{file}:{line}")
    return sites


class Machine:
    """Launches kernels of the self-test on tensors that are declared for the occasion."""

    def __init__(self, module) -> None:
        self.module = module

    def launch(
        self,
        kernel: str,
        source: Optional[torch.Tensor] = None,
        destination: Optional[torch.Tensor] = None,
        seed: int = 0,
        **shape: Any,
    ) -> None:
        self.module.forget()
        addresses = []
        for name, tensor in (("source", source), ("destination", destination)):
            addresses.append(0 if tensor is None else tensor.data_ptr())
            if tensor is not None:
                bytes_ = tensor.numel() * tensor.element_size()
                self.module.allow(tensor.data_ptr(), bytes_, name == "destination", name)
        self.module.set_seed(seed)
        self.module.launch(kernel, *addresses, **shape)

    def error_of(self, kernel: str, *tensors: torch.Tensor, **keywords: Any) -> str:
        with pytest.raises(self.module.EmulationError) as caught:
            self.launch(kernel, *tensors, **keywords)
        message = str(caught.value)
        assert message.startswith(f"kernel {kernel}: ")
        return message


@pytest.fixture
def machine(emulated_selftest) -> Machine:
    return Machine(emulated_selftest)


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1


def unset(*shape: int) -> torch.Tensor:
    """Different from anything that a kernel writes and from what was never written."""
    return torch.full(shape, -1.0)


# --- Right kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_right_kernels_give_right_results_in_every_order(machine, seed):
    x = numbers(512)
    out = unset(2, 256)
    machine.launch("reverse", x, out, seed, n=256, grid=[2, 1, 1], threads=256, shared=1024)
    assert torch.equal(out, x.view(2, 256).flip(1))
    out = unset(32)
    machine.launch("warp_sum", x, out, seed)
    assert torch.equal(out, x[:32].sum().expand(32))
    machine.launch("prefix_sum", x, out, seed)
    assert torch.equal(out, x[:32].cumsum(0))
    out = unset(8)
    machine.launch(
        "neighbour", None, out, seed, n=7, grid=[8, 1, 1], threads=40, shared=32, cluster=4
    )
    assert torch.equal(out, torch.full((8,), 7.0))
    out = unset(512)
    machine.launch("copy", x, out, seed, n=512, shared=512 * 4 + 16)
    assert torch.equal(out, x)
    machine.launch("phases", seed=seed, shared=SHARED)


COLUMNS, CLUSTER = 8192, 4
ROW_SUMS = {
    "n": COLUMNS,
    "grid": [3 * CLUSTER, 1, 1],
    "threads": 128,
    "shared": COLUMNS // CLUSTER * 4 + 48 + 2 * CLUSTER * 4 * 16,
    "cluster": CLUSTER,
}


def row_sums(machine, seed: int, kernel: str = "row_sums") -> torch.Tensor:
    out = unset(8)
    machine.launch(kernel, ROWS, out, seed, **ROW_SUMS)
    return out


ROWS = torch.rand(8, COLUMNS, generator=torch.Generator().manual_seed(0))


def test_a_right_kernel_gives_the_same_bits_in_every_order(machine):
    results = [row_sums(machine, seed) for seed in range(100)]
    assert torch.allclose(results[0].double(), ROWS.double().sum(1), rtol=1e-6)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_seed_fixes_the_schedule_and_another_one_changes_it(machine):
    x = numbers(4)
    first = [
        machine.error_of("load", x, seed=seed, n=4, grid=[9, 1, 1], threads=64) for seed in SEEDS
    ]
    again = [
        machine.error_of("load", x, seed=seed, n=4, grid=[9, 1, 1], threads=64) for seed in SEEDS
    ]
    assert first == again
    assert len(set(first)) > len(SEEDS) // 2


# --- Missing synchronisation ---------------------------------------------------------------------


def test_a_barrier_left_out_shows_as_nan(machine):
    x, out = numbers(256), unset(256)
    shape = {"n": 256, "threads": 256, "shared": 1024}
    machine.launch("reverse", x, out, **shape)
    sites = sites_of(machine.module, "reverse")
    machine.module.skip(sites["block_barrier"])
    for seed in SEEDS:
        machine.launch("reverse", x, out, seed, **shape)
        assert out.isnan().any()
    machine.module.skip([])
    machine.launch("reverse", x, out, **shape)
    assert torch.equal(out, x.flip(0))


def test_every_synchronisation_of_a_kernel_is_missed_when_left_out(machine):
    expected = row_sums(machine, 0)
    sites = sites_of(machine.module, "row_sums")
    alone = [[site] for kind in sorted(sites) for site in sites[kind]]
    barriers = [list(pair) for pair in zip(sites["cluster_arrive"], sites["cluster_wait"])]
    assert len(alone) == 7 and len(barriers) == 1
    for skipped in alone + barriers:
        machine.module.skip(skipped)
        assert any(goes_wrong(machine, seed, expected) for seed in SEEDS), skipped


def test_a_part_counted_for_another_rows_is_noticed(machine):
    expected = row_sums(machine, 0)
    assert any(goes_wrong(machine, seed, expected, "row_sums_one_barrier") for seed in range(100))


def goes_wrong(machine, seed: int, expected: torch.Tensor, kernel: str = "row_sums") -> bool:
    try:
        return not torch.equal(row_sums(machine, seed, kernel), expected)
    except machine.module.EmulationError:
        return True


def test_a_send_must_not_reach_a_block_that_has_not_begun(machine):
    out = unset(8)
    shape = {"n": 7, "grid": [8, 1, 1], "threads": 32, "shared": 32, "cluster": 8}
    machine.launch("neighbour", None, out, **shape)
    sites = sites_of(machine.module, "neighbour")
    machine.module.skip(sites["cluster_arrive"] + sites["cluster_wait"])
    errors = []
    for seed in SEEDS:
        try:
            machine.launch("neighbour", None, out, seed, **shape)
        except machine.module.EmulationError as error:
            errors.append(str(error))
    assert any("had not begun" in error for error in errors)


def test_a_send_is_late(machine):
    out = unset(2)
    for seed in SEEDS:
        machine.launch("send_early", None, out, seed, threads=1, shared=32)
        assert out[0].isnan() and out[1] == 1


def test_an_asynchronous_copy_is_late(machine):
    x, out = numbers(400), unset(400)
    for seed in SEEDS:
        machine.launch("copy_early", x, out, seed, n=400, shared=400 * 4 + 16)
        assert out.isnan().all()


def test_sites_name_what_was_executed(machine):
    machine.launch("copy", numbers(64), unset(64), n=64, shared=SHARED)
    here = {primitive for _, _, primitive in machine.module.sites()}
    assert {"fence_mbarrier_init", "mbarrier_wait", "mbarrier_arrive_expecting"} <= here


# --- Divergence and deadlock ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, places, shape",
    [
        ("diverged_shuffle", ["even lanes", "odd lanes"], {}),
        ("diverged_barrier", ["first warp", "other warps"], {"threads": 96}),
    ],
)
def test_waiting_at_different_places_names_both(machine, kernel, places, shape):
    for seed in SEEDS:
        message = machine.error_of(kernel, seed=seed, **shape)
        assert "diverged" in message
        assert all(at(place) in message for place in places)


@pytest.mark.parametrize(
    "kernel, place, shape",
    [
        ("ended_lane", "other lanes", {}),
        ("ended_thread", "other threads", {"threads": 64}),
        ("ended_block", "other blocks", {"grid": [2, 1, 1], "cluster": 2}),
    ],
)
def test_threads_that_end_while_others_wait_for_them_are_an_error(machine, kernel, place, shape):
    for seed in SEEDS:
        message = machine.error_of(kernel, seed=seed, **shape)
        if "arrived" in message:  # of the cluster, whose split barrier is known by its first half
            assert "ended while" in message
        else:
            assert "ended" in message and at(place) in message


def test_a_deadlock_lists_every_place_with_its_threads(machine):
    for seed in SEEDS:
        message = machine.error_of("mixed_wait", seed=seed, threads=64)
        assert "deadlock" in message
        assert f"32 threads of block (0, 0, 0) in block_barrier at {at('even threads')}" in message
        assert f"32 threads of block (0, 0, 0) in shuffle_xor at {at('odd threads')}" in message


def test_a_deadlock_in_a_cluster_names_the_ranks(machine):
    shape = {"grid": [2, 1, 1], "cluster": 2}
    message = machine.error_of("cluster_deadlock", **shape)
    for threads, rank, waits, place in (
        ("32 threads", 0, "cluster_wait", "wait of a whole block"),
        ("31 threads", 1, "block_barrier", "barrier without thread 0"),
        ("1 thread", 1, "cluster_wait", "wait of thread 0"),
    ):
        block = f"block ({rank}, 0, 0) of rank {rank}"
        assert f"{threads} of {block} in {waits} at {at(place)}" in message


def test_a_deadlock_tells_what_an_mbarrier_lacks(machine):
    message = machine.error_of("copy_short", numbers(64), n=64, shared=SHARED)
    place = at("wait for 16 more bytes")
    assert f"mbarrier_wait at {place} (phase 0 lacks 0 arrivals and 16 bytes)" in message
    message = machine.error_of("phases", n=1, shared=SHARED)
    place = at("wait for the sixth phase")
    assert f"mbarrier_wait at {place} (phase 5 lacks 1 arrivals and 0 bytes)" in message


def test_a_warp_that_is_not_whole_may_not_shuffle(machine):
    message = machine.error_of("warp_sum", numbers(64), unset(64), threads=40)
    assert "its warp has 8 threads" in message


@pytest.mark.parametrize(
    "kernel, words",
    [
        ("two_arrivals", "a second one without a cluster_wait"),
        ("no_arrival", "no cluster_arrive came before"),
        ("no_wait", "ended while it was between cluster_arrive and cluster_wait"),
    ],
)
def test_the_halves_of_a_cluster_barrier_belong_together(machine, kernel, words):
    assert words in machine.error_of(kernel)


# --- Asynchronous copies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, n, words",
    [
        ("copy_no_fence", 64, "no fence_mbarrier_init"),
        ("copy_no_init", 64, "the mbarrier is not initialised"),
        ("copy_no_wait", 64, "ended without a wait for the bulk_load"),
        ("copy_twice", 64, "the destination is that of the copy in flight"),
        ("copy_size", 0, "0 bytes, not a positive multiple of 16"),
        ("copy_size", 24, "24 bytes, not a positive multiple of 16"),
        ("copy_from", 1, "not aligned to 16"),
        ("copy_from", 52, "in no buffer"),
        ("copy_to", 1, "the destination is not aligned to 16"),
        ("copy_to", 56, "64 bytes to byte 224 of 272 of shared memory"),
        ("expect_too_much", 1 << 20, "it counts to 2^20 - 1"),
        ("arrive_too_often", 0, "one arrival more than the phase has"),
        ("init_twice", 0, "initialised already"),
    ],
)
def test_a_copy_that_the_hardware_leaves_undefined_is_an_error(machine, kernel, n, words):
    assert words in machine.error_of(kernel, numbers(64), n=n, shared=SHARED)


def test_a_fence_that_is_left_out_is_an_error(machine):
    x, out = numbers(64), unset(64)
    machine.launch("copy", x, out, n=64, shared=SHARED)
    fences = [f"{file}:{line}" for file, line, kind in machine.module.sites() if "fence" in kind]
    machine.module.skip(fences)
    assert "no fence_mbarrier_init" in machine.error_of("copy", x, out, n=64, shared=SHARED)


# --- Memory --------------------------------------------------------------------------------------


def test_an_access_outside_names_place_and_buffer(machine):
    x, out = numbers(8), unset(8)
    message = machine.error_of("load", x, out, n=8)
    assert at("load") in message and str(x.data_ptr() + 32) in message
    assert "in no buffer; the nearest: byte 32 of 'source', which has 32 bytes" in message
    message = machine.error_of("store", x, out, n=-1)
    assert at("store") in message and "byte -4 of 'destination'" in message
    aligned = next(i for i in range(4) if (x.data_ptr() + 4 * (5 + i)) % 16 == 0)
    message = machine.error_of("load_vector", x, n=5 + aligned)
    assert "16 bytes" in message and "'source'" in message


def test_an_access_must_be_aligned(machine):
    x = numbers(8)
    odd = next(i for i in range(4) if (x.data_ptr() + 4 * i) % 16 == 4)
    message = machine.error_of("load_vector", x, n=odd)
    assert at("load of a vector") in message and "not aligned to 16" in message


def test_nothing_is_accessible_that_was_not_declared(machine):
    machine.module.forget()
    x = numbers(8)
    with pytest.raises(machine.module.EmulationError, match="no buffer is declared"):
        machine.module.launch("load", x.data_ptr())
    machine.module.allow(x.data_ptr(), 32, False, "x")
    machine.module.launch("load", x.data_ptr())
    with pytest.raises(machine.module.EmulationError, match="not writable: byte 0 of 'x'"):
        machine.module.launch("store", 0, x.data_ptr())
    machine.module.forget()
    with pytest.raises(machine.module.EmulationError, match="no buffer is declared"):
        machine.module.launch("load", x.data_ptr())


def test_buffers_may_overlap(machine):
    x = numbers(8)
    machine.module.allow(x.data_ptr(), 32, True, "whole")
    machine.module.allow(x.data_ptr() + 8, 8, False, "middle")
    machine.module.launch("store", 0, x.data_ptr(), 2)
    assert x[2] == 1


@pytest.mark.skipif(SANITIZE, reason="the sanitizer stops at the access")
def test_writing_past_shared_memory_is_an_error(machine):
    for n in (16, -1):
        message = machine.error_of("write_shared", n=n, shared=64)
        assert f"wrote outside its shared memory, at byte {4 * n} of 64" in message


def test_what_was_never_written_is_no_plausible_number(machine):
    out = unset(2)
    machine.launch("unwritten", None, out, n=5, threads=1, shared=64)
    assert out[0].isnan()
    assert out[1].isnan() or out[1].abs() > 1e38


@pytest.mark.parametrize(
    "kernel, words",
    [
        ("send_outside", "outside the block's shared memory"),
        ("send_beyond_cluster", "rank 4 in a cluster of 1"),
    ],
)
def test_a_send_must_hit_the_cluster(machine, kernel, words):
    assert words in machine.error_of(kernel, n=4, shared=64)


@pytest.mark.parametrize(
    "n, words",
    [
        (0, "which had not initialised the mbarrier"),
        (1, "which had not fenced its initialised mbarrier"),
        (2, "ended without a wait for the send_in_cluster"),
    ],
)
def test_a_send_needs_an_mbarrier_that_waits_for_it(machine, n, words):
    shape = {"n": n, "threads": 1, "shared": 32}
    messages = {machine.error_of("send_unprepared", seed=seed, **shape) for seed in SEEDS}
    assert all(at("send") in message for message in messages)
    assert any(words in message for message in messages)


def test_a_block_must_not_end_before_a_send_reaches_it(machine):
    for seed in SEEDS:
        message = machine.error_of(
            "send_to_ended", seed=seed, grid=[2, 1, 1], threads=1, shared=32, cluster=2
        )
        assert "ended" in message or "had not initialised" in message


# --- Counters ------------------------------------------------------------------------------------


def test_counters_are_exact(machine):
    x, out = torch.zeros(1024), torch.zeros(1024)
    x, out = (t[next(i for i in range(4) if (t.data_ptr() + 4 * i) % 16 == 0) :] for t in (x, out))
    for _ in range(2):
        machine.launch("count", x, out, grid=[3, 1, 1], threads=64)
    machine.launch("copy", x, out, n=64, shared=SHARED)
    machine.launch("neighbour", None, out, grid=[8, 1, 1], shared=32, cluster=4)
    launches, threads = 2, 2 * 3 * 64
    counters = machine.module.counters()
    assert counters["count"] == {
        "launches": launches,
        "bytes_read": threads * 20,
        "bytes_written": threads * 20,
        "exponentials": threads + launches * 3 * 3,
        "barriers": launches * 3 * 2,
        "cluster_barriers": 0,
    }
    assert counters["copy"]["bytes_read"] == counters["copy"]["bytes_written"] == 256
    assert counters["neighbour"]["cluster_barriers"] == 2
    machine.module.reset_counters()
    assert machine.module.counters() == {}


def test_a_uniform_load_counts_once_for_its_warp(machine):
    x = numbers(4)
    machine.launch("uniform", x, n=-1, threads=96)
    assert machine.module.counters()["uniform"]["bytes_read"] == 2 * 3 * 4
    message = machine.error_of("uniform", x, n=5, threads=96)
    assert at("uniform load") in message and "another address" in message


# --- Launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, words",
    [
        ({"threads": 1025}, "InvalidConfiguration"),
        ({"threads": 0}, "InvalidConfiguration"),
        ({"grid": [0, 1, 1]}, "InvalidConfiguration"),
        ({"grid": [1, 65536, 1]}, "InvalidConfiguration"),
        ({"grid": [1, 1, 65536]}, "InvalidConfiguration"),
        ({"shared": 48 * 1024 + 1}, "InvalidValue"),
        ({"grid": [9, 1, 1], "cluster": 9}, "InvalidClusterSize"),
        ({"grid": [9, 1, 1], "cluster": 4}, "InvalidClusterSize"),
    ],
)
def test_a_launch_is_refused_as_a_driver_refuses_it(machine, shape, words):
    with pytest.raises(RuntimeError, match=f"cudaLaunchKernelEx failed with cudaError{words}"):
        machine.launch("phases", **shape)


def test_large_clusters_and_shared_memory_have_to_be_allowed(machine):
    module = machine.module
    out = unset(16)
    most = 233472 - 1024
    shape = {"grid": [16, 1, 1], "shared": most, "cluster": 16}
    with pytest.raises(RuntimeError, match="InvalidValue"):
        machine.launch("neighbour", None, out, **shape)
    with pytest.raises(RuntimeError, match="cudaFuncSetAttribute failed"):
        module.allow_large_clusters("neighbour", most + 1)
    module.allow_large_clusters("neighbour", most)
    machine.launch("neighbour", None, out, **shape)
    with pytest.raises(RuntimeError, match="InvalidValue"):  # allowed for one kernel alone
        machine.launch("busy", None, out, **shape)
    with pytest.raises(RuntimeError, match="InvalidClusterSize"):
        machine.launch("neighbour", None, out, grid=[32, 1, 1], cluster=32)
    module.set_device()
    with pytest.raises(RuntimeError, match="InvalidValue"):  # and on one device
        machine.launch("neighbour", None, out, **shape)


def test_the_number_of_active_clusters_can_be_set(machine):
    module = machine.module
    shape = {"threads": 32, "shared": 32, "cluster": 4}
    assert module.max_active_clusters("neighbour", **shape) == MAX_CLUSTERS
    module.set_max_clusters(5)
    assert module.max_active_clusters("neighbour", **shape) == 5
    module.set_device(architecture=80)
    assert module.max_active_clusters("neighbour", **shape) == 0
    with pytest.raises(RuntimeError, match="InvalidConfiguration"):
        machine.launch("neighbour", None, unset(4), grid=[4, 1, 1], **shape)
    assert "needs sm_90" in machine.error_of("phases", shared=SHARED)


def test_each_setting_is_a_device_of_its_own(machine):
    module = machine.module
    before = module.device()
    assert before[1:] == [90, 132, 233472, 60 << 20]
    module.set_device(architecture=100, l2_bytes=1 << 20)
    assert module.device()[1:] == [100, 132, 233472, 1 << 20]
    assert module.device()[0] != before[0]
    module.device_guard(0)
    module.device_guard(-1)
    with pytest.raises(RuntimeError, match="cudaErrorInvalidDevice"):
        module.device_guard(1)


# --- Arithmetic ----------------------------------------------------------------------------------


def words_of(x: torch.Tensor) -> list[int]:
    """The bits of 16- and 32-bit elements as unsigned integers."""
    mask, dtype = (0xFFFF, torch.int16) if x.element_size() == 2 else (0xFFFFFFFF, torch.int32)
    return [word & mask for word in x.contiguous().view(dtype).tolist()]


def floats_of(words: list[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


HALVES = list(range(1 << 16))
FORMATS = [("bfloat16", torch.bfloat16), ("half", torch.float16)]


def elements(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit format."""
    return torch.tensor(HALVES, dtype=torch.int32).to(torch.int16).view(dtype)


def same_values(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, one NaN as good as another."""
    nan = expected.isnan()
    pattern = torch.int16 if actual.element_size() == 2 else torch.int32
    return torch.equal(actual.isnan(), nan) and torch.equal(
        actual.view(pattern)[~nan], expected.view(pattern)[~nan]
    )


@pytest.mark.parametrize("name, dtype", FORMATS)
def test_16_bit_elements_become_floats(emulated_selftest, name, dtype):
    actual = floats_of(getattr(emulated_selftest, f"{name}_to_float")(HALVES))
    assert same_values(actual, elements(dtype).float())


@pytest.mark.parametrize("name, dtype", FORMATS)
def test_floats_are_rounded_to_16_bits(emulated_selftest, name, dtype):
    exact = elements(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    between = (exact[1:].double() + exact[:-1].double()).div(2).float()  # exact: the ties
    infinity = torch.tensor(float("inf"))
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 3.4e38])
    x = torch.cat(
        [exact, between, between.nextafter(infinity), between.nextafter(-infinity), special]
    )
    words = getattr(emulated_selftest, f"float_to_{name}")(words_of(x))
    actual = torch.tensor(words, dtype=torch.int32).to(torch.int16).view(dtype)
    assert same_values(actual, x.to(dtype))
    pairs = getattr(emulated_selftest, f"pack_{name}")(words_of(x), words_of(x.flip(0)))
    assert [pair & 0xFFFF for pair in pairs] == words
    assert [pair >> 16 for pair in pairs] == words[::-1]


@pytest.mark.parametrize("name, dtype", FORMATS)
def test_maxima_of_pairs(emulated_selftest, name, dtype):
    infinity = words_of(torch.tensor([float("inf")], dtype=dtype))[0]
    chosen = [0, 1, 2, infinity - 1, infinity, infinity + 1, 0x7FFF, 0x3C00, 0x3F80]
    chosen += [word | 0x8000 for word in chosen]

    values = elements(dtype).tolist()

    def expected(a: int, b: int) -> int:
        numbers = [word for word in (a, b) if values[word] == values[word]]
        if not numbers:
            return 0x7FFF
        return max(numbers, key=lambda word: (values[word], word < 0x8000))

    pairs = list(itertools.product(chosen, chosen))
    low = [a | b << 16 for a, b in pairs]
    high = [b | a << 16 for a, b in pairs]
    actual = getattr(emulated_selftest, f"maximum_{name}")(low, high)
    assert actual == [expected(a, b) | expected(b, a) << 16 for a, b in pairs]


def test_maxima_and_minima_of_floats(emulated_selftest):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45])
    a, b = (t.flatten().contiguous() for t in torch.meshgrid(x, x, indexing="ij"))
    zeros = (a == 0) & (b == 0)
    negative = a[zeros].signbit(), b[zeros].signbit()
    largest, smallest = torch.fmax(a, b), torch.fmin(a, b)
    largest[zeros] = torch.where(negative[0] & negative[1], -0.0, 0.0)
    smallest[zeros] = torch.where(negative[0] | negative[1], -0.0, 0.0)
    words = words_of(a), words_of(b)
    assert same_values(floats_of(emulated_selftest.maximum(*words)), largest)
    assert same_values(floats_of(emulated_selftest.minimum(*words)), smallest)


def ulps(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance in units of the last place, for numbers of the same sign."""
    return (actual.view(torch.int32).long() - expected.view(torch.int32).long()).abs()


def test_exponentials_are_off_by_up_to_one_ulp_and_flush_subnormals(emulated_selftest):
    x = torch.cat([torch.linspace(-127, 128, 40001), torch.randn(10000) * 1e-3])
    actual = floats_of(emulated_selftest.exp2(words_of(x)))
    expected = x.double().exp2().float()
    normal = (expected > 1.5e-38) & expected.isfinite()
    off = ulps(actual[normal], expected[normal])
    assert off.max() == 1
    assert 0.3 < float((off > 0).double().mean()) < 0.7
    tiny = expected < 1.1754e-38
    assert tiny.any() and (actual[tiny] == 0).all()


def test_exponentials_at_the_edges(emulated_selftest):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-40, -inf, inf, nan, -200.0, 200.0])
    actual = floats_of(emulated_selftest.exp2(words_of(x)))
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, inf, nan, 0.0, inf])
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(-1), expected.nan_to_num(-1))


def test_reciprocals_are_off_by_up_to_one_ulp(emulated_selftest):
    x = torch.cat([torch.linspace(1, 4, 10001), -torch.logspace(-30, 30, 1001)])
    actual = floats_of(emulated_selftest.reciprocal(words_of(x)))
    off = ulps(actual, x.double().reciprocal().float())
    assert off.max() == 1
    assert 0.3 < float((off > 0).double().mean()) < 0.7
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, float("inf"), float("-inf"), 3e38])
    actual = floats_of(emulated_selftest.reciprocal(words_of(x)))
    inf = float("inf")
    assert same_values(actual, torch.tensor([inf, -inf, inf, -inf, 0.0, -0.0, 0.0]))


# --- Sanitizers ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(SANITIZE, reason="runs this file again under the sanitizers")
def test_the_emulator_itself_is_clean_under_the_sanitizers():
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    printed = run_python(*arguments, timeout=900, **sanitizer_environment())
    assert re.search(r"\d+ passed", printed)
