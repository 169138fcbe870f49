"""GPTQ's inner loop in Triton: columns that share a scale, rounded one after the other, rows apart.

    for k in 0 .. B - 1: q = clamp(round(w_k / scale) + zero, low, high)
                         error = (w_k - (q - zero) scale) / u_kk
                         w_j -= error u_kj   for every j > k

Rows are independent, so a program keeps ROWS of them in registers for all columns: one launch where
torch needs about ten a column. Bytes: w, codes and errors once, u [B, B] from the L2.

N rows of w, B columns, a power of two.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


@triton.jit
def block_kernel(
    W,
    U,
    SCALE,
    ZERO,
    CODES,
    ERRORS,
    N,
    w_stride,
    u_stride,
    low,
    high,
    ROWS: tl.constexpr,
    B: tl.constexpr,
):
    """One program: ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, B)
    live = (row < N)[:, None] & (column >= 0)[None, :]
    at = row.to(tl.int64)[:, None]
    w = tl.load(W + at * w_stride + column[None, :], mask=live, other=0.0)
    scale = tl.load(SCALE + row, mask=row < N, other=1.0)
    zero = tl.load(ZERO + row, mask=row < N, other=0.0)
    codes = tl.zeros((ROWS, B), tl.float32)
    errors = tl.zeros((ROWS, B), tl.float32)
    for k in range(B):
        here = (column == k)[None, :]
        u = tl.load(U + k * u_stride + column)
        x = tl.sum(tl.where(here, w, 0.0), axis=1)
        # Adding 1.5 * 2^23 rounds half to even.
        q = (tl.div_rn(x, scale) + 12582912.0) - 12582912.0 + zero
        q = tl.minimum(tl.maximum(q, low), high)
        error = tl.div_rn(x - (q - zero) * scale, zero * 0.0 + tl.load(U + k * u_stride + k))
        w -= error[:, None] * tl.where(column > k, u, 0.0)[None, :]
        codes = tl.where(here, q[:, None], codes)
        errors = tl.where(here, error[:, None], errors)
    tl.store(CODES + at * B + column[None, :], codes, mask=live)
    tl.store(ERRORS + at * B + column[None, :], errors, mask=live)


def round_block(
    w_NB: Tensor, u_BB: Tensor, scale_N1: Tensor, zero_N1: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return codes and errors [N, B] of B columns; w is left as it was."""
    n, columns = w_NB.shape
    if columns.bit_count() != 1 or w_NB.stride(1) != 1:
        raise ValueError(
            f"round_block: got {columns} columns, expected a power of two next to each other"
        )
    u_BB = u_BB.contiguous()  # Cholesky factors come column by column
    codes = torch.empty(n, columns, device=w_NB.device)
    errors = torch.empty_like(codes)
    block_kernel[(triton.cdiv(n, _ROWS),)](
        w_NB,
        u_BB,
        scale_N1.contiguous(),
        zero_N1.contiguous(),
        codes,
        errors,
        n,
        w_NB.stride(0),
        u_BB.stride(0),
        float(limits[0]),
        float(limits[1]),
        ROWS=_ROWS,
        B=columns,
        num_warps=4,
    )
    return codes, errors
