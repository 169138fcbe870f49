"""RMSNorm of every query and key head of a fused qkv product, in place, as one launch.

    qkv [T, (H + 2 G) D]     heads 0..H-1: norm with q's weight, H..H+G-1: with k's, v: as it is

Bytes: q and k read once and written once. A program takes HEADS heads of a token.

T tokens, H query heads, G key/value heads, D head_dim.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

HEADS = 4


@triton.jit
def head_norm_kernel(
    qkv,
    q_weight,
    k_weight,
    row_stride,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one token; rows lie `row_stride` elements apart."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED)
    live = (head < H + G)[:, None] & (d < D)[None, :]
    own = (head < H)[:, None]
    wq = tl.load(q_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    wk = tl.load(k_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + tl.program_id(0).to(tl.int64) * row_stride + head[:, None] * D + d[None, :]
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    y = x * scale[:, None] * tl.where(own, wq, wk)
    tl.store(at, y.to(qkv.dtype.element_ty), mask=live)


def head_norm(qkv_TNd: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, eps: float) -> None:
    """Normalise the first heads + G of the heads + 2 G heads of qkv [T, heads + 2 G, D]."""
    tokens, count, dim = qkv_TNd.shape
    if qkv_TNd.stride(2) != 1 or qkv_TNd.stride(1) != dim:
        raise ValueError(f"heads of a token must lie side by side, got strides {qkv_TNd.stride()}")
    groups, pdl = (count - heads) // 2, overlaps(qkv_TNd.device)
    head_norm_kernel[(tokens, triton.cdiv(heads + groups, HEADS))](
        qkv_TNd,
        q_weight,
        k_weight,
        qkv_TNd.stride(0),
        eps,
        H=heads,
        G=groups,
        D=dim,
        PADDED=triton.next_power_of_2(dim),
        HEADS=HEADS,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
