"""Per-row cross-entropy and L1 distance, for trainers that weigh and sum rows themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor

import dspark_ext.ops  # noqa: F401  (registers the custom ops)
from dspark_ext import _backend, reference
from dspark_ext._validate import (
    MASK_DTYPES,
    check_ids,
    check_logits,
    check_same_device,
    check_same_shape,
    check_target,
    check_tensor,
    refuse_double_backward,
)
from dspark_ext.vocab_parallel import (
    VocabularyArguments,
    VocabularyShard,
    combine_statistics,
    find_shard,
    split_dtensors,
    sum_over_ranks,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Stand-ins for an id while a row is computed: its column lies on another rank (the device kernels
# know this number; any other one that is no column is a mistake to them); it is no column.
_ELSEWHERE = torch.iinfo(torch.int64).min
_NOWHERE = -2


def ce_and_l1(
    draft_logits: Tensor,
    target_logits: Tensor,
    target_ids: Tensor,
    *,
    active: Optional[Tensor] = None,
    tp_group: Optional[ProcessGroup] = None,
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
        tp_group: the ranks that each hold some columns of these rows; the logits are then this
            rank's ``[..., V_local]``, and ids stay global. Two small collectives in forward,
            none in backward.
        vocab_start: global id of this rank's first column (default: ``rank * V_local``).
        vocab_size: number of real columns over all ranks (default: all); columns past it are
            padding and take no part.
        impl: ``"auto"``, ``"kernel"`` or ``"torch"``.

    Returns:
        ``(ce, l1)``, each ``[...]`` in float32 (float64 for float64 drafts). ``ce`` is in nats;
        ``l1 = sum |softmax(draft) - softmax(target)|`` in [0, 2] (total variation is ``l1 / 2``).
        Both are differentiable in ``draft_logits``, under independent upstream gradients; the
        backward pass recomputes. The gradient of ``l1`` is the subgradient that is 0 for
        columns where both distributions agree.

    Raises:
        ValueError: shapes that do not belong together, or tensors on different devices.
        TypeError: an unsupported dtype or kind of tensor.
        IndexError: an id outside [0, V) other than -100 on an active row (host tensors).
    """
    _refuse_none(target_logits=target_logits, target_ids=target_ids)
    draft, target, ids, mask, shard = _checked(
        draft_logits, target_logits, target_ids, active, (tp_group, vocab_start, vocab_size)
    )
    return per_row(draft, target, ids, mask, impl, shard)


def l1_distance(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    active: Optional[Tensor] = None,
    tp_group: Optional[ProcessGroup] = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    impl: str = "auto",
) -> Tensor:
    """L1 distance between the rows' distributions, ``[...]``; see :func:`ce_and_l1`."""
    _refuse_none(target_logits=target_logits)
    draft, target, _, mask, shard = _checked(
        draft_logits, target_logits, None, active, (tp_group, vocab_start, vocab_size)
    )
    return per_row(draft, target, None, mask, impl, shard)[1]


def token_log_prob(
    logits: Tensor,
    ids: Tensor,
    *,
    active: Optional[Tensor] = None,
    tp_group: Optional[ProcessGroup] = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    impl: str = "auto",
) -> Tensor:
    """Log-probability of one id per row, ``[...]``, in nats and <= 0; see :func:`ce_and_l1`.

    Rows with id -100, and rows that are not active, give 0.
    """
    _refuse_none(ids=ids)
    logits, _, checked_ids, mask, shard = _checked(
        logits, None, ids, active, (tp_group, vocab_start, vocab_size), ("logits", "ids")
    )
    if shard is None and _backend.uses_kernel(impl, logits.device, logits.dtype):
        return torch.ops.dspark_ext.log_softmax_fwd(logits, checked_ids, mask)[1]
    return -per_row(logits, None, checked_ids, mask, impl, shard)[0]


def _refuse_none(**arguments: Optional[Tensor]) -> None:
    """Raises ValueError for a tensor without which a function has nothing to compute."""
    for name, value in arguments.items():
        if value is None:
            raise ValueError(
                f"{name} is None; expected a tensor (token_log_prob needs no target_logits, "
                "l1_distance no ids)"
            )


