"""Tensors to pointers: the only caller of the compiled module ``_C``.

Every function here runs inside an op body (or under ``no_grad``), takes tensors that the public
functions have validated, allocates results and scratch with torch, and hands addresses, strides
in elements and dtype codes to C++. Leading dimensions are free; per-row tensors have the
logits' shape without its last dimension.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from typing import Optional

import torch  # before _C, so that both share torch's OpenMP runtime
from torch import Tensor

try:
    from dspark_ext import _C
except ImportError as error:  # pragma: no cover - a broken installation
    raise ImportError(
        "dspark_ext is not built here: its compiled module dspark_ext._C could not be imported "
        f"({error}). Install the package with `pip install .` from its source folder and import "
        "it from another folder, or use `pip install -e .`."
    ) from error

from dspark_ext._validate import check_same_shape
from dspark_ext.reference import IGNORE_INDEX, real_dtype

DTYPES = {
    torch.float32: _C.DType.float32,
    torch.bfloat16: _C.DType.bfloat16,
    torch.float16: _C.DType.float16,
    torch.float64: _C.DType.float64,
}

# Below this size a gradient's pages are too few for huge ones to matter.
_HUGE_PAGE_BYTES = 4 << 20

_warned_devices: set[str] = set()


def result_dtype(draft: Tensor) -> torch.dtype:
    """The dtype of per-row results: float64 for float64 drafts, else float32."""
    return torch.float64 if draft.dtype == torch.float64 else torch.float32


def uses_kernel(impl: str, device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether ``impl`` means the compiled kernel for logits of these dtypes on ``device``.

    Raises:
        ValueError: ``impl`` is not one of auto, kernel, torch.
        RuntimeError: ``impl="kernel"`` where this build has no kernel for them.
    """
    if impl not in ("auto", "kernel", "torch"):
        raise ValueError(f"impl is {impl!r}; expected 'auto', 'kernel' or 'torch'")
    if impl == "torch":
        return False
    if has_kernels(device, *dtypes):
        return True
    wide = "float64 " if torch.float64 in dtypes else ""
    if impl == "kernel":
        raise RuntimeError(
            f"impl='kernel', but this build of dspark_ext has no kernel for {wide}logits on "
            f"{device} (`python -m dspark_ext info` lists what it has); use impl='torch' or 'auto'"
        )
    if not wide and device.type not in _warned_devices and not torch.compiler.is_compiling():
        _warned_devices.add(device.type)
        warnings.warn(
            f"dspark_ext has no kernel for {device.type} tensors in this build and uses the "
            "chunked PyTorch path; pass impl='torch' to choose it without this warning",
            RuntimeWarning,
            stacklevel=3,
        )
    return False


