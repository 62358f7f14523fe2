"""The DSpark training objective, in tensors.

``compute_dspark_loss`` is the public function. The private functions keep the names, keywords
and results of the reference implementation's building blocks, so that code written against it
finds them here; the weight mask, the accept rate and the diagnostics are the parts that
``compute_dspark_loss`` itself is made of.

Two compositions of the same mathematics stand here. The fused one knows its denominators before
the logits are read, so one kernel visit yields the loss and its gradient. The recompute one
(``_collect_local_terms``, ``_all_reduce_loss_denominators``, ``_build_loss``) forms numerators
first; it serves fp16 drafts, whose loss scale must be applied before the gradient is rounded,
and ``impl="torch"``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Optional, Union, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_ext import _backend, ops
from dspark_ext._validate import (
    LOGIT_DTYPES,
    attribute,
    check_logits,
    check_number,
    check_positions,
    check_same_device,
    check_same_shape,
    check_target,
    check_tensor,
)
from dspark_ext.distributed import DataParallel, data_parallel
from dspark_ext.reduction import ordered_sum
from dspark_ext.rowwise import l1_distance, per_row
from dspark_ext.vocab_parallel import (
    VocabularyArguments,
    VocabularyShard,
    find_shard,
    split_dtensors,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Required, TypedDict, Unpack

    class Options(TypedDict, total=False):
        """Every keyword of the objective but the one that its result's type depends on."""

        outputs: Required[Any]
        loss_decay_gamma: Required[Optional[float]]
        ce_loss_alpha: Required[float]
        l1_loss_alpha: Required[float]
        confidence_head_alpha: Required[float]
        process_group: Optional[ProcessGroup]
        grad_reduction: str
        denominators: Optional[Tensor]
        tp_group: Optional[ProcessGroup]
        vocab_start: Optional[int]
        vocab_size: Optional[int]
        inplace_grad: bool
        impl: str


__all__ = ["compute_dspark_loss"]

_PROBABILITY_CHUNK_TOKENS = 128
_EPSILON = 1e-6
_DENOMINATORS = ("ce_loss_den", "l1_loss_den", "confidence_loss_den")
_CONFIDENCE_SUMS = (
    "confidence_abs_error_num",
    "confidence_bias_num",
    "confidence_cumprod_bias_num",
    "confidence_diag_den",
)


@dataclasses.dataclass
class DSparkForwardOutput:
    """What a drafter's forward hands to the loss. Any object with these attributes will do.

    Attributes:
        draft_logits: ``[B, A, K, V]``, float32, bfloat16, float16 or float64.
        target_ids: ``[B, A, K]`` integers, the token each position should propose; -100 leaves
            a position out of the cross-entropy.
        eval_mask: ``[B, A, K]`` bool, integer or float; nonzero where a position is supervised.
        block_keep_mask: ``[B, A]``, nonzero where a block counts in ``tau``.
        confidence_pred: ``[B, A, K]`` logits of the predicted accept rate, or None.
        aligned_target_logits: ``[B, A, K, V]``, the target model's logits at the same
            positions, or None where neither L1 nor confidence is wanted.
    """

    draft_logits: Tensor
    target_ids: Tensor
    eval_mask: Tensor
    block_keep_mask: Tensor
    confidence_pred: Optional[Tensor] = None
    aligned_target_logits: Optional[Tensor] = None


