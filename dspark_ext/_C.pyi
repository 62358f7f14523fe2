"""Compiled kernels. Addresses are integers, 0 for none; strides are in elements."""

from collections.abc import Sequence
from typing import Optional

compiler: str
openmp: bool
cuda_architectures: Optional[str]
cuda_toolkit: Optional[str]

class DType:
    float32: DType
    bfloat16: DType
    float16: DType
    float64: DType

class Rows:
    def __init__(
        self,
        data: int,
        dtype: DType,
        sizes: Sequence[int],
        strides: Sequence[int],
        columns: int,
    ) -> None: ...

def cpu_level() -> str: ...
def cpu_available_levels() -> str: ...
def cpu_chunk_scratch_bytes(columns: int) -> int: ...
def cpu_weighted_scratch_bytes(columns: int, wide: bool) -> int: ...
def cpu_log_softmax(
    logits: Rows,
    ids: int,
    active: int,
    statistics: int,
    log_prob: int,
    scratch: int,
    threads: int,
) -> None: ...
def cpu_l1_distance(
    draft: Rows,
    target: Rows,
    active: int,
    draft_statistics: int,
    target_statistics: int,
    l1: int,
    sides: int,
    scratch: int,
    threads: int,
) -> None: ...
def cpu_gradient(
    draft: Rows,
    target: Optional[Rows],
    ids: int,
    active: int,
    draft_statistics: int,
    target_statistics: int,
    sides: int,
    ce_coefficient: int,
    l1_coefficient: int,
    gradient: Rows,
    threads: int,
) -> None: ...
def cpu_weighted(
    draft: Rows,
    target: Optional[Rows],
    ids: int,
    active: int,
    ce_coefficient: int,
    l1_coefficient: int,
    ce: int,
    l1: int,
    draft_statistics: int,
    target_statistics: int,
    sides: int,
    gradient: Optional[Rows],
    scratch: int,
    threads: int,
) -> None: ...
def cpu_scale(
    source: int,
    destination: int,
    dtype: DType,
    count: int,
    factor: int,
    factor_dtype: DType,
    threads: int,
) -> None: ...
def cpu_ordered_sum(values: int, sums: int, dtype: DType, rows: int, columns: int) -> None: ...
def cpu_exponential(x: int, y: int, count: int) -> None: ...
def cpu_advise_huge_pages(data: int, bytes: int) -> None: ...
def cuda_scratch_bytes(draft: Rows, target: Optional[Rows], device: int) -> int: ...
def cuda_resident_plan(
    draft: Rows, target: Optional[Rows], gradient: Optional[Rows], device: int
) -> tuple[int, int, int]: ...
def cuda_log_softmax(
    logits: Rows,
    order: Rows,
    ids: int,
    active: int,
    statistics: int,
    log_prob: int,
    scratch: int,
    device: int,
    stream: int,
) -> None: ...
def cuda_l1_distance(
    draft: Rows,
    target: Rows,
    active: int,
    draft_statistics: int,
    target_statistics: int,
    l1: int,
    sides: int,
    scratch: int,
    device: int,
    stream: int,
) -> None: ...
def cuda_gradient(
    draft: Rows,
    target: Optional[Rows],
    ids: int,
    active: int,
    draft_statistics: int,
    target_statistics: int,
    sides: int,
    ce_coefficient: int,
    l1_coefficient: int,
    gradient: Rows,
    device: int,
    stream: int,
) -> None: ...
def cuda_weighted(
    draft: Rows,
    target: Optional[Rows],
    ids: int,
    active: int,
    ce_coefficient: int,
    l1_coefficient: int,
    ce: int,
    l1: int,
    draft_statistics: int,
    target_statistics: int,
    sides: int,
    gradient: Optional[Rows],
    scratch: int,
    device: int,
    stream: int,
) -> None: ...
def cuda_scale(
    source: int,
    destination: int,
    dtype: DType,
    count: int,
    factor: int,
    device: int,
    stream: int,
) -> None: ...
def cuda_ordered_sum(
    values: int, sums: int, dtype: DType, rows: int, columns: int, device: int, stream: int
) -> None: ...
