"""The kernels as ``torch.library`` custom ops: schema, fake kernel, autograd.

======================  ===========================================================
``log_softmax_fwd``     row statistics and the log-probability of an id
``l1_distance_fwd``     ``l1`` and the sides of S from known statistics
``ce_and_l1_fwd``       ``ce``, ``l1`` and what their backward needs, at one visit
``ce_and_l1_bwd``       gradient from per-row upstream gradients (recomputes)
``weighted_fwd``        the objective with its gradient, at one visit
``weighted_inplace_``   the same, the gradient written over the draft logits
``weighted_bwd``        that gradient times the upstream scalar, in fresh memory
``weighted_bwd_``       the same in place
``ordered_sum``         sum over the first dimension, in row order
======================  ===========================================================

Ops are registered through :class:`torch.library.Library`, which costs no import of the compiler
at the first call. Per-row tensors have shape ``draft.shape[:-1]``; the target never gets a
gradient.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from dspark_ext import _backend
from dspark_ext._validate import refuse_double_backward
from dspark_ext.reduction import ordered_sum
from dspark_ext.reference import real_dtype

_LIBRARY = torch.library.Library("dspark_ext", "DEF")


def _define(schema: str) -> None:
    # Under torch.compile as well, inputs keep the strides they had: no copy to satisfy an op that
    # takes any.
    _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))


_define(
    "log_softmax_fwd(Tensor logits, Tensor? ids, Tensor? active, Tensor? order=None)"
    " -> (Tensor statistics, Tensor log_prob)"
)
_define(
    "l1_distance_fwd(Tensor draft, Tensor target, Tensor draft_statistics,"
    " Tensor target_statistics, Tensor? active) -> (Tensor l1, Tensor sides)"
)
_define(
    "ce_and_l1_fwd(Tensor draft, Tensor? target, Tensor? ids, Tensor? active)"
    " -> (Tensor ce, Tensor l1, Tensor draft_statistics, Tensor target_statistics, Tensor sides)"
)
_define(
    "ce_and_l1_bwd(Tensor? grad_ce, Tensor? grad_l1, Tensor draft, Tensor? target, Tensor? ids,"
    " Tensor? active, Tensor draft_statistics, Tensor? target_statistics, Tensor? sides) -> Tensor"
)
_define(
    "weighted_fwd(Tensor draft, Tensor? target, Tensor ids, Tensor? active,"
    " Tensor ce_coefficient, Tensor l1_coefficient, bool with_gradient)"
    " -> (Tensor objective, Tensor ce, Tensor l1, Tensor gradient)"
)
_define(
    "weighted_inplace_(Tensor(a!) draft, Tensor? target, Tensor ids, Tensor? active,"
    " Tensor ce_coefficient, Tensor l1_coefficient)"
    " -> (Tensor objective, Tensor ce, Tensor l1)"
)
_define("ordered_sum(Tensor values) -> Tensor")
_define("weighted_bwd(Tensor gradient, Tensor upstream) -> Tensor")
_define("weighted_bwd_(Tensor(a!) gradient, Tensor upstream) -> ()")


def _to_result(draft: Tensor, values: Tensor) -> Tensor:
    return values.to(_backend.result_dtype(draft))


# --- log_softmax ---------------------------------------------------------------------------------


def _log_softmax_fwd(
    logits: Tensor,
    ids: Optional[Tensor],
    active: Optional[Tensor],
    order: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    return _backend.log_softmax(logits, ids, active, order)


def _log_softmax_fwd_fake(
    logits: Tensor,
    ids: Optional[Tensor],
    active: Optional[Tensor],
    order: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    real = real_dtype(logits)
    leading = logits.shape[:-1]
    return (
        logits.new_empty((*leading, 3), dtype=real),
        logits.new_empty(leading if ids is not None else (0,), dtype=real),
    )


def _log_softmax_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    logits, ids, active, _ = inputs
    statistics, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(logits, ids, active, statistics)


def _log_softmax_bwd(ctx: Any, _: None, grad_log_prob: Optional[Tensor]) -> tuple:
    refuse_double_backward("token_log_prob")
    logits, ids, active, statistics = ctx.saved_tensors
    if grad_log_prob is None:
        return None, None, None, None
    grad = torch.ops.dspark_ext.ce_and_l1_bwd(
        -grad_log_prob, None, logits, None, ids, active, statistics, None, None
    )
    return grad, None, None, None


# --- l1_distance from statistics -----------------------------------------------------------------


def _l1_distance_fwd(
    draft: Tensor,
    target: Tensor,
    draft_statistics: Tensor,
    target_statistics: Tensor,
    active: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    l1, sides = _backend.l1_distance(draft, target, draft_statistics, target_statistics, active)
    return _to_result(draft, l1), sides


def _l1_distance_fwd_fake(
    draft: Tensor,
    target: Tensor,
    draft_statistics: Tensor,
    target_statistics: Tensor,
    active: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    leading = draft.shape[:-1]
    return (
        draft.new_empty(leading, dtype=_backend.result_dtype(draft)),
        draft.new_empty((*leading, 2), dtype=real_dtype(draft, target)),
    )


# --- ce_and_l1 -----------------------------------------------------------------------------------


def _ce_and_l1_fwd(
    draft: Tensor, target: Optional[Tensor], ids: Optional[Tensor], active: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ce, l1, draft_statistics, target_statistics, sides = _backend.ce_and_l1(
        draft, target, ids, active
    )
    return (
        _to_result(draft, ce),
        _to_result(draft, l1),
        draft_statistics,
        target_statistics,
        sides,
    )


def _ce_and_l1_fwd_fake(
    draft: Tensor, target: Optional[Tensor], ids: Optional[Tensor], active: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    leading = draft.shape[:-1]
    real = real_dtype(draft, target)
    result = _backend.result_dtype(draft)
    return (
        draft.new_empty(leading, dtype=result),
        draft.new_empty(leading, dtype=result),
        draft.new_empty((*leading, 3), dtype=real),
        draft.new_empty((*leading, 3), dtype=real),
        draft.new_empty((*leading, 2), dtype=real),
    )


def _ce_and_l1_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, draft_statistics, target_statistics, sides = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(draft_statistics, target_statistics, sides)
    ctx.save_for_backward(*inputs, draft_statistics, target_statistics, sides)


def _ce_and_l1_backward(
    ctx: Any, grad_ce: Optional[Tensor], grad_l1: Optional[Tensor], *_: None
) -> tuple:
    refuse_double_backward("ce_and_l1")
    if grad_ce is None and grad_l1 is None:
        return None, None, None, None
    grad = torch.ops.dspark_ext.ce_and_l1_bwd(grad_ce, grad_l1, *ctx.saved_tensors)
    return grad, None, None, None


def _ce_and_l1_bwd(
    grad_ce: Optional[Tensor],
    grad_l1: Optional[Tensor],
    draft: Tensor,
    target: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    draft_statistics: Tensor,
    target_statistics: Optional[Tensor],
    sides: Optional[Tensor],
) -> Tensor:
    return _backend.gradient(
        grad_ce, grad_l1, draft, target, ids, active, draft_statistics, target_statistics, sides
    )


def _ce_and_l1_bwd_fake(
    grad_ce: Optional[Tensor], grad_l1: Optional[Tensor], draft: Tensor, *_: Optional[Tensor]
) -> Tensor:
    return draft.new_empty(draft.shape)


# --- ordered_sum ---------------------------------------------------------------------------------


def _ordered_sum_fake(values: Tensor) -> Tensor:
    return values.new_empty(values.shape[1:])


def _ordered_sum_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.count = inputs[0].shape[0]


def _ordered_sum_backward(ctx: Any, upstream: Tensor) -> Tensor:
    return upstream.expand(ctx.count, *upstream.shape)


# --- weighted ------------------------------------------------------------------------------------


def _objective(ce: Tensor, l1: Tensor, ce_coefficient: Tensor, l1_coefficient: Tensor) -> Tensor:
    return ordered_sum((ce_coefficient * ce + l1_coefficient * l1).reshape(-1))


def _weighted_fwd(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Tensor,
    active: Optional[Tensor],
    ce_coefficient: Tensor,
    l1_coefficient: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradient = _backend.empty_gradient(draft) if with_gradient else None
    ce, l1 = _backend.weighted(draft, target, ids, active, ce_coefficient, l1_coefficient, gradient)
    ce, l1 = _to_result(draft, ce), _to_result(draft, l1)
    objective = _objective(ce, l1, ce_coefficient, l1_coefficient)
    return objective, ce, l1, draft.new_empty(0) if gradient is None else gradient


def _weighted_fwd_fake(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Tensor,
    active: Optional[Tensor],
    ce_coefficient: Tensor,
    l1_coefficient: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result = _backend.result_dtype(draft)
    return (
        draft.new_empty((), dtype=result),
        draft.new_empty(draft.shape[:-1], dtype=result),
        draft.new_empty(draft.shape[:-1], dtype=result),
        draft.new_empty(draft.shape if with_gradient else (0,)),
    )


def _weighted_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, ce, l1, gradient = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(ce, l1, gradient)
    ctx.with_gradient = inputs[-1]
    ctx.save_for_backward(gradient)


def _weighted_backward(ctx: Any, upstream: Optional[Tensor], *_: None) -> tuple:
    refuse_double_backward("compute_dspark_loss")
    if not ctx.with_gradient:
        raise RuntimeError("weighted_fwd ran without with_gradient=True and has no gradient")
    (gradient,) = ctx.saved_tensors
    return apply_upstream(gradient, upstream), None, None, None, None, None, None


def apply_upstream(
    gradient: Tensor, upstream: Optional[Tensor], dtype: Optional[torch.dtype] = None
) -> Optional[Tensor]:
    """A finished gradient times the upstream scalar, in ``dtype`` (default: its own).

    In place, and without touching memory when the scalar is 1, if the engine will not come
    here again; into fresh memory if it might.
    """
    if upstream is None:
        return None
    if dtype not in (None, gradient.dtype) or not _backend.has_kernels(
        gradient.device, gradient.dtype
    ):
        product = gradient.to(real_dtype(gradient)) * upstream
        return product.to(dtype or gradient.dtype)
    traced = torch.compiler.is_compiling() or type(gradient) is not Tensor
    if traced or _engine_keeps_graph():
        return torch.ops.dspark_ext.weighted_bwd(gradient, upstream)
    torch.ops.dspark_ext.weighted_bwd_(gradient, upstream)
    return gradient


def _engine_keeps_graph() -> bool:
    try:
        return torch._C._autograd._get_current_graph_task_keep_graph()
    except (AttributeError, RuntimeError):
        return True


def _weighted_inplace_(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Tensor,
    active: Optional[Tensor],
    ce_coefficient: Tensor,
    l1_coefficient: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    ce, l1 = _backend.weighted(draft, target, ids, active, ce_coefficient, l1_coefficient, draft)
    torch.autograd.graph.increment_version(draft)
    ce, l1 = _to_result(draft, ce), _to_result(draft, l1)
    return _objective(ce, l1, ce_coefficient, l1_coefficient), ce, l1


def _weighted_inplace_fake(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Tensor,
    active: Optional[Tensor],
    ce_coefficient: Tensor,
    l1_coefficient: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    result = _backend.result_dtype(draft)
    leading = draft.shape[:-1]
    return (
        draft.new_empty((), dtype=result),
        draft.new_empty(leading, dtype=result),
        draft.new_empty(leading, dtype=result),
    )


def _weighted_bwd(gradient: Tensor, upstream: Tensor) -> Tensor:
    out = _backend.empty_gradient(gradient)
    _backend.scale(gradient.contiguous(), upstream, out)
    return out


def _weighted_bwd_fake(gradient: Tensor, upstream: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape)


def _weighted_bwd_(gradient: Tensor, upstream: Tensor) -> None:
    _backend.scale(gradient, upstream, gradient)


class WeightedInplace(torch.autograd.Function):
    """``weighted_inplace_`` with autograd: the gradient lives in the draft logits' storage.

    torch.library takes no autograd formula for an op that mutates its arguments. The draft keeps
    its own history, so the gradient flows on to whatever produced it; the bumped version
    counter makes autograd raise for an operation that saved the logits before.
    """

    @staticmethod
    def forward(
        ctx: Any,
        draft: Tensor,
        target: Optional[Tensor],
        ids: Tensor,
        active: Optional[Tensor],
        ce_coefficient: Tensor,
        l1_coefficient: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        objective, ce, l1 = torch.ops.dspark_ext.weighted_inplace_(
            draft, target, ids, active, ce_coefficient, l1_coefficient
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ce, l1)
        ctx.save_for_backward(draft.detach())
        return objective, ce, l1

    @staticmethod
    def backward(ctx: Any, upstream: Optional[Tensor], *_: None) -> tuple:
        refuse_double_backward("compute_dspark_loss")
        (gradient,) = ctx.saved_tensors
        return apply_upstream(gradient, upstream), None, None, None, None, None


for _name, _body, _fake in (
    ("log_softmax_fwd", _log_softmax_fwd, _log_softmax_fwd_fake),
    ("l1_distance_fwd", _l1_distance_fwd, _l1_distance_fwd_fake),
    ("ce_and_l1_fwd", _ce_and_l1_fwd, _ce_and_l1_fwd_fake),
    ("ce_and_l1_bwd", _ce_and_l1_bwd, _ce_and_l1_bwd_fake),
    ("weighted_fwd", _weighted_fwd, _weighted_fwd_fake),
    ("weighted_inplace_", _weighted_inplace_, _weighted_inplace_fake),
    ("weighted_bwd", _weighted_bwd, _weighted_bwd_fake),
    ("ordered_sum", _backend.ordered_sum, _ordered_sum_fake),
    ("weighted_bwd_", _weighted_bwd_, lambda gradient, upstream: None),
):
    _LIBRARY.impl(_name, _body, "CPU")
    if _backend.cuda_architectures() is not None:
        _LIBRARY.impl(_name, _body, "CUDA")
    torch.library.register_fake(f"dspark_ext::{_name}", _fake, lib=_LIBRARY)

for _name, _backward, _setup in (
    ("log_softmax_fwd", _log_softmax_bwd, _log_softmax_setup),
    ("ce_and_l1_fwd", _ce_and_l1_backward, _ce_and_l1_setup),
    ("weighted_fwd", _weighted_backward, _weighted_setup),
    ("ordered_sum", _ordered_sum_backward, _ordered_sum_setup),
):
    torch.library.register_autograd(
        f"dspark_ext::{_name}", _backward, setup_context=_setup, lib=_LIBRARY
    )