def has_kernels(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether this build can run its kernels on a device, for logits of these dtypes."""
    if device.type == "cpu":
        return True
    if device.type != "cuda" or cuda_architectures() is None or torch.float64 in dtypes:
        return False
    return torch.compiler.is_compiling() or _supported(device.index)


@functools.cache
def _supported(index: Optional[int]) -> bool:
    """Whether a GPU is as new as the oldest architecture of this build; True without a GPU."""
    if not torch.cuda.is_available():
        return True
    major, minor = torch.cuda.get_device_capability(index)
    built = [int(number) for number in re.findall(r"\d+", cuda_architectures() or "")]
    return 10 * major + minor >= min(built)


def cuda_architectures() -> Optional[str]:
    """The architectures the CUDA kernels were compiled for, or None without them."""
    return _C.cuda_architectures


def on_host(tensor: Tensor) -> bool:
    """Whether the host's kernels take this tensor, and its values can be read for free."""
    return tensor.device.type == "cpu"


def checks_enabled() -> bool:
    """Whether DSPARK_EXT_CHECK asks for checks that cost a host synchronisation."""
    return os.environ.get("DSPARK_EXT_CHECK", "") not in ("", "0")


def refuse_ids(ids: Tensor, refused: Tensor, columns: str) -> None:
    """Raises IndexError naming the first position where ``refused`` is set; reads the host."""
    if not bool(refused.any()):
        return
    index = refused.nonzero()[0].tolist()
    raise IndexError(
        f"target_ids{index} is {int(ids[tuple(index)])}, which is not a column of the logits: "
        f"expected 0 <= id < {columns}, {IGNORE_INDEX} to leave the position out of the "
        "cross-entropy, or an eval_mask of 0 there"
    )


def check_ids(ids: Tensor, active: Optional[Tensor], columns: int) -> None:
    """Refuses an active id that is no column; on the host, or where checks are asked for."""
    if torch.compiler.is_compiling() or not (on_host(ids) or checks_enabled()):
        return
    refused = ((ids < 0) | (ids >= columns)) & (ids != IGNORE_INDEX)
    refuse_ids(ids, refused if active is None else refused & active, str(columns))


def log_softmax(
    logits: Tensor,
    ids: Optional[Tensor],
    active: Optional[Tensor],
    order: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """Row statistics ``[..., 3]`` and, given ids, their log-probabilities ``[...]``.

    A device's kernels add up a row's columns in an order that follows from its alignment, here
    from that of ``order``: rows that are compared with each other take the same.
    """
    order = logits if order is None else order
    _check_alike(logits, order)
    real = real_dtype(logits)
    leading, columns = logits.shape[:-1], logits.shape[-1]
    statistics = logits.new_empty((*leading, 3), dtype=real)
    log_prob = logits.new_empty(leading if ids is not None else (0,), dtype=real)
    ids, active = _prepare_ids(ids, active, logits)
    rows = _rows(logits)
    arguments = (
        _address(ids),
        _address(active),
        _address(statistics),
        _address(log_prob if ids is not None else None),
    )
    if on_host(logits):
        threads = torch.get_num_threads()
        scratch = _scratch(threads * _C.cpu_chunk_scratch_bytes(columns))
        _C.cpu_log_softmax(rows, *arguments, _address(scratch), threads)
    else:
        device, stream = _where(logits)
        scratch = _gpu_scratch(logits, rows, None, device)
        _C.cuda_log_softmax(rows, _rows(order), *arguments, _address(scratch), device, stream)
    return statistics, log_prob


def l1_distance(
    draft: Tensor,
    target: Tensor,
    draft_statistics: Tensor,
    target_statistics: Tensor,
    active: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """``l1`` per row and the sides of S, ``[..., 2]``, from known statistics."""
    _check_alike(draft, target)
    real = real_dtype(draft, target)
    leading, columns = draft.shape[:-1], draft.shape[-1]
    l1 = draft.new_empty(leading, dtype=real)
    sides = draft.new_empty((*leading, 2), dtype=real)
    # Named here so that converted copies live until the kernel has read them.
    known = _contiguous(draft_statistics, real, (*leading, 3))
    target_known = _contiguous(target_statistics, real, (*leading, 3))
    active = _contiguous(active, torch.bool, leading)
    arguments = (
        _rows(draft),
        _rows(target),
        _address(active),
        _address(known),
        _address(target_known),
        _address(l1),
        _address(sides),
    )
    if on_host(draft):
        threads = torch.get_num_threads()
        scratch = _scratch(threads * _C.cpu_chunk_scratch_bytes(columns))
        _C.cpu_l1_distance(*arguments, _address(scratch), threads)
    else:
        device, stream = _where(draft)
        scratch = _gpu_scratch(draft, *arguments[:2], device)
        _C.cuda_l1_distance(*arguments, _address(scratch), device, stream)
    return l1, sides


def gradient(
    ce_coefficient: Optional[Tensor],
    l1_coefficient: Optional[Tensor],
    draft: Tensor,
    target: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    draft_statistics: Tensor,
    target_statistics: Optional[Tensor],
    sides: Optional[Tensor],
) -> Tensor:
    """Gradient of ``sum(a * ce + b * l1)`` in the draft's shape and dtype, contiguous."""
    _check_alike(draft, target)
    real, leading = real_dtype(draft, target), draft.shape[:-1]
    # Ids were checked in forward; in a shard, the columns of some lie elsewhere.
    ids = _contiguous(ids, torch.int64, leading)
    active = _contiguous(active, torch.bool, leading)
    out = empty_gradient(draft)
    # Named here so that converted copies live until the kernel has read them.
    known = _contiguous(draft_statistics, real, (*leading, 3))
    target_known = _contiguous(target_statistics, real, (*leading, 3))
    ce_coefficient = _contiguous(ce_coefficient, real, leading)
    l1_coefficient = _contiguous(l1_coefficient, real, leading)
    sides = _contiguous(sides, real, (*leading, 2))
    arguments = (
        _rows(draft),
        None if target is None else _rows(target),
        _address(ids),
        _address(active),
        _address(known),
        _address(target_known),
        _address(sides),
        _address(ce_coefficient),
        _address(l1_coefficient),
        _rows(out),
    )
    if on_host(draft):
        _C.cpu_gradient(*arguments, torch.get_num_threads())
    else:
        _C.cuda_gradient(*arguments, *_where(draft))
    return out


def ce_and_l1(
    draft: Tensor, target: Optional[Tensor], ids: Optional[Tensor], active: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``ce``, ``l1``, both statistics ``[..., 3]``, the sides of S ``[..., 2]``: one visit."""
    statistics = _empty_statistics(draft, target)
    ce, l1 = _weighted(draft, target, ids, active, statistics=statistics)
    return ce, l1, *statistics


def weighted(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Tensor,
    active: Optional[Tensor],
    ce_coefficient: Tensor,
    l1_coefficient: Tensor,
    gradient: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """``ce`` and ``l1``, and into ``gradient`` (None, fresh memory, or the draft itself) the
    gradient of ``sum(ce_coefficient * ce + l1_coefficient * l1)``."""
    return _weighted(
        draft,
        target,
        ids,
        active,
        ce_coefficient=ce_coefficient,
        l1_coefficient=l1_coefficient,
        gradient=gradient,
    )


def scale(source: Tensor, factor: Tensor, destination: Tensor) -> None:
    """``destination = source * factor`` with one rounding; contiguous, maybe the same tensor."""
    _check_alike(source, destination)
    wide = factor.dtype == torch.float64 and on_host(source)
    factor = factor.to(torch.float64 if wide else torch.float32).reshape(())
    arguments = (
        _address(source),
        _address(destination),
        DTYPES[source.dtype],
        source.numel(),
        _address(factor),
    )
    if on_host(source):
        _C.cpu_scale(*arguments, DTYPES[factor.dtype], torch.get_num_threads())
    else:
        _C.cuda_scale(*arguments, *_where(source))


def ordered_sum(values: Tensor) -> Tensor:
    """Sum over the first dimension, ``[M, ...] -> [...]``, float32 or float64, in row order."""
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"ordered_sum adds float32 or float64, not {values.dtype}")
    values = values.contiguous()
    sums = values.new_empty(values.shape[1:])
    arguments = (
        _address(values),
        _address(sums),
        DTYPES[values.dtype],
        values.shape[0],
        sums.numel(),
    )
    if on_host(values):
        _C.cpu_ordered_sum(*arguments)
    else:
        _C.cuda_ordered_sum(*arguments, *_where(values))
    return sums


def empty_gradient(like: Tensor) -> Tensor:
    """Fresh contiguous memory of a tensor's shape and dtype, in huge pages where possible."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    size = out.numel() * out.element_size()
    if size >= _HUGE_PAGE_BYTES and on_host(out):
        _C.cpu_advise_huge_pages(_address(out), size)
    return out


def _empty_statistics(draft: Tensor, target: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Room for both rows' statistics ``[..., 3]`` and the sides of S ``[..., 2]``."""
    real, leading = real_dtype(draft, target), draft.shape[:-1]
    return (
        draft.new_empty((*leading, 3), dtype=real),
        draft.new_empty((*leading, 3), dtype=real),
        draft.new_empty((*leading, 2), dtype=real),
    )


def _weighted(
    draft: Tensor,
    target: Optional[Tensor],
    ids: Optional[Tensor],
    active: Optional[Tensor],
    *,
    ce_coefficient: Optional[Tensor] = None,
    l1_coefficient: Optional[Tensor] = None,
    statistics: Optional[tuple[Tensor, Tensor, Tensor]] = None,
    gradient: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    _check_alike(draft, target)
    _check_alike(draft, gradient)
    real = real_dtype(draft, target)
    leading, columns = draft.shape[:-1], draft.shape[-1]
    ids, active = _prepare_ids(ids, active, draft)
    ce_coefficient = _contiguous(ce_coefficient, real, leading)
    l1_coefficient = _contiguous(l1_coefficient, real, leading)
    ce = draft.new_empty(leading, dtype=real)
    l1 = torch.empty_like(ce)
    if not on_host(draft):
        # These kernels note statistics in any case, and leave alone what takes a target.
        statistics = statistics or _empty_statistics(draft, target)
        if target is None:
            for values in (l1, *statistics[1:]):
                values.zero_()
    draft_statistics, target_statistics, sides = statistics or (None, None, None)
    arguments = (
        _rows(draft),
        None if target is None else _rows(target),
        _address(ids),
        _address(active),
        _address(ce_coefficient),
        _address(l1_coefficient),
        _address(ce),
        _address(l1),
        _address(draft_statistics),
        _address(target_statistics),
        _address(sides),
        None if gradient is None else _rows(gradient),
    )
    if on_host(draft):
        threads = torch.get_num_threads()
        scratch = _scratch(threads * _C.cpu_weighted_scratch_bytes(columns, real == torch.float64))
        _C.cpu_weighted(*arguments, _address(scratch), threads)
    else:
        device, stream = _where(draft)
        scratch = _gpu_scratch(draft, *arguments[:2], device)
        _C.cuda_weighted(*arguments, _address(scratch), device, stream)
    return ce, l1


def _prepare_ids(
    ids: Optional[Tensor], active: Optional[Tensor], logits: Tensor
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Contiguous int64 ids and bool mask; on the host, ids are checked before a kernel runs."""
    active = _contiguous(active, torch.bool, logits.shape[:-1])
    ids = _contiguous(ids, torch.int64, logits.shape[:-1])
    if ids is not None:
        check_ids(ids, active, logits.shape[-1])
    return ids, active


def _rows(tensor: Tensor) -> _C.Rows:
    return _C.Rows(
        _address(tensor),
        DTYPES[tensor.dtype],
        tensor.shape[:-1],
        tensor.stride()[:-1],
        tensor.shape[-1],
    )


def _address(tensor: Optional[Tensor]) -> int:
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() > 0:
        raise TypeError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own; "
            "pass a plain tensor (to_local() for a DTensor)"
        )
    return address


def _where(tensor: Tensor) -> tuple[int, int]:
    """A device tensor's device and the stream that is current there, read at every call."""
    stream = torch.cuda.current_stream(tensor.device)
    return stream.device_index, stream.cuda_stream


def _gpu_scratch(like: Tensor, draft: _C.Rows, target: Optional[_C.Rows], device: int) -> Tensor:
    return like.new_empty(_C.cuda_scratch_bytes(draft, target, device), dtype=torch.uint8)


def _scratch(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _contiguous(
    tensor: Optional[Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> Optional[Tensor]:
    """A per-row tensor as a kernel reads it; it has no bounds but the logits' to check against."""
    if tensor is None:
        return None
    check_same_shape("a per-row tensor", tensor, shape, "the logits")
    return tensor.to(dtype).contiguous()


def _check_alike(draft: Tensor, other: Optional[Tensor]) -> None:
    """Raises ValueError unless the two matrices have one shape."""
    if other is not None:
        check_same_shape("a matrix of logits", other, tuple(draft.shape), "the draft")
