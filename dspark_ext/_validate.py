"""Checks that the public functions share: every message says what was wrong and what to do."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MASK_DTYPES = (torch.bool, *INTEGER_DTYPES, *LOGIT_DTYPES)


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """``value`` as a plain strided tensor of one of ``dtypes``.

    Raises:
        TypeError: not a tensor, a DTensor, not strided, or another dtype.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor")
    if hasattr(value, "placements"):
        raise TypeError(
            f"{name} is a DTensor with placements {value.placements}; pass its local tensor with "
            f"{name}.to_local() if every rank holds the whole tensor, or gather it first with "
            f"{name}.redistribute(placements=[Replicate()]).to_local()"
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; expected a dense tensor (to_dense())")
    if value.dtype not in dtypes:
        expected = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} has dtype {value.dtype}; expected one of {expected}")
    return value


def check_logits(name: str, value: object, sharded: bool = False) -> Tensor:
    """``value`` as logits ``[..., V]`` with last-dimension stride 1; copied when it has another.

    A shard of a vocabulary may have no column.

    Raises:
        TypeError: see :func:`check_tensor`.
        ValueError: no vocabulary dimension, or an empty one.
    """
    logits = check_tensor(name, value, LOGIT_DTYPES)
    if logits.dim() == 0 or (logits.shape[-1] == 0 and not sharded):
        raise ValueError(
            f"{name} has shape {tuple(logits.shape)}; expected [..., V] with at least one column"
        )
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    return logits


def check_same_shape(name: str, value: Tensor, expected: tuple[int, ...], origin: str) -> None:
    """Raises ValueError unless ``value`` has the shape that ``origin`` implies."""
    if tuple(value.shape) != tuple(expected):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; expected {tuple(expected)}, from {origin}"
        )


def check_positions(
    outputs: Any, confidence_pred: Optional[Tensor], leading: tuple[int, ...], origin: str
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """``target_ids``, ``eval_mask``, ``block_keep_mask`` and the confidence logits (or None) of
    positions ``leading`` ``(B, A, K)``, each with its dtype and shape checked."""
    ids = check_tensor("target_ids", outputs.target_ids, INTEGER_DTYPES)
    eval_mask = check_tensor("eval_mask", outputs.eval_mask, MASK_DTYPES)
    keep = check_tensor("block_keep_mask", outputs.block_keep_mask, MASK_DTYPES)
    check_same_shape("target_ids", ids, leading, origin)
    check_same_shape("eval_mask", eval_mask, leading, origin)
    check_same_shape("block_keep_mask", keep, leading[:2], origin)
    if confidence_pred is not None:
        check_tensor("confidence_pred", confidence_pred, LOGIT_DTYPES)
        check_same_shape("confidence_pred", confidence_pred, leading, origin)
    return ids, eval_mask, keep, confidence_pred


def check_same_device(reference_name: str, reference: Tensor, **others: Optional[Tensor]) -> None:
    """Raises ValueError when tensors live on different devices."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != reference.device:
            raise ValueError(
                f"{name} is on {tensor.device} and {reference_name} on {reference.device}; "
                "move them to one device"
            )


def check_target(draft: Tensor, target: Tensor, draft_name: str, target_name: str) -> None:
    """Raises ValueError unless draft and target logits have the same shape."""
    if draft.shape[-1] != target.shape[-1]:
        raise ValueError(
            f"{draft_name} has {draft.shape[-1]} vocabulary columns and {target_name} "
            f"{target.shape[-1]} (shapes {tuple(draft.shape)} and {tuple(target.shape)}); draft "
            "and target must share one vocabulary"
        )
    check_same_shape(target_name, target, tuple(draft.shape), f"the shape of {draft_name}")


def refuse_double_backward(name: str) -> None:
    """Raises RuntimeError in a backward that autograd records.

    A gradient of this gradient would silently be zero.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{name} does not support double backward (create_graph=True): its gradient is "
            "computed in closed form, and autograd cannot differentiate that again. Compute a "
            "term that needs second derivatives in plain PyTorch"
        )
