"""The end of an expert's product: bias, gate, and y in the order of pairs or tokens."""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.gemm.experts.gated import gated


@triton.jit
def store_pairs(
    acc,
    acc2,
    Y,
    BIAS,
    order,
    row,
    live,
    n0,
    e,
    N,
    limit,
    slope,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCATTER: tl.constexpr,
    FUSE: tl.constexpr,
    ACT: tl.constexpr,
):
    """Add the expert's bias to acc [BN, BM] and store it, transposed, into y [C, N].

    FUSE: acc2 are the rows N / 2 further on; act(acc) * acc2 goes into y [C, N / 2].
    """
    n = n0 + tl.arange(0, BN)
    F = N // 2 if FUSE else N
    target = row
    if SCATTER:
        target = tl.load(order + row, mask=live, other=0)
    if HAS_BIAS:
        at = BIAS + e.to(tl.int64) * N + n
        acc += tl.load(at, mask=n < F, other=0.0).to(tl.float32)[:, None]
        if FUSE:
            acc2 += tl.load(at + F, mask=n < F, other=0.0).to(tl.float32)[:, None]
    if FUSE:
        acc = gated(acc, acc2, limit, slope, ACT)
    at = target.to(tl.int64)[None, :] * F + n[:, None]
    tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=live[None, :] & (n < F)[:, None])
