"""Launches every CUDA kernel once or twice on small shapes, for compute-sanitizer to watch."""

from __future__ import annotations

import torch

import dspark_ext
from dspark_ext import ops  # noqa: F401  (registers the ops)

OPS = torch.ops.dspark_ext


def weighted(N: int, V: int, dtype: torch.dtype, offset: int = 0) -> None:
    """The fused op, in memory of its own and in place, with and without inactive rows."""
    draft, target = (
        torch.randn(N, V + 8, device="cuda").to(dtype)[:, offset : offset + V] for _ in range(2)
    )
    ids = torch.arange(N, device="cuda") % V
    ones = torch.ones(N, device="cuda")
    for active in (None, ids % 3 != 1):
        gradient = OPS.weighted_fwd(draft, target, ids, active, ones, ones, True)[3]
        OPS.weighted_fwd(draft, target, ids, active, ones, ones, False)
        OPS.weighted_bwd_(gradient, torch.tensor(2.0, device="cuda"))
    OPS.weighted_inplace_(draft, target, ids, None, ones, ones)


def main() -> None:
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    weighted(5, 4096, bf16)  # row-resident, one block
    weighted(5, 49152, bf16)  # a cluster of four
    weighted(2, 262144, bf16)  # a cluster of sixteen
    weighted(3, 49152, f32)
    weighted(1500, 64, f16)  # more rows than one tile of the order
    weighted(3, 4097, bf16, offset=1)  # portable, off every boundary
    draft = torch.randn(4, 20001, device="cuda", requires_grad=True)
    target = torch.randn(4, 20001, device="cuda").to(bf16)
    ids = torch.arange(4, device="cuda")
    ce, l1 = dspark_ext.ce_and_l1(draft, target, ids)
    (ce.sum() + l1.sum()).backward()
    dspark_ext.token_log_prob(draft, ids).sum().backward()
    torch.cuda.synchronize()
    print("launched")


if __name__ == "__main__":
    main()
