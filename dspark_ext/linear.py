"""The objective from hidden states: the output heads' logits exist a chunk of rows at a time.

Per chunk of rows: the draft head's product and the teacher's into a buffer (as one product if
they share the head), one kernel visit that writes the gradient over the draft logits, and from
there the gradients of hidden states, head and Markov factors. Each product is taken once, in the
forward pass; backward only scales. Positions that are not supervised are left out before the
first product.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional, Union, overload

import torch
from torch import Tensor

from dspark_ext import _backend, ops
from dspark_ext._validate import (
    LOGIT_DTYPES,
    check_logits,
    check_number,
    check_positions,
    check_same_device,
    check_same_shape,
    check_tensor,
    refuse_double_backward,
)
from dspark_ext.distributed import data_parallel
from dspark_ext.loss import (
    _build_loss_weight_mask,
    _confidence_num,
    _global_denominator,
    _inverse,
    _local_terms,
    _returned_terms,
    _row_coefficients,
    _supervised,
)
from dspark_ext.reduction import ordered_sum
from dspark_ext.rowwise import rows_forward, rows_gradient
from dspark_ext.vocab_parallel import VocabularyShard, find_shard, first_column

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from dspark_ext.loss import Options

    class LinearOptions(Options, total=False):
        chunk_rows: Optional[int]


__all__ = ["DSparkLinearOutput", "compute_dspark_linear_loss"]

# The logits' buffers of one chunk fill about this much memory. Rows come in multiples of 128, and
# on a GPU never fewer than 512: below that a product is bound by reading the head again.
_CHUNK_BYTES = {"cpu": 64 << 20}
_CHUNK_BYTES_ELSEWHERE = 512 << 20
_ROW_MULTIPLE = 128
_MIN_ROWS_ELSEWHERE = 512

# Columns of a low-precision gradient that are widened at a time to be accumulated in fp32.
_WIDENED_COLUMNS = 8192

# Columns of logits that a product on the CPU computes at a time, for each thread. A chunk's few
# rows do not hide how a BLAS rearranges a whole head; it rearranges this much within the caches.
_PRODUCT_COLUMNS = 4096


@dataclasses.dataclass
class DSparkLinearOutput:
    """What a drafter hands to the loss in place of logits. Any object with these attributes
    will do; the optional ones may be missing.

    Draft logits are ``softcap(draft_hidden @ lm_head_weight.T + lm_head_bias) + markov_features
    @ markov_weight.T``; the teacher's are either given, or ``softcap(target_hidden @
    target_lm_head_weight.T + target_lm_head_bias)``.

    Attributes:
        draft_hidden: ``[B, A, K, H]``, in the dtype of ``lm_head_weight`` (or any, under
            autocast).
        lm_head_weight: ``[V, H]``.
        target_ids, eval_mask, block_keep_mask, confidence_pred: as in
            :class:`dspark_ext.DSparkForwardOutput`.
        markov_features: ``[B, A, K, R]``, what a vanilla, gated or RNN Markov head makes of the
            previous tokens, or None.
        markov_weight: ``[V, R]``; with ``markov_features``.
        target_hidden: ``[B, A, K, Ht]``, the target's last hidden states, or None.
        target_lm_head_weight: ``[V, Ht]``; default: ``lm_head_weight`` (with its bias).
        aligned_target_logits: ``[B, A, K, V]`` instead of ``target_hidden``, or None.
        lm_head_bias, target_lm_head_bias: ``[V]`` or None.
        final_logit_softcap: ``c`` of ``c * tanh(z / c)``, or None.
    """

    draft_hidden: Tensor
    lm_head_weight: Tensor
    target_ids: Tensor
    eval_mask: Tensor
    block_keep_mask: Tensor
    confidence_pred: Optional[Tensor] = None
    markov_features: Optional[Tensor] = None
    markov_weight: Optional[Tensor] = None
    target_hidden: Optional[Tensor] = None
    target_lm_head_weight: Optional[Tensor] = None
    aligned_target_logits: Optional[Tensor] = None
    lm_head_bias: Optional[Tensor] = None
    target_lm_head_bias: Optional[Tensor] = None
    final_logit_softcap: Optional[float] = None


@overload
def compute_dspark_linear_loss(
    *, return_terms: Literal[False] = False, **options: Unpack[LinearOptions]
) -> Tensor: ...


@overload
def compute_dspark_linear_loss(
    *, return_terms: Literal[True], **options: Unpack[LinearOptions]
) -> tuple[Tensor, dict[str, Tensor]]: ...


@overload
def compute_dspark_linear_loss(
    *, return_terms: bool, **options: Unpack[LinearOptions]
) -> Union[Tensor, tuple[Tensor, dict[str, Tensor]]]: ...


def compute_dspark_linear_loss(
    *,
    outputs: Any,
    loss_decay_gamma: Optional[float],
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
    return_terms: bool = False,
    process_group: Optional[ProcessGroup] = None,
    grad_reduction: str = "mean",
    denominators: Optional[Tensor] = None,
    tp_group: Optional[ProcessGroup] = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    inplace_grad: bool = False,
    impl: str = "auto",
    chunk_rows: Optional[int] = None,
) -> Union[Tensor, tuple[Tensor, dict[str, Tensor]]]:
    """:func:`dspark_ext.compute_dspark_loss` from hidden states and head weights.

    The value and every gradient are those of the loss on materialised logits, but logits exist
    only for ``chunk_rows`` rows at a time. The forward pass takes each matrix product once and
    forms the gradients with respect to hidden states, head weight and bias, Markov features and
    Markov weight, where those require one; backward scales them. Weight gradients are
    accumulated in fp32. Nothing of the teacher gets a gradient.

    Args:
        outputs: a :class:`DSparkLinearOutput`, or any object with its attributes.
        loss_decay_gamma, ce_loss_alpha, l1_loss_alpha, confidence_head_alpha, return_terms,
            process_group, grad_reduction, denominators, impl: as in
            :func:`dspark_ext.compute_dspark_loss`.
        tp_group: ``lm_head_weight``, ``target_lm_head_weight``, ``markov_weight`` and the biases
            are this rank's rows of a column-parallel head (or DTensors with ``Shard(0)`` over
            this group); hidden states are whole, and so are their gradients, which are summed
            over the group in forward. Two small collectives a chunk.
        vocab_start, vocab_size: as in :func:`dspark_ext.ce_and_l1`.
        inplace_grad: accepted for the common signature; logits are overwritten here in any case.
        chunk_rows: rows per chunk; default: what fills a memory budget.

    Returns:
        ``loss``, or ``(loss, terms)``, as :func:`dspark_ext.compute_dspark_loss`.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as
            :func:`dspark_ext.compute_dspark_loss`.
    """
    if grad_reduction not in ("mean", "sum"):
        raise ValueError(f"grad_reduction is {grad_reduction!r}; expected 'mean' or 'sum'")
    if chunk_rows is not None:
        if not isinstance(chunk_rows, int):
            raise TypeError(f"chunk_rows is a {type(chunk_rows).__name__}; expected an int or None")
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows is {chunk_rows}; expected at least 1, or None")
    ce_loss_alpha = check_number("ce_loss_alpha", ce_loss_alpha)
    l1_loss_alpha = check_number("l1_loss_alpha", l1_loss_alpha)
    confidence_head_alpha = check_number("confidence_head_alpha", confidence_head_alpha)
    inputs = _checked(outputs, l1_loss_alpha > 0, tp_group)
    head = outputs.lm_head_weight
    if tp_group is not None and vocab_start is None and hasattr(head, "placements"):
        vocab_start = first_column(head.shape[0], tp_group)
    shard = find_shard(inputs.weight.shape[0], tp_group, vocab_start, vocab_size)
    if shard is None:
        _backend.check_ids(inputs.ids, _supervised(inputs), inputs.weight.shape[0])
    ranks = data_parallel(process_group, tp_group)
    world_size = ranks.size if grad_reduction == "mean" else 1
    dtypes = [inputs.dtype, *(t.dtype for t in (inputs.target_logits,) if t is not None)]
    use_kernel = _backend.uses_kernel(impl, inputs.hidden.device, *dtypes)
    weights = _build_loss_weight_mask(
        eval_mask=inputs.eval_mask,
        block_size=inputs.eval_mask.shape[-1],
        device=inputs.hidden.device,
        loss_decay_gamma=loss_decay_gamma,
        dtype=_backend.result_dtype(inputs.hidden),
    )
    inverse = _inverse(_global_denominator(weights, denominators, ranks))
    ce_coefficient, l1_coefficient = _row_coefficients(
        weights, inverse, world_size, ce_loss_alpha, l1_loss_alpha
    )
    has_l1 = inputs.has_teacher and (l1_loss_alpha > 0 or inputs.confidence_pred is not None)
    objective, ce, l1 = _run(
        inputs, has_l1, ce_coefficient, l1_coefficient, use_kernel, shard, chunk_rows
    )
    confidence_num = _confidence_num(inputs, l1, weights)
    loss = torch.addcmul(
        objective, confidence_num, inverse, value=world_size * confidence_head_alpha
    )
    if not return_terms:
        return loss
    terms = _local_terms(inputs, weights, ce, l1, l1_loss_alpha, confidence_num)
    return loss, _returned_terms(terms, ce_loss_alpha, l1_loss_alpha, confidence_head_alpha)


# --- Arguments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Checked outputs with rows flattened to ``[N, .]``; masks and ids also as they came."""

    hidden: Tensor
    weight: Tensor
    bias: Optional[Tensor]
    markov_features: Optional[Tensor]
    markov_weight: Optional[Tensor]
    target_hidden: Optional[Tensor]
    target_weight: Optional[Tensor]
    target_bias: Optional[Tensor]
    target_logits: Optional[Tensor]
    softcap: Optional[float]
    ids: Tensor
    eval_mask: Tensor
    block_keep_mask: Tensor
    confidence_pred: Optional[Tensor]
    dtype: torch.dtype  # of the products, and so of the logits
    shares_head: bool  # the teacher's logits are the draft head's, bias included

    @property
    def has_teacher(self) -> bool:
        return self.target_hidden is not None or self.target_logits is not None


