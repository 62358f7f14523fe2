"""The implementations that are compared. Each maps a drafter's outputs to the loss."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark_ext import DSparkForwardOutput, compute_dspark_loss
from dspark_ext.bench.problem import LOSS

LossFunction = Callable[[DSparkForwardOutput], Tensor]

CHUNK_ROWS = 128
_NEMO_MODULE = "nemo_automodel.components.speculative.dspark.core"


class Unavailable(Exception):
    """A contender that cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One implementation.

    Attributes:
        title: what it is, in a few words.
        build: returns its loss function, or raises :class:`Unavailable`.
        inplace: whether it overwrites the draft logits with their gradient.
        compiled: whether its first call of each size compiles.
    """

    title: str
    build: Callable[[], LossFunction]
    inplace: bool = False
    compiled: bool = False


def plain_loss(outputs: DSparkForwardOutput) -> Tensor:
    """The objective as it is written down: no chunks, autograd keeps what it likes."""
    ids = outputs.target_ids.reshape(-1)
    draft, target = _logits(outputs)
    log_p = torch.log_softmax(draft.float(), dim=-1)
    q = torch.softmax(target.float(), dim=-1)
    ce = F.nll_loss(log_p, ids, reduction="none")
    l1 = (log_p.exp() - q).abs().sum(dim=-1)
    return _objective(outputs, ce, l1)


def chunked_loss(outputs: DSparkForwardOutput) -> Tensor:
    """Chunks of 128 rows, each under activation checkpointing, as trainers' losses do it:
    nothing of the vocabulary's size is kept for backward, which computes every chunk again."""
    draft, target = _logits(outputs)
    ids = outputs.target_ids.reshape(-1)
    run = _checkpointed_chunk if torch.is_grad_enabled() and draft.requires_grad else _chunk
    ce, l1 = [], []
    for begin in range(0, draft.shape[0], CHUNK_ROWS):
        rows = slice(begin, begin + CHUNK_ROWS)
        chunk_ce, chunk_l1 = run(draft[rows], target[rows], ids[rows])
        ce.append(chunk_ce)
        l1.append(chunk_l1)
    return _objective(outputs, torch.cat(ce), torch.cat(l1))


def _chunk(draft: Tensor, target: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    x = draft.float()
    p, q = torch.softmax(x, dim=-1), torch.softmax(target.float(), dim=-1)
    return F.cross_entropy(x, ids, reduction="none"), (p - q).abs().sum(dim=-1)


def _checkpointed_chunk(draft: Tensor, target: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    ce, l1 = checkpoint(_chunk, draft, target, ids, use_reentrant=False, preserve_rng_state=False)
    return ce, l1


def _objective(outputs: DSparkForwardOutput, ce: Tensor, l1: Tensor) -> Tensor:
    """The weighted sum of the three terms, from their values per row."""
    weights = outputs.eval_mask.float()
    position = torch.arange(weights.shape[-1], device=weights.device)
    weights = (weights * torch.exp(-position / LOSS["loss_decay_gamma"])).reshape(-1)
    accept = (1 - 0.5 * l1).clamp(0, 1).detach()
    assert outputs.confidence_pred is not None, "the benchmark's inputs have a confidence head"
    confidence = outputs.confidence_pred.float().reshape(-1)
    bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    rows = (
        LOSS["ce_loss_alpha"] * ce
        + LOSS["l1_loss_alpha"] * l1
        + LOSS["confidence_head_alpha"] * bce
    )
    loss: Tensor = (weights * rows).sum() / (weights.sum() + 1e-6)
    return loss


def _logits(outputs: DSparkForwardOutput) -> tuple[Tensor, Tensor]:
    """Draft and target logits, ``[N, V]``."""
    draft, target = outputs.draft_logits, outputs.aligned_target_logits
    assert target is not None, "the benchmark's inputs have target logits"
    return draft.reshape(-1, draft.shape[-1]), target.reshape(-1, target.shape[-1])


def _build_ours(inplace_grad: bool = False, impl: str = "auto") -> LossFunction:
    def ours(outputs: DSparkForwardOutput) -> Tensor:
        loss = compute_dspark_loss(outputs=outputs, inplace_grad=inplace_grad, impl=impl, **LOSS)
        assert isinstance(loss, Tensor)
        return loss

    return ours


def _build_compiled() -> LossFunction:
    return torch.compile(plain_loss, fullgraph=True)


def _build_nemo() -> LossFunction:
    """The loss of the installed trainer, given those of our arguments that it has."""
    try:
        loss = importlib.import_module(_NEMO_MODULE).compute_dspark_loss
    except Exception as error:  # an import of a large package fails in many ways
        raise Unavailable(f"{_NEMO_MODULE} cannot be imported ({error})") from error
    known = inspect.signature(loss).parameters
    missing = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty and name not in (*LOSS, "outputs")
    ]
    if missing:
        raise Unavailable(f"its compute_dspark_loss wants arguments unknown here: {missing}")
    scalars = {name: value for name, value in LOSS.items() if name in known}
    return lambda outputs: loss(outputs=outputs, **scalars)


CONTENDERS = {
    "ours": Contender("dspark_ext.compute_dspark_loss", _build_ours),
    "inplace": Contender(
        "the same with inplace_grad=True", lambda: _build_ours(inplace_grad=True), inplace=True
    ),
    "torch": Contender('the same with impl="torch"', lambda: _build_ours(impl="torch")),
    "chunked": Contender(
        f"PyTorch in checkpointed chunks of {CHUNK_ROWS} rows", lambda: chunked_loss
    ),
    "plain": Contender("PyTorch as the formula is written", lambda: plain_loss),
    "compile": Contender("torch.compile of plain", _build_compiled, compiled=True),
    "nemo": Contender("the loss of the installed nemo_automodel", _build_nemo),
}