def _checked(
    outputs: Any, wants_l1: bool, vocabulary: VocabularyArguments = (None, None, None)
) -> tuple[DSparkForwardOutput, Optional[VocabularyShard]]:
    """The outputs with every shape, dtype and device checked, logits ready for a kernel."""
    draft, target, vocabulary = split_dtensors(
        attribute(outputs, "draft_logits"),
        attribute(outputs, "aligned_target_logits"),
        vocabulary,
        "draft_logits",
        "aligned_target_logits",
    )
    sharded = vocabulary[0] is not None
    draft = check_logits("draft_logits", draft, sharded)
    if draft.dim() != 4:
        raise ValueError(f"draft_logits has shape {tuple(draft.shape)}; expected [B, A, K, V]")
    leading = tuple(draft.shape[:-1])
    origin = f"draft_logits {tuple(draft.shape)}"
    ids, eval_mask, keep, confidence = check_positions(
        outputs, attribute(outputs, "confidence_pred"), leading, origin
    )
    if target is not None:
        target = check_logits("aligned_target_logits", target, sharded)
        check_target(draft, target, "draft_logits", "aligned_target_logits")
    elif wants_l1 or confidence is not None:
        wanted = "l1_loss_alpha > 0" if wants_l1 else "confidence_pred"
        raise ValueError(
            f"{wanted} needs aligned_target_logits, which is None: pass the target model's "
            "logits at the drafted positions, or set l1_loss_alpha=0 and confidence_pred=None"
        )
    check_same_device(
        "draft_logits",
        draft,
        target_ids=ids,
        eval_mask=eval_mask,
        block_keep_mask=keep,
        confidence_pred=confidence,
        aligned_target_logits=target,
    )
    shard = find_shard(draft.shape[-1], *vocabulary)
    target = None if target is None else target.detach()
    return DSparkForwardOutput(draft, ids, eval_mask, keep, confidence, target), shard


# --- Weights, accept rate, diagnostics ----------------------------------------------------------