def _checked(outputs: Any, wants_l1: bool, tp_group: Optional[ProcessGroup]) -> _Inputs:
    def optional(name: str) -> Any:
        return getattr(outputs, name, None)

    hidden = check_tensor("draft_hidden", outputs.draft_hidden, LOGIT_DTYPES)
    if hidden.dim() != 4:
        raise ValueError(f"draft_hidden has shape {tuple(hidden.shape)}; expected [B, A, K, H]")
    leading = tuple(hidden.shape[:-1])
    origin = f"draft_hidden {tuple(hidden.shape)}"
    weight = _weight("lm_head_weight", outputs.lm_head_weight, hidden.shape[-1], origin, tp_group)
    columns = weight.shape[0]
    if columns == 0 and tp_group is None:
        raise ValueError(
            f"lm_head_weight has shape {tuple(weight.shape)}; expected [V, H] with at least one row"
        )
    head = f"lm_head_weight {tuple(weight.shape)}"
    bias = _vector("lm_head_bias", optional("lm_head_bias"), columns, head, tp_group)

    ids, eval_mask, keep, confidence = check_positions(
        outputs, optional("confidence_pred"), leading, origin
    )

    features, markov_weight = optional("markov_features"), optional("markov_weight")
    if (features is None) != (markov_weight is None):
        raise ValueError("markov_features and markov_weight belong together; one of them is None")
    if features is not None:
        features = check_tensor("markov_features", features, LOGIT_DTYPES)
        check_same_shape("markov_features", features, (*leading, *features.shape[-1:]), origin)
        markov_weight = _weight(
            "markov_weight",
            markov_weight,
            features.shape[-1],
            f"markov_features {tuple(features.shape)}",
            tp_group,
            rows=columns,
        )

    target_hidden, target_logits = optional("target_hidden"), optional("aligned_target_logits")
    target_weight = target_bias = None
    shares_head = False
    if target_hidden is not None and target_logits is not None:
        raise ValueError(
            "both target_hidden and aligned_target_logits are given; the teacher is one of them"
        )
    if target_logits is not None:
        target_logits = check_logits("aligned_target_logits", target_logits, tp_group is not None)
        check_same_shape(
            "aligned_target_logits", target_logits, (*leading, columns), f"{origin} and {head}"
        )
        target_logits = target_logits.detach()
    elif target_hidden is not None:
        target_hidden = check_tensor("target_hidden", target_hidden, LOGIT_DTYPES).detach()
        check_same_shape(
            "target_hidden", target_hidden, (*leading, *target_hidden.shape[-1:]), origin
        )
        width = target_hidden.shape[-1]
        target_weight, target_bias = optional("target_lm_head_weight"), None
        if target_weight is None:
            if width != weight.shape[1]:
                raise ValueError(
                    f"target_hidden has width {width} and lm_head_weight {weight.shape[1]}; pass "
                    "target_lm_head_weight for a teacher with a head of its own"
                )
            target_weight, target_bias = weight, bias
        else:
            target_weight = _weight(
                "target_lm_head_weight",
                target_weight,
                width,
                f"target_hidden {tuple(target_hidden.shape)}",
                tp_group,
                rows=columns,
            )
        own_bias = _vector(
            "target_lm_head_bias", optional("target_lm_head_bias"), columns, head, tp_group
        )
        target_bias = target_bias if own_bias is None else own_bias
        shares_head = target_weight is weight and target_bias is bias
        target_weight = target_weight.detach()
        target_bias = None if target_bias is None else target_bias.detach()
    elif wants_l1 or confidence is not None:
        wanted = "l1_loss_alpha > 0" if wants_l1 else "confidence_pred"
        raise ValueError(
            f"{wanted} needs a teacher: pass target_hidden (with target_lm_head_weight if its "
            "head is another) or aligned_target_logits"
        )
    softcap = optional("final_logit_softcap")
    if softcap is not None:
        softcap = check_number("final_logit_softcap", softcap)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"final_logit_softcap is {softcap}; expected a positive number or None")
    check_same_device(
        "draft_hidden",
        hidden,
        lm_head_weight=weight,
        lm_head_bias=bias,
        target_ids=ids,
        eval_mask=eval_mask,
        block_keep_mask=keep,
        confidence_pred=confidence,
        markov_features=features,
        markov_weight=markov_weight,
        target_hidden=target_hidden,
        target_lm_head_weight=target_weight,
        target_lm_head_bias=target_bias,
        aligned_target_logits=target_logits,
    )
    return _Inputs(
        hidden=hidden,
        weight=weight,
        bias=bias,
        markov_features=features,
        markov_weight=markov_weight,
        target_hidden=target_hidden,
        target_weight=target_weight,
        target_bias=target_bias,
        target_logits=target_logits,
        softcap=softcap,
        ids=ids,
        eval_mask=eval_mask,
        block_keep_mask=keep,
        confidence_pred=confidence,
        dtype=_product_dtype(
            hidden,
            lm_head_weight=weight,
            lm_head_bias=bias,
            markov_features=features,
            markov_weight=markov_weight,
            target_hidden=target_hidden,
            target_lm_head_weight=target_weight,
            target_lm_head_bias=target_bias,
        ),
        shares_head=shares_head,
    )


