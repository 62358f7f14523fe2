"""The training loop: draw anchors, run the drafter, call the loss, step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from dspark_ext import (
    AcceptanceMeter,
    DSparkForwardOutput,
    DSparkLinearOutput,
    compute_dspark_linear_loss,
    compute_dspark_loss,
)
from dspark_ext.demo.drafter import Batch, Drafter
from dspark_ext.demo.target import Cache, Target

History = dict[str, list[dict[str, float]]]
StepLoss = Callable[[Any, str], tuple[Tensor, dict[str, Tensor]]]
"""From a drafter's outputs and `impl` to the loss and its terms."""

LOSS_DECAY_GAMMA = 4.0
"""Early positions weigh more, exp(-k / gamma): a block is accepted from its start."""
CE_ALPHA, L1_ALPHA, CONFIDENCE_ALPHA = 0.1, 0.9, 1.0
"""The L1 term leads, for half of it is the acceptance that a draft loses."""


@dataclasses.dataclass
class Settings:
    """A run. Everything random follows from `seed`."""

    steps: int = 240
    seed: int = 0
    impl: str = "auto"
    linear: bool = False
    """Whether the loss starts from hidden states: full logits are never made."""
    windows: int = 4
    """Windows of text per step, B."""
    anchors: int = 8
    """Anchors per window, A."""
    lr: float = 1e-3
    markov_lr: float = 2e-2
    """The Markov head starts from nothing, and sees a given token only now and then."""
    warmup: int = 10
    clip: float = 1.0
    evaluations: int = 4
    """Held-out evaluations after the first one, evenly spread over the run; the last at its end."""


def objective(
    outputs: DSparkForwardOutput | DSparkLinearOutput,
    impl: str,
    denominators: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to differentiate, and the terms to log.

    The loss finds the ranks of a data-parallel run by itself and sums their denominators; given
    some, it asks no other rank.
    """
    linear = isinstance(outputs, DSparkLinearOutput)
    loss, terms = (compute_dspark_linear_loss if linear else compute_dspark_loss)(
        outputs=outputs,
        loss_decay_gamma=LOSS_DECAY_GAMMA,
        ce_loss_alpha=CE_ALPHA,
        l1_loss_alpha=L1_ALPHA,
        confidence_head_alpha=CONFIDENCE_ALPHA,
        return_terms=True,
        denominators=denominators,
        impl=impl,
    )
    return loss, terms


def draw_batch(cache: Cache, rows: Tensor, anchors: int, generator: torch.Generator) -> Batch:
    """The windows `rows` [B] with up to `anchors` anchors in each, drawn without repetition.

    An anchor has at least one token before it, for the drafter starts from what the target knew
    there, and one after it, to be predicted.
    """
    lengths = cache.lengths[rows]
    places = torch.arange(cache.input_ids.shape[1])
    allowed = (places >= 1) & (places < lengths[:, None] - 1)  # [B, S]
    keys = torch.rand(allowed.shape, generator=generator)
    keys, drawn = torch.where(allowed, keys, -1.0).topk(anchors, dim=1)
    keep = keys >= 0  # false: the window has fewer places than anchors
    return Batch(
        input_ids=cache.input_ids[rows],
        lengths=lengths,
        features=cache.features[rows],
        last_hidden=cache.last_hidden[rows],
        anchors=torch.where(keep, drawn, 0),
        keep=keep,
    )


def training_batches(cache: Cache, settings: Settings) -> Iterator[Batch]:
    """Batches without end, from a generator of their own: nothing else disturbs the sequence.

    Longer windows are drawn more often, so that every token is about equally likely. Every rank
    of a data-parallel run draws the same batch and keeps its share of the windows.
    """
    rank, ranks = place()
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        rows = torch.multinomial(cache.lengths.float(), settings.windows, generator=generator)
        batch = draw_batch(cache, rows, settings.anchors, generator)
        share = {f.name: getattr(batch, f.name)[rank::ranks] for f in dataclasses.fields(batch)}
        yield Batch(**share)


@contextlib.contextmanager
def ranks_of_torchrun() -> Iterator[int]:
    """The process group that torchrun prepared, if it did; gives the number of ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        yield ranks
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def place() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) unless torchrun started several."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@torch.no_grad()
def evaluate(drafter: Drafter, cache: Cache, impl: str, anchors: int = 16) -> dict[str, float]:
    """The loss, its terms, accept rates and tau over all of `cache`, at the same anchors every
    time. The meter divides once, at the end: batches are not equally full."""
    rank, ranks = place()
    generator = torch.Generator().manual_seed(0)
    meter = AcceptanceMeter(drafter.config.block_size)
    for i, rows in enumerate(torch.arange(len(cache.lengths)).split(2)):
        batch = draw_batch(cache, rows, anchors, generator)
        if i % ranks == rank:
            # Its own denominator, for ranks may have unequal numbers of batches.
            _, terms = objective(drafter(batch), impl, torch.ones(()))
            meter.update(terms)
    meter.all_reduce()
    return meter.compute()


