"""Inputs of the tests: seeded, and named by what is special about them."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Union

import torch
from torch import Tensor

from dspark_ext import DSparkForwardOutput

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The objective's scalars: with every term of like size, and as a training run has them.
USUAL = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.3,
    "l1_loss_alpha": 0.7,
    "confidence_head_alpha": 0.5,
}
OBJECTIVE = dict(
    loss_decay_gamma=4.0, ce_loss_alpha=0.1, l1_loss_alpha=0.9, confidence_head_alpha=1.0
)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Float64 normal numbers; the same whatever dtype they are rounded to later."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale


@dataclasses.dataclass
class LabelledRows:
    """``draft`` and ``target`` ``[N, V]`` and ``ids`` ``[N]``, a regime of logits in each row."""

    draft: Tensor
    target: Tensor
    ids: Tensor
    regimes: tuple[str, ...]

    def to(self, device: Union[str, torch.device]) -> LabelledRows:
        tensors = (t.to(device) for t in (self.draft, self.target, self.ids))
        return LabelledRows(*tensors, self.regimes)


def labelled_rows(
    seed: int, V: int, draft_dtype: torch.dtype, target_dtype: Optional[torch.dtype] = None
) -> LabelledRows:
    """A row for each regime in which a formula or an exponential can lose its digits."""
    noise = [normal(seed + i, V) for i in range(12)]
    ids = torch.randint(V, (6,), generator=generator(seed))
    label = torch.nn.functional.one_hot(ids, V).double()
    rows = {
        "spread": (noise[0] * 2, noise[1] * 2),
        "confident": (noise[2] + 20 * label[1], noise[3] + 5 * label[1]),
        "offset": (noise[4] * 3 + 900, noise[5] * 3 - 700),
        "nearly equal": (noise[6] * 3, noise[6] * 3 + noise[7] * 0.04),
        "tied maxima, wide": ((noise[8] * 2).round() * 6, noise[9] * 15),
        "certain": (noise[10] + 60 * label[5], noise[11]),
    }
    draft = torch.stack([d for d, _ in rows.values()]).to(draft_dtype)
    target = torch.stack([t for _, t in rows.values()]).to(target_dtype or draft_dtype)
    return LabelledRows(draft, target, ids, tuple(rows))


# Of [B, A, K, V] logits: the same values at other strides.
LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "permuted": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "columns_of_a_wider_buffer": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every_second_row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
}


def outputs(
    seed: int = 0,
    shape: tuple[int, int, int, int] = (2, 3, 4, 33),
    dtype: torch.dtype = torch.float32,
    *,
    target_dtype: Optional[torch.dtype] = None,
    keep: float = 0.75,
    confidence: bool = True,
    requires_grad: bool = True,
) -> DSparkForwardOutput:
    """A drafter's forward on ``[B, A, K, V]``; about ``keep`` of the positions are supervised."""
    B, A, K, V = shape
    random = generator(seed)
    draft = normal(seed + 1, *shape, scale=2)
    made = DSparkForwardOutput(
        draft_logits=draft.to(dtype, copy=True).requires_grad_(requires_grad),
        target_ids=torch.randint(V, (B, A, K), generator=random),
        eval_mask=torch.rand(B, A, K, generator=random) < keep,
        block_keep_mask=torch.rand(B, A, generator=random) < 0.8,
        confidence_pred=None,
        aligned_target_logits=(draft + normal(seed + 2, *shape)).to(target_dtype or dtype),
    )
    if confidence:
        logits = normal(seed + 3, B, A, K)
        made.confidence_pred = logits.to(_result_dtype(dtype)).requires_grad_(requires_grad)
    return made


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def replace(made: DSparkForwardOutput, **changes: Any) -> DSparkForwardOutput:
    """A copy whose logits are leaves of their own, with some tensors exchanged."""
    fresh = {
        name: getattr(made, name).detach().clone().requires_grad_(getattr(made, name).requires_grad)
        for name in ("draft_logits", "confidence_pred")
        if name not in changes and getattr(made, name) is not None
    }
    return dataclasses.replace(made, **fresh, **changes)