def _weight(
    name: str,
    value: Any,
    width: int,
    origin: str,
    tp_group: Optional[ProcessGroup],
    rows: Optional[int] = None,
) -> Tensor:
    """A head ``[V, width]``; of a DTensor sharded over ``tp_group``, the local rows."""
    if hasattr(value, "placements"):
        value = _local_rows(name, value, tp_group)
    weight = check_tensor(name, value, LOGIT_DTYPES)
    if weight.dim() != 2 or weight.shape[1] != width or rows not in (None, weight.shape[0]):
        expected = f"[{'V' if rows is None else rows}, {width}]"
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; expected {expected}, from {origin}"
        )
    return weight


def _local_rows(name: str, weight: Any, tp_group: Optional[ProcessGroup]) -> Tensor:
    placements = tuple(weight.placements)
    if tp_group is None or len(placements) != 1 or not placements[0].is_shard(0):
        raise TypeError(
            f"{name} is a DTensor with placements {placements}. If FSDP sharded it, unshard its "
            f"module first (module.unshard(), or {name}.full_tensor()) and pass the whole weight; "
            "if it is column-parallel, pass tp_group and a weight with Shard(0) over that group"
        )
    mesh_ranks = torch.distributed.get_process_group_ranks(weight.device_mesh.get_group())
    if mesh_ranks != torch.distributed.get_process_group_ranks(tp_group):
        raise TypeError(
            f"{name} is sharded over ranks {mesh_ranks}, which are not the ranks of tp_group"
        )
    local: Tensor = weight.to_local()
    return local


