"""Many ranks, with DDP or FSDP2: ``torchrun --nproc-per-node 2 examples/distributed.py [--fsdp]``.

Each rank has its share of every batch, in micro-batches. The step's denominator is summed over
all of them before the drafter runs, so the loss curve is that of one process with whole batches.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Optional

import torch
import torch.distributed as dist
from synthetic import BLOCK_SIZE, SETTINGS, Windows, make_drafter, to_device
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dspark_ext import AcceptanceMeter, compute_dspark_loss, loss_denominators
from dspark_ext.demo.drafter import align

BATCH = 8  # windows of a step, over all ranks and micro-batches


def wrap(drafter: nn.Module, fsdp: bool) -> nn.Module:
    """The drafter with its gradients averaged over the ranks, its parameters sharded for FSDP2."""
    if not fsdp:
        return DistributedDataParallel(drafter)
    for layer in drafter.layers:
        fully_shard(layer)
    return fully_shard(drafter)


@contextlib.contextmanager
def gradients_of(model: nn.Module, last: bool) -> Iterator[None]:
    """Within it, gradients travel only in the backward pass of a step's last micro-batch."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if last else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(last)
        yield


def endless(loader: DataLoader, sampler: DistributedSampler) -> Iterator[dict[str, Tensor]]:
    """One epoch after another, each in an order of its own that the ranks share."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def train(args: argparse.Namespace) -> None:
    """The loop; rank 0 prints."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    model = wrap(make_drafter().to(device), args.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    windows = Windows(256)
    sampler = DistributedSampler(windows, shuffle=True, drop_last=True)
    loader = DataLoader(windows, batch_size=BATCH // ranks // args.accumulate, sampler=sampler)
    batches = endless(loader, sampler)

    meter = AcceptanceMeter(BLOCK_SIZE, device)
    for step in range(1, args.steps + 1):
        window = [to_device(next(batches), device) for _ in range(args.accumulate)]
        masks = [align(batch, BLOCK_SIZE)[1] for batch in window]
        denominators = loss_denominators(masks, SETTINGS["loss_decay_gamma"])
        for i, batch in enumerate(window):
            with gradients_of(model, last=i == len(window) - 1):
                loss, terms = compute_dspark_loss(
                    outputs=model(batch), return_terms=True, denominators=denominators, **SETTINGS
                )
                loss.backward()  # the micro-batches' losses add up; nothing is divided
            meter.update(terms)
        optimizer.step()
        optimizer.zero_grad()

        if step % args.log_every == 0 or step == args.steps:
            meter.all_reduce()
            numbers = meter.compute()
            if rank == 0:
                print(
                    f"step {step:4d}  loss {numbers['loss']:.5f}  tau {numbers['tau']:.3f}",
                    flush=True,
                )
            meter.reset()


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Trains on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160, help="(default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    args = parser.parse_args(arguments)

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # The model ends with the call, before the group: were DDP the last to hold the group, ending it
    # would wait for one of gloo's threads, which may wait for the interpreter.
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
