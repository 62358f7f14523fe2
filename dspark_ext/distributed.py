"""Denominators over a data-parallel group: one collective a step, never a host read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Sequence, Union

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_ext.reduction import ordered_sum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_size(process_group: Optional[ProcessGroup] = None) -> int:
    """Ranks in the group (default: the world); 1 without an initialised process group."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(process_group)


def all_reduce_sum(values: Tensor, process_group: Optional[ProcessGroup] = None) -> Tensor:
    """Sum over the group, as a functional collective (it compiles); ``values`` is unchanged.

    Every rank of the group must call it, whatever its data looks like.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return values
    from torch.distributed import _functional_collectives as collectives

    group = dist.distributed_c10d._get_default_group() if process_group is None else process_group
    return collectives.wait_tensor(collectives.all_reduce(values.detach(), "sum", group))


def loss_denominators(
    eval_masks: Union[Tensor, Sequence[Tensor]],
    loss_decay_gamma: Optional[float],
    process_group: Optional[ProcessGroup] = None,
) -> Tensor:
    """The loss denominator of a whole accumulation window, summed over the group.

    Pass the result as ``denominators=`` to every micro-batch of the window and *sum* their
    losses (do not divide by their number): the gradient is that of the joined batch. Needs the
    masks alone, so it can run before the drafter and its collective hides behind it.

    Args:
        eval_masks: the ``eval_mask`` ``[B, A, K]`` of each micro-batch of one optimizer step, or
            a single one. K may differ.
        loss_decay_gamma: as given to :func:`dspark_ext.compute_dspark_loss`.
        process_group: the data-parallel group (default: the world, when initialised).

    Returns:
        0-dim float32 tensor on the masks' device, without gradient.

    Raises:
        ValueError: no mask at all, or one without a block dimension.
    """
    from dspark_ext.loss import _build_loss_weight_mask

    masks = [eval_masks] if isinstance(eval_masks, Tensor) else list(eval_masks)
    if not masks:
        raise ValueError("eval_masks is empty; expected the mask of at least one micro-batch")
    totals = []
    for mask in masks:
        if mask.dim() == 0:
            raise ValueError("an eval_mask is a scalar; expected [B, A, K]")
        weights = _build_loss_weight_mask(
            eval_mask=mask,
            block_size=mask.shape[-1],
            device=mask.device,
            loss_decay_gamma=loss_decay_gamma,
        )
        totals.append(ordered_sum(weights.reshape(-1)))
    return all_reduce_sum(ordered_sum(torch.stack(totals)), process_group)