def _vector(
    name: str,
    value: Optional[Tensor],
    size: int,
    origin: str,
    tp_group: Optional[ProcessGroup],
) -> Optional[Tensor]:
    """A bias ``[size]``; of a DTensor sharded over ``tp_group``, the local part."""
    if hasattr(value, "placements"):
        value = _local_rows(name, value, tp_group)
    if value is not None:
        check_tensor(name, value, LOGIT_DTYPES)
        check_same_shape(name, value, (size,), origin)
    return value


def _product_dtype(hidden: Tensor, **others: Optional[Tensor]) -> torch.dtype:
    """The dtype the heads' products are taken in: autocast's, else that of all operands."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{name} has dtype {tensor.dtype} and draft_hidden {hidden.dtype}; convert one of "
                "them, or call under torch.autocast"
            )
    return hidden.dtype


# --- Chunks -------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What steers the computation and is not differentiated."""

    softcap: Optional[float]
    dtype: torch.dtype
    use_kernel: bool
    shard: Optional[VocabularyShard]
    chunk_rows: int
    shares_head: bool  # of teacher and draft
    # Which gradients are wanted, in the order of the first five arguments of _LinearRows.
    wanted: tuple[bool, ...]


def _run(
    inputs: _Inputs,
    has_l1: bool,
    ce_coefficient: Tensor,
    l1_coefficient: Tensor,
    use_kernel: bool,
    shard: Optional[VocabularyShard],
    chunk_rows: Optional[int],
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """``sum(a * ce + b * l1)``, differentiable, the rows' ce and, where there is one, l1, both
    ``[B, A, K]``."""
    weight, bias, markov_weight = inputs.weight, inputs.bias, inputs.markov_weight
    teacher, target_weight, target_bias = (
        (inputs.target_hidden, inputs.target_weight, inputs.target_bias)
        if inputs.target_logits is None
        else (inputs.target_logits, None, None)
    )
    shares_head = inputs.shares_head and has_l1
    if not has_l1:
        teacher = target_weight = target_bias = None
    if shard is not None:  # rows of the heads past the vocabulary are padding
        weight = weight[: shard.columns]
        bias, markov_weight, target_weight, target_bias = (
            None if t is None else t[: shard.columns]
            for t in (bias, markov_weight, target_weight, target_bias)
        )
        if teacher is not None and target_weight is None:
            teacher = teacher[..., : shard.columns]
    differentiable = (
        _flat(inputs.hidden),
        weight,
        bias,
        _flat(inputs.markov_features),
        markov_weight,
    )
    grad_mode = torch.is_grad_enabled()
    wanted = tuple(grad_mode and t is not None and t.requires_grad for t in differentiable)
    buffers = 1 + (teacher is not None) + (inputs.softcap is not None)
    row_bytes = buffers * weight.shape[0] * inputs.dtype.itemsize
    options = _Options(
        inputs.softcap,
        inputs.dtype,
        use_kernel,
        shard,
        chunk_rows or _default_chunk_rows(row_bytes, inputs.hidden.device.type, shard),
        shares_head,
        wanted,
    )
    objective, ce, l1 = _LinearRows.apply(
        *differentiable,
        teacher,
        target_weight,
        target_bias,
        inputs.ids.reshape(-1),
        _supervised(inputs).reshape(-1),
        ce_coefficient.reshape(-1),
        l1_coefficient.reshape(-1),
        options,
    )
    leading = inputs.ids.shape
    return objective, ce.reshape(leading), l1.reshape(leading) if has_l1 else None


def _flat(rows: Optional[Tensor]) -> Optional[Tensor]:
    return None if rows is None else rows.flatten(0, -2)


def _default_chunk_rows(row_bytes: int, device: str, shard: Optional[VocabularyShard]) -> int:
    if shard is not None:
        # Every rank must take the same chunks, and shards may differ in size.
        return _MIN_ROWS_ELSEWHERE
    rows = _CHUNK_BYTES.get(device, _CHUNK_BYTES_ELSEWHERE) // max(row_bytes, 1)
    rows = rows // _ROW_MULTIPLE * _ROW_MULTIPLE
    return max(rows, _ROW_MULTIPLE if device == "cpu" else _MIN_ROWS_ELSEWHERE)


class _LinearRows(torch.autograd.Function):
    """The chunks, as one differentiable function of hidden states, head and Markov factors."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        markov_features: Optional[Tensor],
        markov_weight: Optional[Tensor],
        teacher: Optional[Tensor],
        target_weight: Optional[Tensor],
        target_bias: Optional[Tensor],
        ids: Tensor,
        active: Tensor,
        ce_coefficient: Tensor,
        l1_coefficient: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        differentiable = (hidden, weight, bias, markov_features, markov_weight)
        # The products below are taken in options.dtype, which already honours autocast.
        with torch.autocast(hidden.device.type, enabled=False):
            if options.shares_head:
                target_weight = target_bias = None  # or autocast would convert them again
            heads = _Heads(
                options,
                weight.to(options.dtype),
                *(
                    None if t is None else t.to(options.dtype)
                    for t in (bias, markov_weight, target_weight, target_bias)
                ),
            )
            gradients = _Gradients(differentiable, options)
            scale = _gradient_scale(ce_coefficient, l1_coefficient, options.dtype)
            ce, l1 = _chunks(
                heads,
                gradients,
                _Rows(hidden, markov_features, teacher, ids, active, options.dtype),
                (ce_coefficient * scale, l1_coefficient * scale),
                options,
            )
            saved = gradients.finished(scale)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ce, l1)
        ctx.save_for_backward(*saved)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in differentiable)
        return ordered_sum(ce_coefficient * ce + l1_coefficient * l1), ce, l1

    @staticmethod
    def backward(ctx: Any, upstream: Optional[Tensor], *_: None) -> tuple:
        refuse_double_backward("compute_dspark_linear_loss")
        scaled = [
            None if gradient is None else ops.apply_upstream(gradient, upstream, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return (*scaled, *(None,) * 8)


def _gradient_scale(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A power of two that lifts an fp16 gradient of the logits clear of fp16's underflow.

    It is divided out again in fp32. Other dtypes have the range and get 1.
    """
    one = a.new_ones(())
    if dtype != torch.float16 or a.numel() == 0:
        return one
    largest = torch.maximum(a.abs().amax(), b.abs().amax())
    return torch.where(largest > 0, torch.exp2(10 - torch.ceil(torch.log2(largest))), one)


class _Rows:
    """The operands that have rows, and how a chunk of supervised rows is taken from them."""

    def __init__(
        self,
        hidden: Tensor,
        markov_features: Optional[Tensor],
        teacher: Optional[Tensor],
        ids: Tensor,
        active: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.hidden, self.markov_features, self.teacher = hidden, markov_features, teacher
        self.ids, self.active, self.dtype = ids, active, dtype
        self.index: Optional[Tensor] = None
        # Leaving rows out takes their number, which only the host can know for free. Where it
        # would have to ask a device, or a tracer, all rows are computed and masked instead.
        if _backend.on_host(active) and not torch.compiler.is_compiling():
            index = active.nonzero().squeeze(1)
            self.index = index if index.numel() < active.numel() else None
            self.masked = False
        else:
            self.masked = True
        self.count = active.numel() if self.index is None else self.index.numel()

    def chunk(self, begin: int, end: int) -> Union[slice, Tensor]:
        return slice(begin, end) if self.index is None else self.index[begin:end]

    def operand(self, rows: Optional[Tensor], chunk: Union[slice, Tensor]) -> Optional[Tensor]:
        """Rows of hidden states or features in the products' dtype, zero where inactive: what a
        position without supervision holds may be NaN, and 0 * NaN is not 0."""
        if rows is None:
            return None
        taken = rows[chunk].to(self.dtype)
        return torch.where(self.active[chunk].unsqueeze(-1), taken, 0) if self.masked else taken

    def teacher_rows(self, chunk: Union[slice, Tensor]) -> Optional[Tensor]:
        if self.teacher is None:
            return None
        leading, width = self.teacher.shape[:-1], self.teacher.shape[-1]
        if self.teacher.is_contiguous():
            return self.teacher.view(leading.numel(), width)[chunk]
        if isinstance(chunk, slice):
            chunk = torch.arange(chunk.start, chunk.stop, device=self.teacher.device)
        return self.teacher[torch.unravel_index(chunk, leading)]


class _Heads:
    """Logits of a chunk from its hidden states, in a buffer that every chunk reuses."""

    def __init__(
        self,
        options: _Options,
        weight: Tensor,
        bias: Optional[Tensor],
        markov_weight: Optional[Tensor],
        target_weight: Optional[Tensor],
        target_bias: Optional[Tensor],
    ) -> None:
        self.softcap, self.shares_head = options.softcap, options.shares_head
        self.weight, self.bias, self.markov_weight = weight, bias, markov_weight
        self.target_weight, self.target_bias = target_weight, target_bias

    def buffer(self, rows: int) -> Tensor:
        """Room for the logits of ``rows`` rows, the teacher's too if they are computed."""
        computed = 1 + (self.shares_head or self.target_weight is not None)
        return self.weight.new_empty((computed * rows, self.weight.shape[0]))

    def logits(
        self,
        hidden: Tensor,
        features: Optional[Tensor],
        teacher: Optional[Tensor],
        buffer: Tensor,
    ) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """The draft's logits, with a softcap a copy of the head's part of them, and the
        teacher's, from its hidden states unless it has logits already."""
        rows = hidden.shape[0]
        own, others = buffer[:rows], buffer[rows : 2 * rows]
        if self.shares_head and teacher is not None:
            # One product, so that the head is read, and rearranged by a BLAS, once for both.
            both = torch.cat([hidden, teacher.to(hidden.dtype)])
            self._product(both, self.weight, self.bias, buffer[: 2 * rows])
            teacher = others
        else:
            self._product(hidden, self.weight, self.bias, own)
            if teacher is not None and self.target_weight is not None:
                teacher = teacher.to(hidden.dtype)
                teacher = self._product(teacher, self.target_weight, self.target_bias, others)
        capped = None if self.softcap is None else own.clone()
        if features is not None and self.markov_weight is not None:
            own.addmm_(features, self.markov_weight.t())
        return own, capped, teacher

    def _product(
        self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], out: Tensor
    ) -> Tensor:
        step = max(weight.shape[0], 1)
        if _on_wide_cpu(weight) and not torch.compiler.is_compiling():
            step = _PRODUCT_COLUMNS * torch.get_num_threads()
        for begin in range(0, weight.shape[0], step):
            columns = slice(begin, begin + step)
            if bias is None:
                torch.mm(hidden, weight[columns].t(), out=out[:, columns])
            else:
                torch.addmm(bias[columns], hidden, weight[columns].t(), out=out[:, columns])
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out


class _Gradients:
    """Gradients of the operands, gathered over the chunks; those of weights in fp32."""

    def __init__(self, operands: tuple[Optional[Tensor], ...], options: _Options) -> None:
        self.options = options
        self.any_wanted = any(options.wanted)
        self.dtypes = tuple(None if t is None else t.dtype for t in operands)
        narrow = options.dtype in (torch.bfloat16, torch.float16)
        wide = torch.float32 if narrow else options.dtype
        # An fp16 gradient waits in fp32 for the upstream factor, which undoes a loss scale.
        rows = wide if options.dtype == torch.float16 or options.shard else options.dtype
        dtypes = (rows, wide, wide, rows, wide)
        self.hidden, self.weight, self.bias, self.features, self.markov_weight = (
            torch.zeros(operand.shape, dtype=dtype, device=operand.device)
            if operand is not None and wanted
            else None
            for operand, dtype, wanted in zip(operands, dtypes, options.wanted)
        )

    def add(
        self,
        gradient: Tensor,
        capped: Optional[Tensor],
        hidden: Tensor,
        features: Optional[Tensor],
        chunk: Union[slice, Tensor],
        heads: _Heads,
    ) -> None:
        """One chunk's gradient of the draft logits; ``gradient`` is overwritten."""
        if self.features is not None and heads.markov_weight is not None:
            self.features[chunk] = _back(gradient, heads.markov_weight).to(self.features.dtype)
        if self.markov_weight is not None and features is not None:
            _add_product(self.markov_weight, gradient, features)
        if capped is not None and heads.softcap is not None:
            # d(c tanh(z / c))/dz = 1 - tanh(z / c)^2
            gradient.mul_(capped.div_(heads.softcap).square_().neg_().add_(1))
        if self.hidden is not None:
            self.hidden[chunk] = _back(gradient, heads.weight).to(self.hidden.dtype)
        if self.weight is not None:
            _add_product(self.weight, gradient, hidden)
        if self.bias is not None:
            self.bias += gradient.sum(dim=0, dtype=self.bias.dtype)

    def finished(self, scale: Tensor) -> tuple[Optional[Tensor], ...]:
        """The gradients without the fp16 scale, those of rows summed over the vocabulary's
        ranks, each in its operand's dtype but for fp16."""
        shard = self.options.shard
        if shard is not None:
            rows = [t for t in (self.hidden, self.features) if t is not None]
            if rows:
                total = shard.all_reduce_sum(torch.cat(rows, dim=-1))
                parts = iter(total.split([t.shape[-1] for t in rows], dim=-1))
                self.hidden = None if self.hidden is None else next(parts)
                self.features = None if self.features is None else next(parts)
        result = []
        gathered = (self.hidden, self.weight, self.bias, self.features, self.markov_weight)
        for gradient, dtype in zip(gathered, self.dtypes):
            if gradient is not None and self.options.dtype == torch.float16:
                gradient = gradient / scale
            if gradient is not None and dtype != torch.float16:
                gradient = gradient.to(dtype).contiguous()
            result.append(gradient)
        return tuple(result)


def _on_wide_cpu(weight: Tensor) -> bool:
    """Whether a BLAS rearranges the second operand of a product, which then should be small.
    The CPU's kernels for half precision do not gain from it."""
    return _backend.on_host(weight) and weight.dtype in (torch.float32, torch.float64)


def _back(gradient: Tensor, weight: Tensor) -> Tensor:
    """``gradient @ weight``, on the CPU with the few rows as the second operand."""
    if _on_wide_cpu(weight):
        return (weight.t() @ gradient.t()).t()
    return gradient @ weight


def _add_product(total: Tensor, gradient: Tensor, operand: Tensor) -> None:
    """``total += gradient.T @ operand`` without rounding a narrow product on the way."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), operand)
        return
    operand = operand.to(total.dtype)
    for begin in range(0, total.shape[0], _WIDENED_COLUMNS):
        columns = gradient[:, begin : begin + _WIDENED_COLUMNS]
        total[begin : begin + _WIDENED_COLUMNS].addmm_(columns.to(total.dtype).t(), operand)


def _chunks(
    heads: _Heads,
    gradients: _Gradients,
    rows: _Rows,
    coefficients: tuple[Tensor, Tensor],
    options: _Options,
) -> tuple[Tensor, Tensor]:
    """``ce`` and ``l1`` of every row, ``[N]``, and the gradients along the way."""
    result = _backend.result_dtype(heads.weight)
    ce = torch.zeros(rows.active.shape, dtype=result, device=rows.active.device)
    l1 = torch.zeros_like(ce)
    size = min(options.chunk_rows, rows.count)
    buffer = heads.buffer(size)
    for begin in range(0, rows.count, max(size, 1)):
        end = min(begin + size, rows.count)
        chunk = rows.chunk(begin, end)
        hidden = rows.operand(rows.hidden, chunk)
        features = rows.operand(rows.markov_features, chunk)
        assert hidden is not None
        teacher = rows.teacher_rows(chunk)
        draft, capped, teacher = heads.logits(hidden, features, teacher, buffer)
        a, b = (values[chunk] for values in coefficients)
        active = rows.active[chunk] if rows.masked else None
        ce[chunk], l1[chunk], gradient = _rows_and_gradient(
            draft, teacher, rows.ids[chunk], active, a, b, gradients.any_wanted, options
        )
        if gradient is not None:
            gradients.add(gradient, capped, hidden, features, chunk, heads)
    return ce, l1


def _rows_and_gradient(
    draft: Tensor,
    teacher: Optional[Tensor],
    ids: Tensor,
    active: Optional[Tensor],
    a: Tensor,
    b: Tensor,
    wants_gradient: bool,
    options: _Options,
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """``ce``, ``l1`` and the gradient of a chunk: over the draft logits at one kernel visit, or
    step by step where there is no such kernel or the vocabulary is sharded."""
    if options.use_kernel and options.shard is None:
        if not wants_gradient:
            _, ce, l1, _ = torch.ops.dspark_ext.weighted_fwd(
                draft, teacher, ids, active, a, b, False
            )
            return ce, l1, None
        _, ce, l1 = torch.ops.dspark_ext.weighted_inplace_(draft, teacher, ids, active, a, b)
        return ce, l1, draft
    ce, l1, saved = rows_forward(draft, teacher, ids, active, options.use_kernel, options.shard)
    gradient = None
    if wants_gradient:
        gradient = rows_gradient(a, b, draft, teacher, active, saved, options.use_kernel)
    return ce, l1, gradient
