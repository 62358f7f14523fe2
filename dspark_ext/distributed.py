"""Denominators over a data-parallel group: one collective a step, never a host read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_ext._validate import MASK_DTYPES, check_same_device, check_tensor
from dspark_ext.reduction import ordered_sum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """The ranks whose gradients are combined; ``group`` None where there is but one."""

    group: Optional[ProcessGroup]
    size: int

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, as a functional collective (it compiles); ``values`` is unchanged.

        Every rank must call it, whatever its data looks like.
        """
        if self.group is None:
            return values
        from torch.distributed import _functional_collectives as collectives

        return collectives.wait_tensor(collectives.all_reduce(values.detach(), "sum", self.group))


def check_group(name: str, group: object) -> None:
    """Raises TypeError for what is neither a process group nor None, a DeviceMesh for example."""
    if group is None or torch.compiler.is_compiling():
        return
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"{name} is a {type(group).__name__}; expected a torch.distributed.ProcessGroup that "
            "this rank is a member of (of a DeviceMesh, mesh['dp'].get_group()), or None"
        )


def data_parallel(
    process_group: Optional[ProcessGroup], tp_group: Optional[ProcessGroup] = None
) -> DataParallel:
    """The data-parallel ranks: ``process_group``, else the world when initialised.

    Raises:
        ValueError: ``tp_group`` without ``process_group``, unless it is the whole world; which
            ranks see other data is then not known.
        TypeError: what is no process group.
    """
    check_group("process_group", process_group)
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return DataParallel(None, 1)
        process_group = dist.group.WORLD
        if tp_group is not None:
            if dist.get_world_size(tp_group) == dist.get_world_size():
                return DataParallel(None, 1)
            raise ValueError(
                f"tp_group has {dist.get_world_size(tp_group)} of {dist.get_world_size()} ranks "
                "and process_group is None; pass the data-parallel group too, e.g. "
                "process_group=mesh['dp'].get_group(), tp_group=mesh['tp'].get_group()"
            )
    size = dist.get_world_size(process_group)
    return DataParallel(process_group if size > 1 else None, size)


def loss_denominators(
    eval_masks: Union[Tensor, Iterable[Tensor]],
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
        ValueError: no mask at all, one without a block dimension, or masks on two devices.
        TypeError: what is no mask.
    """
    from dspark_ext.loss import _build_loss_weight_mask

    if not isinstance(eval_masks, Iterable):
        raise TypeError(
            f"eval_masks is a {type(eval_masks).__name__}; expected a mask [B, A, K] or a list of "
            "them"
        )
    masks = [eval_masks] if isinstance(eval_masks, Tensor) else list(eval_masks)
    if not masks:
        raise ValueError("eval_masks is empty; expected the mask of at least one micro-batch")
    totals = []
    for i, mask in enumerate(masks):
        name = "eval_masks" if mask is eval_masks else f"eval_masks[{i}]"
        check_tensor(name, mask, MASK_DTYPES)
        check_same_device("eval_masks[0]", masks[0], **{name: mask})
        if mask.dim() == 0:
            raise ValueError(f"{name} is a scalar; expected [B, A, K]")
        weights = _build_loss_weight_mask(
            eval_mask=mask,
            block_size=mask.shape[-1],
            device=mask.device,
            loss_decay_gamma=loss_decay_gamma,
        )
        totals.append(ordered_sum(weights.reshape(-1)))
    return data_parallel(process_group).all_reduce_sum(ordered_sum(torch.stack(totals)))