def _checked(
    draft_logits: Tensor,
    target_logits: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    vocabulary: VocabularyArguments,
    names: tuple[str, str] = ("draft_logits", "target_ids"),
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[VocabularyShard]]:
    """Every argument of the functions above with its shape, dtype and device checked."""
    draft_name, ids_name = names
    draft_logits, target_logits, vocabulary = split_dtensors(
        draft_logits, target_logits, vocabulary, draft_name, "target_logits"
    )
    draft = check_logits(draft_name, draft_logits, sharded=vocabulary[0] is not None)
    leading, origin = tuple(draft.shape[:-1]), f"the leading dimensions of {draft_name}"
    target = target_logits
    if target is not None:
        target = check_logits("target_logits", target, sharded=vocabulary[0] is not None)
        check_target(draft, target, draft_name, "target_logits")
    if ids is not None:
        ids = check_ids(ids_name, ids)
        check_same_shape(ids_name, ids, leading, origin)
    if active is not None:
        check_tensor("active", active, MASK_DTYPES)
        check_same_shape("active", active, leading, origin)
        active = active != 0
    check_same_device(
        draft_name, draft, **{"target_logits": target, ids_name: ids, "active": active}
    )
    shard = find_shard(draft.shape[-1], *vocabulary)
    return draft, target, ids, active, shard


def per_row(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    impl: str,
    shard: Optional[VocabularyShard] = None,
) -> tuple[Tensor, Tensor]:
    """``(ce, l1)`` of validated inputs; 0 for what lacks ``ids`` or ``target``.

    One kernel visit where the kernel holds whole rows; otherwise statistics, distance and
    gradient one after another, by kernel or in PyTorch.
    """
    target = None if target is None else target.detach()
    dtypes = [t.dtype for t in (draft, target) if t is not None]
    use_kernel = _backend.uses_kernel(impl, draft.device, *dtypes)
    if use_kernel and shard is None:
        return torch.ops.dspark_ext.ce_and_l1_fwd(draft, target, ids, active)[:2]
    if shard is not None and shard.columns < draft.shape[-1]:
        draft = draft[..., : shard.columns]
        target = None if target is None else target[..., : shard.columns]
    return _StepByStep.apply(draft, target, ids, active, use_kernel, shard)


class _StepByStep(torch.autograd.Function):
    """``rows_forward`` with autograd; backward recomputes and needs no other rank."""

    @staticmethod
    def forward(
        ctx: Any,
        draft: Tensor,
        target: Optional[Tensor],
        ids: Optional[Tensor],
        active: Optional[Tensor],
        use_kernel: bool,
        shard: Optional[VocabularyShard],
    ) -> tuple[Tensor, Tensor]:
        ce, l1, saved = rows_forward(draft, target, ids, active, use_kernel, shard)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(draft, target, active, *saved)
        ctx.use_kernel = use_kernel
        return ce, l1

    @staticmethod
    def backward(ctx: Any, grad_ce: Optional[Tensor], grad_l1: Optional[Tensor]) -> tuple:
        refuse_double_backward("ce_and_l1")
        draft, target, active, *saved = ctx.saved_tensors
        grad = rows_gradient(
            grad_ce, grad_l1, draft, target, active, SavedRows(*saved), ctx.use_kernel
        )
        return grad, None, None, None, None, None


class SavedRows(NamedTuple):
    """What a forward keeps of its rows for their gradient, beside the logits themselves."""

    column: Optional[Tensor]
    draft_statistics: Tensor
    target_statistics: Optional[Tensor]
    sides: Optional[Tensor]


def rows_forward(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    use_kernel: bool,
    shard: Optional[VocabularyShard],
) -> tuple[Tensor, Tensor, SavedRows]:
    """``ce``, ``l1`` and what their gradient needs: statistics, then distance, with the ranks'
    parts combined in between where the vocabulary is sharded."""
    real = reference.real_dtype(draft, target)
    result = _backend.result_dtype(draft)
    draft_statistics = _row_statistics(draft, draft, active, real, use_kernel)
    target_statistics = None
    if target is not None:
        target_statistics = _row_statistics(target, draft, active, real, use_kernel)
    columns = str(draft.shape[-1]) if shard is None else "the vocabulary's size"
    label = None if ids is None else _find_label(draft, ids, shard, real)
    if shard is not None:
        draft_statistics, target_statistics, label = _combine_over_ranks(
            shard, draft_statistics, target_statistics, label
        )
    ce = l1 = draft.new_zeros(draft.shape[:-1], dtype=real)
    if ids is not None and label is not None:
        _refuse_nowhere(ids, label.column, active, columns)
        ce = reference.cross_entropy(draft_statistics, label.logit)
        ce = torch.where(label.column == _NOWHERE, torch.nan, ce)
        ce = torch.where(label.column == reference.IGNORE_INDEX, 0, ce)
    sides = None
    if target is not None and target_statistics is not None:
        l1, sides = _distance(
            draft, target, draft_statistics, target_statistics, active, use_kernel
        )
        if shard is not None:
            parts = shard.gather(torch.cat([l1.unsqueeze(-1).to(real), sides], dim=-1))
            l1, *halves = sum_over_ranks(parts).unbind(-1)
            l1, sides = l1.clamp(max=2), torch.stack(halves, dim=-1)
    if active is not None:
        ce, l1 = torch.where(active, ce, 0), torch.where(active, l1, 0)
    column = None if label is None else label.column
    saved = SavedRows(column, draft_statistics, target_statistics, sides)
    return ce.to(result), l1.to(result), saved


