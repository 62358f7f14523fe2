"""Vocabulary-parallel logits: every rank of a group holds some of the columns of each row.

Two collectives in forward and none in backward, whatever V is. The first gathers each row's
local statistics and its label's logit, the second its partial ``l1`` and S; both are combined in
rank order, so that every rank gets the same bits. Logits are never gathered.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_ext.distributed import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


VocabularyArguments = tuple[Optional["ProcessGroup"], Optional[int], Optional[int]]


@dataclasses.dataclass(frozen=True)
class VocabularyShard:
    """Where this rank's columns lie: ``[start, start + columns)`` of the whole vocabulary.

    Attributes:
        group: the ranks that hold the same rows.
        start: global id of this rank's first column.
        columns: number of real columns here; what lies behind them is padding.
    """

    group: ProcessGroup
    start: int
    columns: int

    def gather(self, values: Tensor) -> Tensor:
        """``[...]`` of every rank, in rank order, as ``[R, ...]``."""
        from torch.distributed import _functional_collectives as collectives

        size = dist.get_world_size(self.group)
        # Newer versions call it all_gather_single and warn of the old name.
        all_gather = getattr(collectives, "all_gather_single", None) or (
            collectives.all_gather_tensor
        )
        gathered = all_gather(values.reshape(-1), 0, self.group)
        return collectives.wait_tensor(gathered).reshape(size, *values.shape)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks of what each has of the same rows."""
        from torch.distributed import _functional_collectives as collectives

        return collectives.wait_tensor(collectives.all_reduce(values, "sum", self.group))


def split_dtensors(
    draft: Any,
    target: Any,
    vocabulary: VocabularyArguments,
    draft_name: str,
    target_name: str,
) -> tuple[Tensor, Optional[Tensor], VocabularyArguments]:
    """Logits that are DTensors sharded over the vocabulary as local shards with the matching
    ``(tp_group, vocab_start, vocab_size)``; plain tensors as they are.

    ``to_local`` is differentiable, so the gradient arrives as a DTensor again.

    Raises:
        TypeError: a DTensor with another placement, or only one of the two is a DTensor.
        ValueError: DTensors together with explicit vocabulary arguments.
    """
    named = [(draft_name, draft), (target_name, target)]
    dtensors = [(name, t) for name, t in named if t is not None and hasattr(t, "placements")]
    if not dtensors:
        return draft, target, vocabulary
    for name, tensor in dtensors:
        placements = tuple(tensor.placements)
        if len(placements) != 1 or not placements[0].is_shard(tensor.dim() - 1):
            raise TypeError(
                f"{name} is a DTensor with placements {placements} on a mesh of "
                f"{len(placements)} dimensions; expected a one-dimensional mesh that shards the "
                f"last dimension. Use {name}.redistribute(mesh['tp'], [Shard(-1)]) for "
                f"vocabulary-parallel logits, or {name}.to_local() where every rank holds its own "
                "whole rows (data parallelism)"
            )
    if target is not None and len(dtensors) == 1:
        plain = target_name if dtensors[0][0] == draft_name else draft_name
        raise TypeError(
            f"{dtensors[0][0]} is a DTensor and {plain} is not; shard both over the vocabulary "
            "on the same mesh, or pass local tensors of both with tp_group"
        )
    if any(argument is not None for argument in vocabulary):
        raise ValueError(
            "tp_group, vocab_start and vocab_size describe plain local tensors; a DTensor carries "
            "its own placement, so leave them out"
        )
    if target is not None and target.device_mesh != draft.device_mesh:
        raise TypeError(
            f"{draft_name} and {target_name} lie on different meshes ({draft.device_mesh} and "
            f"{target.device_mesh}); redistribute one of them"
        )
    size = draft.shape[-1]
    if target is not None and target.shape[-1] != size:
        raise ValueError(
            f"{draft_name} has {size} vocabulary columns and {target_name} {target.shape[-1]}; "
            "draft and target must share one vocabulary"
        )
    group = draft.device_mesh.get_group()
    local_target = None if target is None else target.to_local()
    return draft.to_local(), local_target, (group, first_column(size, group), size)


def first_column(size: int, group: ProcessGroup) -> int:
    """Where this rank's columns of a DTensor begin: DTensor shards like torch.chunk, in equal
    pieces from the front, the last ones shorter or empty."""
    piece = -(-size // dist.get_world_size(group))
    return min(dist.get_rank(group) * piece, size)


def find_shard(
    local_columns: int,
    tp_group: Optional[ProcessGroup],
    vocab_start: Optional[int],
    vocab_size: Optional[int],
) -> Optional[VocabularyShard]:
    """The shard that the public arguments describe, or None without ``tp_group``.

    Raises:
        ValueError: ``vocab_start`` or ``vocab_size`` without ``tp_group``, or out of range.
        TypeError: a ``tp_group`` that is no process group.
    """
    check_group("tp_group", tp_group)
    for name, value in (("vocab_start", vocab_start), ("vocab_size", vocab_size)):
        if value is not None and tp_group is None:
            raise ValueError(
                f"{name}={value} describes a shard of the vocabulary and needs tp_group, the "
                "ranks that hold the other shards"
            )
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}; expected at least 0")
    if tp_group is None:
        return None
    start = dist.get_rank(tp_group) * local_columns if vocab_start is None else vocab_start
    columns = local_columns
    if vocab_size is not None:
        columns = min(max(vocab_size - start, 0), local_columns)
    return VocabularyShard(tp_group, start, columns)


def combine_statistics(gathered: Tensor) -> Tensor:
    """Statistics ``[R, ..., 3]`` of the ranks' columns as those of all columns, ``[..., 3]``."""
    m = gathered[..., 0].amax(dim=0)
    c, t = torch.zeros_like(m), torch.zeros_like(m)
    for rank_m, rank_c, rank_t in (part.unbind(-1) for part in gathered.unbind(0)):
        at_maximum = rank_m == m
        shrink = torch.exp(rank_m - m)
        c = c + torch.where(at_maximum, rank_c, 0)
        t = t + torch.where(at_maximum, rank_t, (rank_c + rank_t) * shrink)
    return torch.stack([m, c, t], dim=-1)


def sum_over_ranks(gathered: Tensor) -> Tensor:
    """``[R, ...] -> [...]``, added in rank order."""
    total = gathered[0]
    for part in gathered[1:]:
        total = total + part
    return total
