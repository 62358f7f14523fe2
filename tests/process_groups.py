"""Real processes that form a gloo group, for the tests.

``run_ranks(body, world_size, *arguments)`` calls ``body(rank, world_size, *arguments)`` on every
rank and returns what the ranks returned; a rank that raises, dies or hangs fails the test with
every rank's traceback. ``run_outcomes`` returns what became of each rank instead, and
``CollectiveCounter`` counts a rank's collectives. ``group_of_one`` is for what one rank can show.

The ranks are forked by a server that has imported torch once, which costs a tenth of what an
import in each of them would. ``body`` is a module-level function; its arguments and results are
pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any, Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Long enough for a busy machine, short enough to notice a hang.
GROUP_TIMEOUT = 90.0
_GRACE = 20.0  # from a collective's timeout to the end of the process that it fails
# Not dspark_ext: the server looks in the current folder first, and the tests may not.
_PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
]


@dataclasses.dataclass
class Outcome:
    """What became of one rank: ``kind`` is returned, raised, died or hung."""

    rank: int
    kind: str
    value: Any = None  # what the body returned
    error: str = ""  # type and message of what it raised
    traceback: str = ""
    seconds: float = 0.0  # that the body ran

    def __str__(self) -> str:
        return f"--- rank {self.rank} {self.kind} after {self.seconds:.1f} s\n{self.traceback}"


@contextlib.contextmanager
def group_of_one() -> Iterator[Any]:
    """A group that this process alone forms."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def run_ranks(
    body: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = GROUP_TIMEOUT
) -> list[Any]:
    """What ``body(rank, world_size, *arguments)`` returned, by rank; fails unless all did."""
    outcomes = run_outcomes(body, world_size, *arguments, timeout=timeout)
    if any(outcome.kind != "returned" for outcome in outcomes):
        reports = "\n".join(map(str, outcomes))
        pytest.fail(f"{body.__name__}{(world_size, *arguments)}\n{reports}", pytrace=False)
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    body: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = GROUP_TIMEOUT
) -> list[Outcome]:
    """What became of each rank. ``timeout`` seconds is that of the group and of the bodies;
    a rank that has not ended soon after it counts as hung and is killed."""
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments_of_rank = (theirs, rank, world_size, store, timeout, body, arguments)
            process = context.Process(target=_run, args=arguments_of_rank, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _collect(ranks, timeout)
        finally:
            for _, ours in ranks:
                ours.close()  # lets a rank that waits for the others go
            for process, _ in ranks:
                process.join(_GRACE / 4)
                process.kill()
                process.join()
                process.close()


class CollectiveCounter(TorchDispatchMode):
    """What a rank sends and when it reads its logits.

    ``events`` lists, in order, each functional collective by its name and ``"read"`` for an
    operation that reads one of ``logits`` (repeated reads once). ``elements`` is how many numbers
    the rank put into each of those collectives. ``sent`` is the number of collectives that
    reached the backends of the process, whoever issued them.
    """

    def __init__(self, logits: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.events: list[str] = []
        self.elements: list[int] = []
        self.sent = 0
        self._logits = {t.untyped_storage().data_ptr() for t in logits if t.numel() > 0}

    def __enter__(self) -> CollectiveCounter:
        self.sent -= _sent()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.sent += _sent()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        namespace, _, operation = name.partition("::")
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        if "c10d" in namespace:
            if operation not in ("wait_tensor", "_wrap_tensor_autograd"):
                self.events.append(operation)
                self.elements.append(args[0].numel())
        elif not is_view and self.events[-1:] != ["read"]:
            tensors = [t for t in tree_leaves((args, kwargs)) if type(t) is torch.Tensor]
            if any(t.untyped_storage().data_ptr() in self._logits for t in tensors):
                self.events.append("read")
        return func(*args, **(kwargs or {}))


def _sent() -> int:
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _collect(ranks: list[tuple[Any, Any]], timeout: float) -> list[Outcome]:
    """The ranks' reports, in order. They stay connected until the last has reported: a peer that
    closes its sockets early can fail a collective that others are still reading."""
    begun = time.monotonic()
    outcomes: dict[int, Outcome] = {}
    waiting = dict(enumerate(ranks))
    while waiting:
        left = begun + timeout + _GRACE - time.monotonic()
        handles = {ours: rank for rank, (_, ours) in waiting.items()}
        ready = multiprocessing.connection.wait(list(handles), max(left, 0))
        for ours in ready:
            rank = handles[ours]
            process, _ = waiting.pop(rank)
            try:
                outcome = torch.load(io.BytesIO(ours.recv_bytes()), weights_only=False)
            except (EOFError, OSError):
                process.join(_GRACE)
                outcome = Outcome(rank, "died", traceback=f"exit code {process.exitcode}")
            outcome.seconds = time.monotonic() - begun
            outcomes[rank] = outcome
        if left <= 0:
            for rank, (process, _) in waiting.items():
                outcomes[rank] = Outcome(rank, "hung", seconds=time.monotonic() - begun)
                process.kill()
            break
    return [outcomes[rank] for rank in range(len(ranks))]


def _run(
    connection: Any,
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    body: Callable[..., Any],
    arguments: tuple,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Where a rank hangs is the first thing to know about it.
    faulthandler.dump_traceback_later(timeout + _GRACE / 2)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        _report(connection, Outcome(rank, "returned", body(rank, world_size, *arguments)))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        _report(connection, Outcome(rank, "raised", None, text, traceback.format_exc()))
        # As after an uncaught exception: without a goodbye to the peers.
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(EOFError):
        connection.recv_bytes()
    dist.destroy_process_group()


def _report(connection: Any, outcome: Outcome) -> None:
    # torch.save, since a pickled tensor is a handle of a process that ends.
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    connection.send_bytes(buffer.getvalue())
