"""Triton: a packed weight to a dense one, w[n, k] = (code - zero) * scale.

The first half of dequantise-then-cuBLAS (long prefills, GPUs whose tensor cores Triton does not
drive), and the simplest user of each layout.

    fragment   program = 16*BH*WM rows x one k-group: words --> registers --> w [rows, 128]
    rows       program = 16 rows x one k-group: bytes at computed addresses (rows past the last
               full block of a FRAGMENT weight, and ROWS weights)

Cost: bits/8 + 2 bytes moved per weight; at 4 bits 0.58 us a million weights at 4.3 TB/s.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.formats.packed_words import PackedWords
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, Layout
from llmpq.kernels.gemm.operands.packed_operands import (
    load_pairs,
    load_words,
    pair_floats,
    unpack,
    zero_constants,
)

# 32 rows of one k-group and 2 warps: 4 words of 8 codes a thread, enough loads in flight with many
# programs to a multiprocessor.
_WARPS, _BLOCKS_PER_WARP = 2, 1


@triton.jit
def fragment_dequantize_kernel(
    P0,
    P1,
    S,
    Z,
    OUT,
    K,
    blocks,
    groups,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """OUT [16 * blocks, K] = w; grid (row tiles, k-groups)."""
    DT: tl.constexpr = OUT.dtype.element_ty
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    BN: tl.constexpr = BH * WM * 16
    block = tl.program_id(0) * (BH * WM)
    group = tl.program_id(1)
    left = blocks - block
    base = block.to(tl.int64) * groups * WORDS
    if BITS == 3:
        words = (
            load_words(P0 + base, left, groups, group, 192, 0, BH, WM, False),
            load_words(P0 + base, left, groups, group, 192, 1, BH, WM, False),
            load_words(P0 + base, left, groups, group, 192, 2, BH, WM, False),
        )
    elif BITS == 8:
        words = (
            load_words(P0 + base, left, groups, group, 256, 0, BH, WM, False),
            load_words(P1 + base, left, groups, group, 256, 0, BH, WM, False),
        )
    else:
        words = (load_words(P0 + base, left, groups, group, 256, 0, BH, WM, False),)
    s_groups = groups if GROUPED else 1
    s_group = group if GROUPED else 0
    zeros = ()
    if not SYMMETRIC:
        zero = load_pairs(Z + block * s_groups * 8, left, s_groups, s_group, BH, WM, False)
        zeros = zero_constants(zero, BITS, DT, INTERPRET)
    w = unpack(words, zeros, BITS, DT, SYMMETRIC, BH, WM, False, False, INTERPRET)
    pairs = load_pairs(S + block * s_groups * 8, left, s_groups, s_group, BH, WM, False)
    low, high = pair_floats(pairs, DT)
    scale = tl.permute(tl.reshape(tl.join(low, high), (BH, WM, 8, 4, 2)), (0, 1, 4, 2, 3))
    scale = tl.reshape(scale, (BN, 1, 4, 1))
    w = tl.reshape(tl.reshape(w, (BN, 16, 4, 2)).to(tl.float32) * scale, (BN, 128)).to(DT)
    row = block * 16 + tl.arange(0, BN)
    k = group * 128 + tl.arange(0, 128)
    keep = (row < blocks * 16)[:, None]
    if not EVEN_K:
        keep = keep & (k < K)[None, :]
    tl.store(OUT + row.to(tl.int64)[:, None] * K + k[None, :], w, mask=keep)


@triton.jit
def rows_dequantize_kernel(
    P0,
    P1,
    S,
    Z,
    OUT,
    rows,
    K,
    groups,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """OUT [rows, K] = w of ROWS bytes; grid (16-row blocks, k-groups)."""
    DT: tl.constexpr = OUT.dtype.element_ty
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    group = tl.program_id(1)
    inside = row < rows
    at = row * groups + group if GROUPED else row
    scale = tl.load(S + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    if SYMMETRIC:
        zero = tl.full((16, 1), 1 << (BITS - 1), tl.float32)
    else:
        zero = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    start = (row.to(tl.int64) * groups + group)[:, None]
    out = OUT + row.to(tl.int64)[:, None] * K
    keep = inside[:, None]
    if BITS == 3:
        j = tl.arange(0, 16)[None, :]
        third = tl.load(P0 + start * 48 + 32 + j, mask=keep, other=0)
        for half in tl.static_range(2):
            two = tl.load(P0 + start * 48 + 16 * half + j, mask=keep, other=0)
            for field in tl.static_range(4):
                code = (two >> (2 * field) & 3) | (third >> (2 * field + half) & 1) << 2
                k = group * 128 + (half * 4 + field) * 16 + j
                w = (code.to(tl.float32) - zero) * scale
                tl.store(out + k, w.to(DT), mask=keep & (k < K))
    else:
        j = tl.arange(0, 64)[None, :]
        p = tl.load(P0 + start * 64 + j, mask=keep, other=0)
        low, high = p & 15, p >> 4
        if BITS == 8:
            q = tl.load(P1 + start * 64 + j, mask=keep, other=0)
            low, high = low << 4 | q & 15, high << 4 | q >> 4
        k = group * 128 + j
        tl.store(out + k, ((low.to(tl.float32) - zero) * scale).to(DT), mask=keep & (k < K))
        k += 64
        tl.store(out + k, ((high.to(tl.float32) - zero) * scale).to(DT), mask=keep & (k < K))


def dequantize_triton(qweight: PackedWords, *, interpret: bool = False) -> Tensor:
    """Return w [N, K] in the dtype of the scales; layouts FRAGMENT (float16, bfloat16) and ROWS."""
    if qweight.layout not in (Layout.ROWS, Layout.FRAGMENT):
        raise ValueError(
            f"dequantize_triton: got layout {qweight.layout.value}, expected rows or fragment"
        )
    n, k = qweight.out_features, qweight.in_features
    out = torch.empty(n, k, dtype=qweight.scale.dtype, device=qweight.device)
    full = n // BLOCK_ROWS * BLOCK_ROWS if qweight.layout is Layout.FRAGMENT else 0
    if full:
        _dequantize_blocks(qweight, out, full // BLOCK_ROWS, interpret)
    if full < n:
        _dequantize_rows(qweight, out, full)
    return out


def _dequantize_blocks(q: PackedWords, out: Tensor, blocks: int, interpret: bool) -> None:
    planes, scale, zero = q.block_words()
    groups = -(-q.in_features // 128)
    grid = (triton.cdiv(blocks, _WARPS * _BLOCKS_PER_WARP), groups)
    fragment_dequantize_kernel[grid](
        planes[0],
        planes[-1],
        scale,
        zero,
        out,
        q.in_features,
        blocks,
        groups,
        BITS=q.bits,
        GROUPED=q.group_size is not None,
        SYMMETRIC=q.symmetric,
        EVEN_K=q.in_features % 128 == 0,
        BH=_BLOCKS_PER_WARP,
        WM=_WARPS,
        INTERPRET=interpret,
        num_warps=_WARPS,
    )


def _dequantize_rows(q: PackedWords, out: Tensor, first_row: int) -> None:
    rows = q.out_features - first_row
    groups = -(-q.in_features // 128)
    planes = [p[p.numel() // q.out_features * first_row :] for p in q.planes]
    scale = q.scale[q.groups * first_row :]
    rows_dequantize_kernel[(triton.cdiv(rows, 16), groups)](
        planes[0],
        planes[-1],
        scale,
        scale if q.zero is None else q.zero[q.groups * first_row :],
        out[first_row:],
        rows,
        q.in_features,
        groups,
        BITS=q.bits,
        GROUPED=q.group_size is not None,
        SYMMETRIC=q.symmetric,
    )
