"""w in 16 bits of words that `scaled_operand` takes: for more rows of x than a product with words
is the quickest for, and where none runs."""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.formats.packed_words import PackedWords
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.operands.linear_operands import form_constants
from llmpq.kernels.gemm.operands.scaled_operand import (
    SHARE,
    load_scaled,
    scale_words,
    scaled_operand,
)

WARPS = 4


@triton.jit
def scaled_dequantize_kernel(
    P0,
    P1,
    S,
    Z,
    OUT,
    K,
    blocks,
    groups,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    EVEN_K: tl.constexpr,
    WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """OUT [16 * blocks, K] = w; grid (tiles of rows, k-groups)."""
    DT: tl.constexpr = OUT.dtype.element_ty
    block, g = tl.program_id(0) * WM, tl.program_id(1)
    at = block.to(tl.int64) * groups
    P0 += at * (192 if BITS == 3 else 256)
    P1 += at * 256
    S += at * scale_words(FORM, GROUPED)
    if FORM != "nvfp4":
        Z += at * scale_words(FORM, GROUPED)
    left = blocks - block
    tile = load_scaled(P0, P1, S, Z, left, groups, g, FORM, BITS, GROUPED, SYMMETRIC, 1, WM, False)
    w = scaled_operand(
        tile, FORM, ASM, BITS, GROUPED, SYMMETRIC, DT, 1, WM, False, False, INTERPRET
    )
    row, k = block * 16 + tl.arange(0, 16 * WM), g * 128 + tl.arange(0, 128)
    if FORM == "nvfp4":
        factor = tl.load(Z + tl.minimum(row, blocks * 16 - 1)) * SHARE
        w = (w.to(tl.float32) * factor[:, None]).to(DT)
    keep = (row < blocks * 16)[:, None]
    if not EVEN_K:
        keep = keep & (k < K)[None, :]
    tl.store(OUT + row.to(tl.int64)[:, None] * K + k[None, :], w, mask=keep)


def scaled_dequantize(q: PackedWords, dtype: torch.dtype, *, interpret: bool = False) -> Tensor:
    """Return w of the whole blocks of 16 rows, [., K]."""
    n, k = q.out_features // BLOCK_ROWS * BLOCK_ROWS, q.in_features
    out = torch.empty(n, k, dtype=dtype, device=q.device)
    planes, scale, zero = q.block_words()
    blocks, groups = n // BLOCK_ROWS, triton.cdiv(k, GROUP)
    scaled_dequantize_kernel[(triton.cdiv(blocks, WARPS), groups)](
        planes[0],
        planes[-1],
        scale,
        zero,
        out,
        k,
        blocks,
        groups,
        **form_constants(q, dtype),
        EVEN_K=k % GROUP == 0,
        WM=WARPS,
        INTERPRET=interpret,
        num_warps=WARPS,
    )
    return out
