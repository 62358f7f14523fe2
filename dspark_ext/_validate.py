"""Checks that the public functions share: every message says what was wrong and what to do."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MASK_DTYPES = (torch.bool, *INTEGER_DTYPES, *LOGIT_DTYPES)


def attribute(outputs: object, name: str) -> Any:
    """``outputs.name``; AttributeError that names both where there is none."""
    if not hasattr(outputs, name):
        raise AttributeError(
            f"outputs is a {type(outputs).__name__} without {name}; expected an object with the "
            "attributes of DSparkForwardOutput (of a dict, types.SimpleNamespace(**outputs))"
        )
    return getattr(outputs, name)


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """``value`` as a plain strided tensor of one of ``dtypes``, whose memory is all there.

    Raises:
        TypeError: not a tensor, a DTensor, not strided, or another dtype.
        ValueError: its storage is smaller than its shape says.
        RuntimeError: it carries a tangent of forward-mode differentiation.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor")
    if hasattr(value, "placements"):
        raise TypeError(
            f"{name} is a DTensor with placements {value.placements}; pass its local tensor with "
            f"{name}.to_local() if every rank holds the whole tensor, or gather it first with "
            f"{name}.redistribute(placements=[Replicate()]).to_local()"
        )
    if value.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; expected a dense one (torch.nested.to_padded_tensor(), "
            "with an eval_mask of 0 on the padding)"
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; expected a dense tensor (to_dense())")
    if value.dtype not in dtypes:
        expected = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} has dtype {value.dtype}; expected one of {expected}")
    if not torch.compiler.is_compiling():
        _check_memory(name, value)
        if value.is_floating_point() and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{name} carries a tangent, and forward-mode differentiation (jvp, jacfwd) is not "
                "supported: it would silently be zero. Use reverse mode (backward, grad)"
            )
    return value


def _check_memory(name: str, value: Tensor) -> None:
    """Raises ValueError for a tensor that reaches past its storage, as one whose memory was
    given back does; a kernel, and most of PyTorch, would read what lies behind."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.numel() == 0:
        return  # what a wrapper holds is not in a storage of its own
    try:
        size = value.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # inside vmap and its like
        return
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    needed = (value.storage_offset() + last + 1) * value.element_size()
    if size < needed and not value._is_zerotensor():
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} and reaches to byte {needed} of a storage of "
            f"{size}: its memory was given back (as FSDP does with parameters that it has sharded, "
            "or untyped_storage().resize_()). Gather it again, or pass a copy from before"
        )


def check_number(name: str, value: Any, finite: bool = True) -> float:
    """``value`` as a finite real number, or infinite where that has a meaning.

    Raises:
        TypeError: another type, tensors included: one that is learned would get no gradient.
        ValueError: NaN, or an infinity.
    """
    is_number = isinstance(value, (int, float, numbers.Real))
    if not is_number:
        raise TypeError(
            f"{name} is a {type(value).__name__}; expected a number"
            + (f" ({name}.item())" if isinstance(value, Tensor) else "")
        )
    if torch.compiler.is_compiling():
        return value
    try:
        number = float(value)
    except OverflowError:  # an int
        number = math.inf
    if math.isnan(number) or (finite and math.isinf(number)):
        raise ValueError(f"{name} is {value}; expected a {'finite ' if finite else ''}number")
    return number


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


def check_ids(name: str, value: object) -> Tensor:
    """``value`` as ids in int64: compared with a number that a narrower dtype does not hold, an
    id would be compared with that number's remainder (156 of uint8 with -100).

    Raises:
        TypeError: see :func:`check_tensor`.
    """
    return check_tensor(name, value, INTEGER_DTYPES).to(torch.int64)


def check_mapping(name: str, value: object, origin: str) -> None:
    """Raises TypeError for what is no dict, as ``origin`` gives one."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}; expected the dict that {origin}")


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
    positions ``leading`` ``(B, A, K)``, each with its dtype and shape checked; ids in int64."""
    ids = check_ids("target_ids", attribute(outputs, "target_ids"))
    eval_mask = check_tensor("eval_mask", attribute(outputs, "eval_mask"), MASK_DTYPES)
    keep = check_tensor("block_keep_mask", attribute(outputs, "block_keep_mask"), MASK_DTYPES)
    check_same_shape("target_ids", ids, leading, origin)
    check_same_shape("eval_mask", eval_mask, leading, origin)
    check_same_shape("block_keep_mask", keep, leading[:2], origin)
    if eval_mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "eval_mask requires a gradient, and the loss is not differentiable in its weights; "
            "pass eval_mask.detach()"
        )
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