def _build_loss_weight_mask(
    *,
    eval_mask: Tensor,
    block_size: int,
    device: torch.device,
    loss_decay_gamma: Optional[float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``eval_mask * exp(-k / gamma)``, k from 0 along the last dimension; in ``dtype``.

    ``gamma`` None or <= 0 means no decay.
    """
    weights = eval_mask.to(device=device, dtype=dtype)
    if loss_decay_gamma is not None:
        loss_decay_gamma = check_number("loss_decay_gamma", loss_decay_gamma, finite=False)
    if loss_decay_gamma is None or loss_decay_gamma <= 0:
        return weights
    minus_k = torch.arange(0, -block_size, -1, device=device, dtype=dtype)
    # A gamma that is 0 in ``dtype`` would make the first weight exp(0 / 0).
    gamma = max(loss_decay_gamma, torch.finfo(dtype).tiny)
    return weights * torch.exp(minus_k / gamma)


def _l1_probability_distance_chunk(*, draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """``sum |softmax(draft) - softmax(target)|`` over the last dimension, per row."""
    return l1_distance(draft_logits, target_logits)


def _compute_l1_dist_per_token(
    *,
    draft_logits: Tensor,
    aligned_target_logits: Tensor,
    chunk_size: int = _PROBABILITY_CHUNK_TOKENS,
) -> Tensor:
    """L1 distance per row, ``draft_logits.shape[:-1]``, differentiable in ``draft_logits``.

    Nothing of the vocabulary's size is materialised whatever ``chunk_size`` is; the reference's
    parameter is accepted and checked.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; expected at least 1")
    return l1_distance(draft_logits, aligned_target_logits)


def _compute_accept_rate_3d(*, l1_dist_per_token: Optional[Tensor]) -> Optional[Tensor]:
    """Probability that the target accepts a drafted token, ``clamp(1 - l1/2, 0, 1)``."""
    if l1_dist_per_token is None:
        return None
    return (1 - 0.5 * l1_dist_per_token).clamp(0, 1)


def _compute_local_l1_term(
    *, l1_dist_per_token: Optional[Tensor], loss_weight_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """``(sum(w * l1), sum(w))`` of this rank; zeros when there is no L1."""
    if l1_dist_per_token is None:
        zero = loss_weight_mask.new_zeros(())
        return zero, zero.clone()
    return _weighted_sum(loss_weight_mask, l1_dist_per_token), _sum(loss_weight_mask)


def _collect_acceptance_diagnostics(
    *,
    outputs: Any,
    accept_rate_3d: Optional[Tensor],
    loss_weight_mask: Tensor,
    has_confidence: bool,
) -> dict[str, Tensor]:
    """Unreduced sums over this rank's positions; zeros when ``accept_rate_3d`` is None.

    ``accept_rate_pos_num/den`` ``[K]``; ``tau_num/den``, expected accepted length (with the
    bonus token) over valid blocks; ``confidence_*``, calibration of the confidence head.
    """
    weights = loss_weight_mask.detach()
    zero = weights.new_zeros(())
    confidence_sums = dict.fromkeys(_CONFIDENCE_SUMS, zero)
    if accept_rate_3d is None:
        none = weights.new_zeros(weights.shape[-1])
        positions = {"accept_rate_pos_num": none, "accept_rate_pos_den": none}
        return {**positions, "tau_num": zero, "tau_den": zero, **confidence_sums}
    mask = outputs.eval_mask.to(weights.dtype)
    active = _supervised(outputs)
    accept = accept_rate_3d.detach().to(weights.dtype)
    accepted = torch.where(active, accept * mask, 0.0)
    columns = [accepted, mask]
    if has_confidence:
        confidence = outputs.confidence_pred.detach().to(weights.dtype)
        confidence = torch.where(active, torch.sigmoid(confidence), 0.0)
        error = torch.where(active, confidence - accept, 0.0)
        reach = (confidence * mask).cumprod(-1) - accepted.cumprod(-1)
        columns += [weights * error.abs(), weights * error, weights * reach, weights]
    sums = ordered_sum(torch.stack(columns, -1).flatten(0, 1))
    if has_confidence:
        confidence_sums = dict(zip(_CONFIDENCE_SUMS, ordered_sum(sums[:, 2:]).unbind()))
    accepted_at, positions_at = sums[:, :2].unbind(-1)
    valid = (outputs.block_keep_mask != 0) & active.any(-1)
    length = 1 + accepted.cumprod(-1).sum(-1)
    tau_num, tau_den = _sums([torch.where(valid, length, 0.0), valid.to(weights.dtype)])
    return {
        "accept_rate_pos_num": accepted_at,
        "accept_rate_pos_den": positions_at,
        "tau_num": tau_num,
        "tau_den": tau_den,
        **confidence_sums,
    }


def _confidence_num(outputs: Any, l1: Optional[Tensor], weights: Tensor) -> Tensor:
    """``sum(w * bce_with_logits(z, accept))``, 0 without a confidence head or an L1; what stands
    on inactive positions is not read."""
    accept = _compute_accept_rate_3d(l1_dist_per_token=l1)
    if outputs.confidence_pred is None or accept is None:
        return weights.new_zeros(())
    confidence = outputs.confidence_pred.to(weights.dtype)
    logits = torch.where(_supervised(outputs), confidence, 0.0)
    bce = F.binary_cross_entropy_with_logits(logits, accept.detach(), reduction="none")
    return _weighted_sum(weights, bce)


def _supervised(outputs: Any) -> Tensor:
    mask = outputs.eval_mask
    return mask if mask.dtype == torch.bool else mask != 0


def _sum(values: Tensor) -> Tensor:
    return ordered_sum(values.reshape(-1))


def _sums(values: list[Tensor]) -> tuple[Tensor, ...]:
    """Sums of tensors of one shape, in one op."""
    return ordered_sum(torch.stack(values, -1).flatten(0, -2)).unbind()


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    return _sum(weights * values)


# --- The reference's composition: numerators first ----------------------------------------------


def _collect_local_terms(
    *,
    outputs: Any,
    loss_decay_gamma: Optional[float],
    l1_loss_alpha: float,
    impl: str = "auto",
) -> tuple[dict[str, Tensor], bool]:
    """This rank's ``*_loss_num`` and ``*_loss_den`` with the diagnostics, and whether there is
    a confidence head. The ``*_loss_num`` are differentiable; nothing is reduced over ranks."""
    outputs, _ = _checked(outputs, l1_loss_alpha > 0)
    weights = _weights(outputs, loss_decay_gamma)
    ce, l1 = _recomputed_rows(outputs, l1_loss_alpha, impl, None)
    confidence_num = _confidence_num(outputs, l1, weights)
    terms = _local_terms(outputs, weights, ce, l1, l1_loss_alpha, confidence_num)
    return terms, outputs.confidence_pred is not None


def _recomputed_rows(
    outputs: DSparkForwardOutput,
    l1_loss_alpha: float,
    impl: str,
    shard: Optional[VocabularyShard],
) -> tuple[Tensor, Optional[Tensor]]:
    """The rows' ce and, where it is needed, l1."""
    target = outputs.aligned_target_logits if _needs_l1(outputs, l1_loss_alpha) else None
    active = _supervised(outputs)
    ce, l1 = per_row(outputs.draft_logits, target, outputs.target_ids, active, impl, shard)
    return ce, None if target is None else l1


def _local_terms(
    outputs: Any,
    weights: Tensor,
    ce: Tensor,
    l1: Optional[Tensor],
    l1_loss_alpha: float,
    confidence_num: Tensor,
    with_diagnostics: bool = True,
) -> dict[str, Tensor]:
    """Weighted sums from the rows' ``ce`` and ``l1`` (None where none is known), and with them
    the diagnostics, which only those who ask for terms want to pay for."""
    zero = weights.new_zeros(())
    has_confidence = outputs.confidence_pred is not None
    summed = [weights, weights * ce]
    if l1 is not None and l1_loss_alpha > 0:
        summed.append(weights * l1)
    denominator, ce_num, *l1_num = _sums(summed)
    denominator = denominator.detach()  # it came with sums that have a gradient
    terms = {
        "ce_loss_num": ce_num,
        "ce_loss_den": denominator,
        "l1_loss_num": l1_num[0] if l1_num else zero,
        "l1_loss_den": denominator if l1_num else zero,
        "confidence_loss_num": confidence_num,
        "confidence_loss_den": denominator if has_confidence else zero,
    }
    if with_diagnostics:
        terms.update(
            _collect_acceptance_diagnostics(
                outputs=outputs,
                accept_rate_3d=_compute_accept_rate_3d(l1_dist_per_token=l1),
                loss_weight_mask=weights,
                has_confidence=has_confidence,
            )
        )
    return terms


def _all_reduce_loss_denominators(
    *,
    loss_terms: dict[str, Tensor],
    world_size: int,
    process_group: Optional[ProcessGroup] = None,
) -> dict[str, Tensor]:
    """The three denominators summed over the group, in one collective; inputs unchanged."""
    packed = torch.stack([loss_terms[name].detach() for name in _DENOMINATORS])
    if world_size > 1:
        packed = data_parallel(process_group).all_reduce_sum(packed)
    return dict(zip(_DENOMINATORS, packed.unbind()))


def _build_loss(
    *,
    loss_terms: dict[str, Tensor],
    global_denominators: dict[str, Tensor],
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
    has_confidence: bool,
    world_size: int,
) -> Tensor:
    """The scalar that is differentiated: ``world_size`` times the alpha-weighted sum of the
    terms, each over its global denominator. A term whose denominator is 0 is exactly 0."""
    alphas = [("ce_loss", ce_loss_alpha)]
    if l1_loss_alpha > 0:
        alphas.append(("l1_loss", l1_loss_alpha))
    if has_confidence:
        alphas.append(("confidence_loss", confidence_head_alpha))
    loss = loss_terms["ce_loss_num"].new_zeros(())
    for name, alpha in alphas:
        inverse = _inverse(global_denominators[f"{name}_den"])
        loss = loss + loss_terms[f"{name}_num"] * inverse * (world_size * alpha)
    return loss


def _inverse(denominator: Tensor) -> Tensor:
    """What numerators are multiplied by: 0 where the denominator is."""
    return (denominator + _EPSILON).reciprocal().masked_fill(denominator <= 0, 0.0)


def _row_coefficients(
    weights: Tensor, inverse: Tensor, world_size: int, ce_alpha: float, l1_alpha: float
) -> tuple[Tensor, Tensor]:
    """What a row's ce and its l1 are multiplied by in the loss, known before the logits."""
    shares = weights * inverse
    return shares * (world_size * ce_alpha), shares * (world_size * max(l1_alpha, 0.0))


# --- The objective ------------------------------------------------------------------------------


@overload
def compute_dspark_loss(
    *, return_terms: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...


@overload
def compute_dspark_loss(
    *, return_terms: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, dict[str, Tensor]]: ...


@overload
def compute_dspark_loss(
    *, return_terms: bool, **options: Unpack[Options]
) -> Union[Tensor, tuple[Tensor, dict[str, Tensor]]]: ...


def compute_dspark_loss(
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
) -> Union[Tensor, tuple[Tensor, dict[str, Tensor]]]:
    """The DSpark objective: weighted cross-entropy, L1 distance and confidence BCE.

    With ``w = eval_mask * exp(-k / gamma)``, and ``den = sum(w)`` over the data-parallel group of
    size R, it is::

        R * (
            ce_loss_alpha * sum(w * ce) / den
            + l1_loss_alpha * sum(w * l1) / den
            + confidence_head_alpha * sum(w * bce) / den
        )

    Args:
        outputs: a :class:`DSparkForwardOutput`, or any object with its attributes.
        loss_decay_gamma: decay of the weights along the block; None or ``<= 0`` for none.
        ce_loss_alpha, l1_loss_alpha, confidence_head_alpha: the term's weight in the sum.
            ``l1_loss_alpha <= 0`` switches the L1 term off; the confidence term is off when
            ``confidence_pred`` is None.
        return_terms: also return the detached terms.
        process_group: the data-parallel group (default: the world, when initialised). Every rank
            of it must call, whatever its data looks like.
        grad_reduction: how gradients are combined over the group afterwards: ``"mean"`` (DDP,
            FSDP; R is the group's size) or ``"sum"`` (R is 1).
        denominators: a 0-dim tensor from :func:`dspark_ext.loss_denominators`, the denominator
            of a whole accumulation window; no collective is issued then.
        tp_group, vocab_start, vocab_size: vocabulary-parallel logits, as in
            :func:`dspark_ext.ce_and_l1`. ``process_group`` must be given too, unless ``tp_group``
            is the whole world. DTensors sharded over the vocabulary need none of the three.
        inplace_grad: write the gradient over ``draft_logits``' memory, which must not be read
            afterwards. Saves the memory of the gradient. A fresh gradient is used all the same
            where that is impossible (fp16 drafts, copied inputs, vocabulary-parallel logits,
            ``impl="torch"``, under torch.compile).
        impl: ``"auto"``, ``"kernel"`` or ``"torch"``.

    Returns:
        ``loss``, 0-dim float32 (float64 for float64 drafts), or ``(loss, terms)``. ``terms``
        holds this rank's normalised ``loss``, ``ce_loss``, ``l1_loss``, ``confidence_loss``
        and unreduced sums: ``*_loss_den``, ``accept_rate_per_pos_num/den`` ``[K]``,
        ``tau_num/den``, ``confidence_abs_error_num``, ``confidence_bias_num``,
        ``confidence_cumprod_bias_num``, ``confidence_diag_den``.

    Raises:
        ValueError: shapes or devices that do not belong together; L1 or confidence wanted
            without target logits; an unknown option.
        TypeError: an unsupported dtype or kind of tensor; a weight that is no number.
        IndexError: an id outside [0, V) other than -100 on an active row (host tensors).
        RuntimeError: ``inplace_grad`` on a leaf that requires grad or on overlapping memory;
            at backward, ``create_graph=True``.
    """
    if grad_reduction not in ("mean", "sum"):
        raise ValueError(f"grad_reduction is {grad_reduction!r}; expected 'mean' or 'sum'")
    ce_loss_alpha = check_number("ce_loss_alpha", ce_loss_alpha)
    l1_loss_alpha = check_number("l1_loss_alpha", l1_loss_alpha)
    confidence_head_alpha = check_number("confidence_head_alpha", confidence_head_alpha)
    outputs, shard = _checked(outputs, l1_loss_alpha > 0, (tp_group, vocab_start, vocab_size))
    logits = (outputs.draft_logits, outputs.aligned_target_logits)
    dtypes = [t.dtype for t in logits if t is not None]
    use_kernel = _backend.uses_kernel(impl, outputs.draft_logits.device, *dtypes)
    ranks = data_parallel(process_group, None if shard is None else shard.group)
    world_size = ranks.size if grad_reduction == "mean" else 1
    weights = _weights(outputs, loss_decay_gamma)
    denominator = _global_denominator(weights, denominators, ranks)

    if use_kernel and shard is None and outputs.draft_logits.dtype != torch.float16:
        inverse = _inverse(denominator)
        objective, ce, l1 = _fused_rows(
            outputs,
            *_row_coefficients(weights, inverse, world_size, ce_loss_alpha, l1_loss_alpha),
            l1_loss_alpha,
            inplace_grad,
        )
        confidence_num = _confidence_num(outputs, l1, weights)
        loss = torch.addcmul(
            objective, confidence_num, inverse, value=world_size * confidence_head_alpha
        )
        if not return_terms:
            return loss
        terms = _local_terms(outputs, weights, ce, l1, l1_loss_alpha, confidence_num)
    else:
        ce, l1 = _recomputed_rows(outputs, l1_loss_alpha, impl, shard)
        confidence_num = _confidence_num(outputs, l1, weights)
        terms = _local_terms(
            outputs, weights, ce, l1, l1_loss_alpha, confidence_num, with_diagnostics=return_terms
        )
        loss = _build_loss(
            loss_terms=terms,
            global_denominators=dict.fromkeys(_DENOMINATORS, denominator),
            ce_loss_alpha=ce_loss_alpha,
            l1_loss_alpha=l1_loss_alpha,
            confidence_head_alpha=confidence_head_alpha,
            has_confidence=outputs.confidence_pred is not None,
            world_size=world_size,
        )
        if not return_terms:
            return loss
    return loss, _returned_terms(terms, ce_loss_alpha, l1_loss_alpha, confidence_head_alpha)


class DSparkLoss(nn.Module):
    """:func:`compute_dspark_loss` with its scalars fixed at construction; holds no tensors.

    ``loss_fn = DSparkLoss(loss_decay_gamma=4.0, ce_loss_alpha=0.1, l1_loss_alpha=0.9,
    confidence_head_alpha=1.0)``, then ``loss_fn(outputs)`` or
    ``loss, terms = loss_fn(outputs, return_terms=True)``.
    """

    def __init__(
        self,
        *,
        loss_decay_gamma: Optional[float],
        ce_loss_alpha: float,
        l1_loss_alpha: float,
        confidence_head_alpha: float,
        grad_reduction: str = "mean",
        inplace_grad: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.loss_decay_gamma = loss_decay_gamma
        self.ce_loss_alpha = ce_loss_alpha
        self.l1_loss_alpha = l1_loss_alpha
        self.confidence_head_alpha = confidence_head_alpha
        self.grad_reduction = grad_reduction
        self.inplace_grad = inplace_grad
        self.impl = impl

    def forward(
        self,
        outputs: Any,
        *,
        return_terms: bool = False,
        process_group: Optional[ProcessGroup] = None,
        denominators: Optional[Tensor] = None,
        tp_group: Optional[ProcessGroup] = None,
        vocab_start: Optional[int] = None,
        vocab_size: Optional[int] = None,
    ) -> Union[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        """See :func:`compute_dspark_loss`."""
        return compute_dspark_loss(
            outputs=outputs,
            loss_decay_gamma=self.loss_decay_gamma,
            ce_loss_alpha=self.ce_loss_alpha,
            l1_loss_alpha=self.l1_loss_alpha,
            confidence_head_alpha=self.confidence_head_alpha,
            return_terms=return_terms,
            process_group=process_group,
            grad_reduction=self.grad_reduction,
            denominators=denominators,
            tp_group=tp_group,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            inplace_grad=self.inplace_grad,
            impl=self.impl,
        )

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name in (
                "loss_decay_gamma",
                "ce_loss_alpha",
                "l1_loss_alpha",
                "confidence_head_alpha",
                "grad_reduction",
                "inplace_grad",
                "impl",
            )
        )


def _fused_rows(
    outputs: DSparkForwardOutput,
    ce_coefficient: Tensor,
    l1_coefficient: Tensor,
    l1_loss_alpha: float,
    inplace_grad: bool,
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """``sum(a * ce + b * l1)`` with its gradient formed on the spot, the rows' ce and, where it
    is needed, l1."""
    draft = outputs.draft_logits
    target = outputs.aligned_target_logits if _needs_l1(outputs, l1_loss_alpha) else None
    arguments = (
        draft,
        target,
        outputs.target_ids,
        _supervised(outputs),
        ce_coefficient,
        l1_coefficient,
    )
    # Decided here, since grad mode is always off inside an op body.
    with_gradient = torch.is_grad_enabled() and draft.requires_grad
    if with_gradient and inplace_grad and _can_write_over(draft, target):
        objective, ce, l1 = ops.WeightedInplace.apply(*arguments)
    else:
        objective, ce, l1, _ = torch.ops.dspark_ext.weighted_fwd(*arguments, with_gradient)
    return objective, ce, None if target is None else l1


def _weights(outputs: DSparkForwardOutput, loss_decay_gamma: Optional[float]) -> Tensor:
    return _build_loss_weight_mask(
        eval_mask=outputs.eval_mask,
        block_size=outputs.eval_mask.shape[-1],
        device=outputs.eval_mask.device,
        loss_decay_gamma=loss_decay_gamma,
        dtype=_backend.result_dtype(outputs.draft_logits),
    )


def _needs_l1(outputs: DSparkForwardOutput, l1_loss_alpha: float) -> bool:
    return outputs.aligned_target_logits is not None and (
        l1_loss_alpha > 0 or outputs.confidence_pred is not None
    )


def _global_denominator(
    weights: Tensor, denominators: Optional[Tensor], ranks: DataParallel
) -> Tensor:
    """``sum(w)`` over the data-parallel ranks, or the one that was given.

    One number serves all three terms: each is divided by the sum of the same weights, or is
    switched off on every rank alike.
    """
    if denominators is None:
        return ranks.all_reduce_sum(_sum(weights))
    check_tensor("denominators", denominators, LOGIT_DTYPES)
    check_same_shape("denominators", denominators, (), "loss_denominators() (one number)")
    check_same_device("eval_mask", weights, denominators=denominators)
    return denominators.detach().to(weights.dtype)


def _can_write_over(draft: Tensor, target: Optional[Tensor]) -> bool:
    """Whether an in-place gradient is possible; raises where asking for it is a mistake."""
    if torch.compiler.is_compiling():
        return False
    owner = draft if draft._base is None else draft._base
    if owner.is_leaf and owner.requires_grad:
        raise RuntimeError(
            "inplace_grad=True would overwrite draft_logits, which is a leaf that requires grad, "
            "or a view of one (a parameter or an input); pass inplace_grad=False"
        )
    if _has_overlap(draft):
        raise RuntimeError(
            "inplace_grad=True needs draft_logits whose elements do not share memory; strides "
            f"{tuple(draft.stride())} of shape {tuple(draft.shape)} overlap; pass "
            "inplace_grad=False or a contiguous tensor"
        )
    if (
        draft.numel() > 0
        and target is not None
        and (target.untyped_storage().data_ptr() == draft.untyped_storage().data_ptr())
    ):
        raise RuntimeError(
            "inplace_grad=True would overwrite aligned_target_logits, which shares its memory "
            "with draft_logits; pass inplace_grad=False or a copy"
        )
    return True


def _has_overlap(tensor: Tensor) -> bool:
    """Whether two elements may share memory: sorted by stride, each dimension must step over
    the whole extent of the smaller ones."""
    if tensor.numel() == 0:
        return False
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def _returned_terms(
    loss_terms: dict[str, Tensor],
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
) -> dict[str, Tensor]:
    """The public terms: local losses normalised by local denominators, the rest as sums."""
    terms = {}
    for name in ("ce_loss", "l1_loss", "confidence_loss"):
        denominator = loss_terms[f"{name}_den"]
        terms[name] = loss_terms[f"{name}_num"].detach() / (denominator + _EPSILON)
        terms[f"{name}_den"] = denominator
    terms["loss"] = (
        ce_loss_alpha * terms["ce_loss"]
        + l1_loss_alpha * terms["l1_loss"]
        + confidence_head_alpha * terms["confidence_loss"]
    )
    terms["accept_rate_per_pos_num"] = loss_terms["accept_rate_pos_num"]
    terms["accept_rate_per_pos_den"] = loss_terms["accept_rate_pos_den"]
    for name in ("tau_num", "tau_den", *_CONFIDENCE_SUMS):
        terms[name] = loss_terms[name]
    return terms
