"""Per-row cross-entropy and L1 distance, for trainers that weigh and sum rows themselves."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

import dspark_ext.ops  # noqa: F401  (registers the custom ops)
from dspark_ext import _backend, reference
from dspark_ext._validate import (
    INTEGER_DTYPES,
    MASK_DTYPES,
    check_logits,
    check_same_device,
    check_same_shape,
    check_target,
    check_tensor,
    check_vocabulary_shard,
)


def ce_and_l1(
    draft_logits: Tensor,
    target_logits: Tensor,
    target_ids: Tensor,
    *,
    active: Optional[Tensor] = None,
    tp_group: object = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and L1 distance of every row, reading each logit once.

    Args:
        draft_logits: ``[..., V]``, float32, bfloat16, float16 or float64, any strides in the
            leading dimensions. A last dimension that is not contiguous is copied once.
        target_logits: the target model's logits, same shape, any of these dtypes. Gets no
            gradient.
        target_ids: ``[...]`` integers, the label of each row. -100 makes a row's ce 0.
        active: ``[...]`` mask, nonzero where a row counts; other rows are not read (their logits
            and ids may be anything), give 0 and get a zero gradient. Default: all rows.
        tp_group, vocab_start, vocab_size: vocabulary-parallel logits.
        impl: ``"auto"``, ``"kernel"`` or ``"torch"``.

    Returns:
        ``(ce, l1)``, each ``[...]`` in float32 (float64 for float64 drafts): ``ce`` in nats,
        ``l1 = sum |softmax(draft) - softmax(target)|`` in [0, 2] (total variation is ``l1 / 2``).
        Both are differentiable in ``draft_logits``, under independent upstream gradients; the
        backward pass recomputes. The gradient of ``l1`` is the subgradient that is 0 for
        columns where both distributions agree.

    Raises:
        ValueError: shapes that do not belong together, or tensors on different devices.
        TypeError: an unsupported dtype or kind of tensor.
        IndexError: an id outside [0, V) other than -100 on an active row (host tensors).
    """
    draft = check_logits("draft_logits", draft_logits)
    target = check_logits("target_logits", target_logits)
    check_target(draft, target, "draft_logits", "target_logits")
    check_vocabulary_shard(tp_group, vocab_start, vocab_size)
    ids, mask = _check_rows(draft, "draft_logits", target_ids, active)
    check_same_device("draft_logits", draft, target_logits=target)
    return per_row(draft, target, ids, mask, impl)


def l1_distance(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    active: Optional[Tensor] = None,
    tp_group: object = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    impl: str = "auto",
) -> Tensor:
    """L1 distance between the rows' distributions, ``[...]``; see :func:`ce_and_l1`."""
    draft = check_logits("draft_logits", draft_logits)
    target = check_logits("target_logits", target_logits)
    check_target(draft, target, "draft_logits", "target_logits")
    check_vocabulary_shard(tp_group, vocab_start, vocab_size)
    _, mask = _check_rows(draft, "draft_logits", None, active)
    check_same_device("draft_logits", draft, target_logits=target)
    return per_row(draft, target, None, mask, impl)[1]


def token_log_prob(
    logits: Tensor,
    ids: Tensor,
    *,
    active: Optional[Tensor] = None,
    tp_group: object = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    impl: str = "auto",
) -> Tensor:
    """Log-probability of one id per row, ``[...]``, in nats and <= 0; see :func:`ce_and_l1`.

    Rows with id -100, and rows that are not active, give 0.
    """
    logits = check_logits("logits", logits)
    check_vocabulary_shard(tp_group, vocab_start, vocab_size)
    checked_ids, mask = _check_rows(logits, "logits", ids, active, ids_name="ids")
    if not _backend.uses_kernel(impl, logits.device):
        return -per_row(logits, None, checked_ids, mask, impl)[0]
    _, log_prob = torch.ops.dspark_ext.log_softmax_fwd(logits, checked_ids, mask)
    return log_prob


def _check_rows(
    logits: Tensor,
    logits_name: str,
    ids: Optional[Tensor],
    active: Optional[Tensor],
    ids_name: str = "target_ids",
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    leading, origin = tuple(logits.shape[:-1]), f"the leading dimensions of {logits_name}"
    if ids is not None:
        check_tensor(ids_name, ids, INTEGER_DTYPES)
        check_same_shape(ids_name, ids, leading, origin)
    if active is not None:
        check_tensor("active", active, MASK_DTYPES)
        check_same_shape("active", active, leading, origin)
        active = active != 0
    check_same_device(logits_name, logits, **{ids_name: ids, "active": active})
    return ids, active


def per_row(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    impl: str,
) -> tuple[Tensor, Tensor]:
    """``(ce, l1)`` of validated inputs on the recompute path, by kernel or in PyTorch."""
    target = None if target is None else target.detach()
    if _backend.uses_kernel(impl, draft.device):
        return torch.ops.dspark_ext.ce_and_l1_fwd(draft, target, ids, active)[:2]
    if ids is not None and draft.device.type == "cpu" and not torch.compiler.is_compiling():
        _backend.check_ids(ids, active, draft.shape[-1])
    return reference.ce_and_l1(draft, target, ids, active)
