"""The implementations that are compared. Each maps a drafter's outputs to the loss: its logits
in `CONTENDERS`, its hidden states and head in `LINEAR_CONTENDERS`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark_ext import (
    DSparkForwardOutput,
    DSparkLinearOutput,
    ce_and_l1,
    compute_dspark_linear_loss,
    compute_dspark_loss,
)
from dspark_ext.bench.problem import LOSS, Problem

# Of a DSparkForwardOutput or, for the contenders from hidden states, of a DSparkLinearOutput.
LossFunction = Callable[[Any], Tensor]

CHUNK_ROWS = 128
_NEMO_MODULE = "nemo_automodel.components.speculative.dspark.core"
_LIGER_MODULE = "liger_kernel.transformers.functional"


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
        gpu_only: whether it has nothing for a CPU.
    """

    title: str
    build: Callable[[], LossFunction]
    inplace: bool = False
    compiled: bool = False
    gpu_only: bool = False


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


def materialised(outputs: DSparkLinearOutput) -> DSparkForwardOutput:
    """The logits that hidden states and the head they share stand for, all at once."""
    assert outputs.target_hidden is not None, "the benchmark's inputs have a teacher"
    draft = F.linear(outputs.draft_hidden, outputs.lm_head_weight)
    with torch.no_grad():
        target = F.linear(outputs.target_hidden, outputs.lm_head_weight)
    return DSparkForwardOutput(
        draft_logits=draft,
        target_ids=outputs.target_ids,
        eval_mask=outputs.eval_mask,
        block_keep_mask=outputs.block_keep_mask,
        confidence_pred=outputs.confidence_pred,
        aligned_target_logits=target,
    )


def _from_hidden(loss: LossFunction) -> LossFunction:
    """The same loss after the head's products."""
    return lambda outputs: loss(materialised(outputs))


def _build_linear() -> LossFunction:
    def linear(outputs: DSparkLinearOutput) -> Tensor:
        loss = compute_dspark_linear_loss(outputs=outputs, **LOSS)
        assert isinstance(loss, Tensor)
        return loss

    return linear


def _build_ours(inplace_grad: bool = False, impl: str = "auto") -> LossFunction:
    def ours(outputs: DSparkForwardOutput) -> Tensor:
        loss = compute_dspark_loss(outputs=outputs, inplace_grad=inplace_grad, impl=impl, **LOSS)
        assert isinstance(loss, Tensor)
        return loss

    return ours


def recomputed_loss(outputs: DSparkForwardOutput) -> Tensor:
    """The rows' values by our kernels and the rest as trainers write it: a backward pass that knows
    its upstream gradients only then, and so visits the logits again."""
    draft, target = _logits(outputs)
    active = outputs.eval_mask.reshape(-1)
    ce, l1 = ce_and_l1(draft, target, outputs.target_ids.reshape(-1), active=active)
    return _objective(outputs, ce, l1)


def _build_liger() -> LossFunction:
    """The objective of the parts that Liger has: cross-entropy of logits, which overwrites them,
    and total variation of probabilities."""
    try:
        functional = importlib.import_module(_LIGER_MODULE)
        cross_entropy, tvd = functional.liger_cross_entropy, functional.liger_tvd
    except Exception as error:  # it needs Triton, and Triton a GPU
        raise Unavailable(f"{_LIGER_MODULE} cannot be imported ({error})") from error

    def liger(outputs: DSparkForwardOutput) -> Tensor:
        draft, target = _logits(outputs)
        p = torch.softmax(draft, dim=-1, dtype=torch.float32)
        q = torch.softmax(target, dim=-1, dtype=torch.float32)
        ids = outputs.target_ids.reshape(-1)
        ce = cross_entropy(draft.clone(), ids, reduction="none")
        l1 = 2 * tvd(p, q, reduction="none").sum(dim=-1)
        return _objective(outputs, ce, l1)

    return liger


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
    "recompute": Contender(
        "dspark_ext.ce_and_l1 and a weighted sum: recomputes in backward", lambda: recomputed_loss
    ),
    "torch": Contender('the same with impl="torch"', lambda: _build_ours(impl="torch")),
    "chunked": Contender(
        f"PyTorch in checkpointed chunks of {CHUNK_ROWS} rows", lambda: chunked_loss
    ),
    "plain": Contender("PyTorch as the formula is written", lambda: plain_loss),
    "compile": Contender("torch.compile of plain", _build_compiled, compiled=True),
    "nemo": Contender("the loss of the installed nemo_automodel", _build_nemo),
    "liger": Contender(
        "the parts of it that the installed liger_kernel has", _build_liger, gpu_only=True
    ),
}

LINEAR_CONTENDERS = {
    "ours": Contender("dspark_ext.compute_dspark_linear_loss", _build_linear),
    "logits": Contender(
        "head products, then dspark_ext.compute_dspark_loss", lambda: _from_hidden(_build_ours())
    ),
    "inplace": Contender(
        "the same with inplace_grad=True", lambda: _from_hidden(_build_ours(inplace_grad=True))
    ),
    "chunked": Contender(
        f"head products, then PyTorch in checkpointed chunks of {CHUNK_ROWS} rows",
        lambda: _from_hidden(chunked_loss),
    ),
    "plain": Contender(
        "head products, then PyTorch as the formula is written", lambda: _from_hidden(plain_loss)
    ),
    "compile": Contender(
        "torch.compile of plain, head products included",
        lambda: torch.compile(_from_hidden(plain_loss), fullgraph=True),
        compiled=True,
    ),
    "nemo": Contender(
        "head products, then the loss of the installed nemo_automodel",
        lambda: _from_hidden(_build_nemo()),
    ),
}


def contenders_of(problem: Problem) -> dict[str, Contender]:
    """Those that start where the problem does, in the order of the table."""
    return LINEAR_CONTENDERS if problem.linear else CONTENDERS