def make_drafter(target: Target, settings: Settings) -> Drafter:
    """An untrained drafter for `target`."""
    torch.manual_seed(settings.seed)
    drafter = Drafter(target.config, target.head, settings.linear)
    drafter.start_from(target.final_norm, target.last_layers)
    return drafter


def make_optimizer(drafter: Drafter, settings: Settings) -> torch.optim.Optimizer:
    markov = [*drafter.markov_in.parameters(), *drafter.markov_out.parameters()]
    rest = [p for p in drafter.parameters() if all(p is not m for m in markov)]
    groups = [
        {"params": rest, "lr": settings.lr},
        {"params": markov, "lr": settings.markov_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)


def distributed(drafter: Drafter) -> DistributedDataParallel:
    """The drafter under DDP. Its shared head is a buffer that never changes: nothing to broadcast
    before a step."""
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {name: False}  # torch 2.13 renamed it
    return DistributedDataParallel(drafter, **options)


def train(
    target: Target,
    cache: Cache,
    held_out: Cache,
    settings: Settings,
    step_loss: StepLoss = objective,
) -> History:
    """Trains a drafter.

    Args:
        step_loss: what is differentiated. Evaluations are :func:`objective`'s in any case.

    Returns:
        "steps", one dict of numbers per step, and "held_out", one per evaluation, of which the
        first is the untrained drafter's. Both carry "step", the steps taken before.
    """
    drafter = make_drafter(target, settings)
    rank, ranks = place()
    model = distributed(drafter) if ranks > 1 else drafter
    optimizer = make_optimizer(drafter, settings)

    def learning_rate(step: int) -> float:
        """Linear warm-up, then half a cosine down to zero."""
        rise = min(1.0, (step + 1) / settings.warmup)
        return rise * 0.5 * (1 + math.cos(math.pi * step / settings.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    batches = training_batches(cache, settings)
    meter = AcceptanceMeter(drafter.config.block_size)
    history: History = {"steps": [], "held_out": []}
    due = {settings.steps * i // settings.evaluations for i in range(settings.evaluations)}

    with tqdm(
        total=settings.steps, desc="train", unit="step", ncols=79, disable=rank > 0
    ) as progress:
        for step in range(settings.steps):
            if step in due:
                result = evaluate(drafter, held_out, settings.impl)
                history["held_out"].append({"step": step, **result})

            loss, terms = step_loss(model(next(batches)), settings.impl)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            meter.reset()
            meter.update(terms)
            meter.all_reduce()
            numbers = meter.compute()
            history["steps"].append({"step": step, **numbers})
            progress.set_postfix_str(f"loss {numbers['loss']:.3f}, tau {numbers['tau']:.2f}")
            progress.update()
    result = evaluate(drafter, held_out, settings.impl)
    history["held_out"].append({"step": settings.steps, **result})
    return history
