"""What is measured: sizes, dtypes, the inputs made from them, and the bytes they must cost."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Union

import torch
from torch import Tensor

from dspark_ext import DSparkForwardOutput, DSparkLinearOutput

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# The objective's scalars: both alphas on, and a confidence head.
LOSS: dict[str, Any] = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.1,
    "l1_loss_alpha": 0.9,
    "confidence_head_alpha": 1.0,
}

_FILL_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """One benchmark's parameters; plain values, so that they travel to another process.

    Attributes:
        hidden: the width of hidden states, where a step starts from them and a head that draft
            and teacher share; 0 where it starts from logits.
        train_head: whether that head gets a gradient.
    """

    rows: int = 448
    vocab: int = 151936
    dtype: str = "float32"
    target_dtype: str = "float32"
    device: str = "cpu"
    inactive: float = 0.0
    evaluation: bool = False
    seed: int = 0
    hidden: int = 0
    train_head: bool = False

    @property
    def linear(self) -> bool:
        """Whether a step starts from hidden states, and so includes the head's products."""
        return self.hidden > 0

    @property
    def block_size(self) -> int:
        """K: 7 where the rows divide into blocks of 7, else 1."""
        return 7 if self.rows % 7 == 0 else 1

    @property
    def leading(self) -> tuple[int, int, int]:
        """``(B, A, K)``."""
        return (1, self.rows // self.block_size, self.block_size)

    @property
    def inactive_rows(self) -> int:
        """How many rows have an ``eval_mask`` of 0."""
        return round(self.rows * self.inactive)

    @property
    def floor_bytes(self) -> int:
        """Bytes that must cross memory: what a step reads and writes of vocabulary size, once.

        Active rows: both logits read, and the gradient written when training. Inactive rows: the
        gradient's zeros. fp16 drafts read both logits again in backward, where a loss scaler's
        factor is known.
        """
        draft, target = DTYPES[self.dtype].itemsize, DTYPES[self.target_dtype].itemsize
        reads = draft + target
        if self.dtype == "float16" and not self.evaluation:
            reads *= 2
        write = 0 if self.evaluation else draft
        active = self.rows - self.inactive_rows
        return self.vocab * (active * (reads + write) + self.inactive_rows * write)

    @property
    def products(self) -> int:
        """Matrix products that a step from hidden states takes: both logits, and the gradients
        of hidden states and of a trained head."""
        return 2 if self.evaluation else 3 + self.train_head

    @property
    def floor_flop(self) -> int:
        """Operations of those products, of active rows alone."""
        active = self.rows - self.inactive_rows
        return self.products * 2 * active * self.vocab * self.hidden


class Inputs:
    """The tensors of a problem, and what a layer of a drafter would hand on: the draft logits,
    or the draft's hidden states if the problem has a head.

    Attributes:
        draft, target: logits ``[B, A, K, V]``, or hidden states ``[B, A, K, H]``.
        head: ``[V, H]``, of draft and teacher; None if ``draft`` and ``target`` are logits.
        gradient: the gradient that the last backward handed to that layer, or None.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        device = torch.device(problem.device)
        generator = torch.Generator(device).manual_seed(problem.seed)
        shape = (*problem.leading, problem.hidden or problem.vocab)
        self.draft = torch.empty(shape, dtype=DTYPES[problem.dtype], device=device)
        self.target = torch.empty(shape, dtype=DTYPES[problem.target_dtype], device=device)
        _fill(self.draft, self.target, generator)
        self.ids = torch.randint(problem.vocab, problem.leading, device=device, generator=generator)
        order = torch.randperm(problem.rows, device=device, generator=generator)
        self.eval_mask = (order >= problem.inactive_rows).reshape(problem.leading)
        self.keep = torch.ones(problem.leading[:2], dtype=torch.bool, device=device)
        self.confidence = torch.randn(problem.leading, device=device, generator=generator)
        self.confidence.requires_grad_(not problem.evaluation)
        self.head: Optional[Tensor] = None
        if problem.linear:
            # Of a scale that gives the logits the deviation of the hidden states.
            self.head = torch.empty(
                (problem.vocab, problem.hidden), dtype=self.draft.dtype, device=device
            ).normal_(0, problem.hidden**-0.5, generator=generator)
            self.head.requires_grad_(problem.train_head and not problem.evaluation)
        self.gradient: Optional[Tensor] = None
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._pristine: Optional[Tensor] = None

    def keep_copy(self) -> None:
        """Keeps the draft logits' values for :meth:`restore`."""
        if self._pristine is None:
            self._pristine = self.draft.clone()

    def restore(self) -> None:
        """Undoes what an in-place gradient did to the draft logits."""
        if self._pristine is not None:
            self.draft.copy_(self._pristine)

    def forget(self) -> None:
        """Drops the gradients of the last step."""
        self.gradient = None
        self.confidence.grad = None
        if self.head is not None:
            self.head.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients of vocabulary size or of the hidden states' size."""
        gradients = {"draft": self.gradient, "head": None if self.head is None else self.head.grad}
        return {name: value for name, value in gradients.items() if value is not None}

    def outputs(self) -> Union[DSparkForwardOutput, DSparkLinearOutput]:
        """Fresh outputs of a drafter, which want a gradient unless only evaluated."""
        draft = self.draft
        if not self.problem.evaluation:
            draft = Layer.apply(self._anchor, self)
        if self.head is not None:
            return DSparkLinearOutput(
                draft_hidden=draft,
                lm_head_weight=self.head,
                target_ids=self.ids,
                eval_mask=self.eval_mask,
                block_keep_mask=self.keep,
                confidence_pred=self.confidence,
                target_hidden=self.target,
            )
        return DSparkForwardOutput(
            draft_logits=draft,
            target_ids=self.ids,
            eval_mask=self.eval_mask,
            block_keep_mask=self.keep,
            confidence_pred=self.confidence,
            aligned_target_logits=self.target,
        )


class Layer(torch.autograd.Function):
    """Stands for the layer that produced the draft's logits or hidden states, ``inputs.draft``: it
    costs nothing, and receives the gradient as ``inputs.gradient``, so that no contender pays for a
    sum into ``.grad``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: Inputs) -> Tensor:
        ctx.inputs = inputs
        return inputs.draft.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.inputs.gradient = gradient
        return None, None


def _fill(draft: Tensor, target: Tensor, generator: torch.Generator) -> None:
    """Normal values of deviation 2, the target's correlated with the draft's."""
    columns = draft.shape[-1]
    chunks = [torch.split(values.view(-1, columns), _FILL_ROWS) for values in (draft, target)]
    for x, t in zip(*chunks):
        x.normal_(0, 2, generator=generator)
        t.normal_(0, 1.2, generator=generator).add_(x, alpha=0.8)