def rows_gradient(
    a: Optional[Tensor],
    b: Optional[Tensor],
    draft: Tensor,
    target: Optional[Tensor],
    active: Optional[Tensor],
    saved: SavedRows,
    use_kernel: bool,
) -> Tensor:
    """Gradient of ``sum(a * ce + b * l1)`` with respect to this rank's draft logits."""
    if a is not None and saved.column is not None:
        a = torch.where(saved.column == _NOWHERE, torch.nan, a)
    gradient = torch.ops.dspark_ext.ce_and_l1_bwd if use_kernel else reference.gradient
    return gradient(a, b, draft, target, saved.column, active, *saved[1:])


class _Label(NamedTuple):
    """Each row's label: its local column, or a stand-in, and its logit (0 without a column)."""

    column: Tensor
    logit: Tensor


def _row_statistics(
    logits: Tensor, order: Tensor, active: Optional[Tensor], real: torch.dtype, use_kernel: bool
) -> Tensor:
    if use_kernel:
        return torch.ops.dspark_ext.log_softmax_fwd(logits, None, active, order)[0].to(real)
    return reference.row_statistics(logits, real)


def _distance(
    draft: Tensor,
    target: Tensor,
    draft_statistics: Tensor,
    target_statistics: Tensor,
    active: Optional[Tensor],
    use_kernel: bool,
) -> tuple[Tensor, Tensor]:
    if use_kernel:
        return torch.ops.dspark_ext.l1_distance_fwd(
            draft, target, draft_statistics, target_statistics, active
        )
    return reference.l1_distance(draft, target, draft_statistics, target_statistics)


def _find_label(
    draft: Tensor, ids: Tensor, shard: Optional[VocabularyShard], real: torch.dtype
) -> _Label:
    columns = draft.shape[-1]
    local = ids - (0 if shard is None else shard.start)
    here = (local >= 0) & (local < columns)
    column = torch.where(here, local, _NOWHERE)
    column = torch.where(ids == reference.IGNORE_INDEX, reference.IGNORE_INDEX, column)
    if columns == 0:
        return _Label(column, draft.new_zeros(ids.shape, dtype=real))
    logit = draft.gather(-1, column.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(real)
    return _Label(column, torch.where(here, logit, 0))


def _combine_over_ranks(
    shard: VocabularyShard,
    draft_statistics: Tensor,
    target_statistics: Optional[Tensor],
    label: Optional[_Label],
) -> tuple[Tensor, Optional[Tensor], Optional[_Label]]:
    """What each rank knows of its own columns as what is true of the whole rows: one gather."""
    parts = [draft_statistics]
    if target_statistics is not None:
        parts.append(target_statistics)
    if label is not None:
        is_here = (label.column >= 0).to(label.logit.dtype)
        parts += [label.logit.unsqueeze(-1), is_here.unsqueeze(-1)]
    gathered = shard.gather(torch.cat(parts, dim=-1))
    draft_statistics = combine_statistics(gathered[..., :3])
    if target_statistics is not None:
        target_statistics = combine_statistics(gathered[..., 3:6])
    if label is not None:
        # Exactly one rank holds a label, so the sum of the ranks' logits is its logit.
        owners = sum_over_ranks(gathered[..., -1])
        elsewhere = (label.column == _NOWHERE) & (owners == 1)
        label = _Label(
            torch.where(elsewhere, _ELSEWHERE, label.column), sum_over_ranks(gathered[..., -2])
        )
    return draft_statistics, target_statistics, label


def _refuse_nowhere(ids: Tensor, column: Tensor, active: Optional[Tensor], columns: str) -> None:
    """IndexError for an active row's id that is no column; on the host only, and not while a
    compiler traces. Elsewhere such a row is NaN."""
    if torch.compiler.is_compiling():
        return
    if _backend.on_host(ids) or _backend.checks_enabled():
        nowhere = column == _NOWHERE
        _backend.refuse_ids(ids, nowhere if active is None else nowhere & active, columns)


__all__ = ["ce_and_l1", "l1_distance", "token_log_prob"]
