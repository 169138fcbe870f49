"""Logits [R, V] without the tokens that guides forbid, from bits; one pass instead of six.

    bits [R, bytes] uint8    token t is bit t % 8 of byte t // 8; beyond V may be more

    a program: BLOCK columns of one row    out = x where the bit is set, else -inf

Bytes: logits read once and written once, in their own type.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def only_allowed_kernel(x, bits, out, columns, row_stride, bit_stride, BLOCK: tl.constexpr):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    byte = tl.load(bits + row * bit_stride + column // 8, mask=there, other=0)
    allowed = (byte.to(tl.int32) >> (column % 8)) & 1 != 0
    values = tl.load(x + row * row_stride + column, mask=there & allowed, other=float("-inf"))
    tl.store(out + row * columns + column, values, mask=there)


def only_allowed(logits_RV: Tensor, bits_RB: Tensor) -> Tensor:
    """Return the logits with -inf for tokens whose bit is not set."""
    rows, columns = logits_RV.shape
    if len(bits_RB) != rows or bits_RB.shape[1] * 8 < columns or bits_RB.dtype != torch.uint8:
        raise ValueError(
            f"bits must be uint8 [{rows}, {-(-columns // 8)} or more], "
            f"got {bits_RB.dtype} {list(bits_RB.shape)}"
        )
    if logits_RV.stride(1) != 1 or bits_RB.stride(1) != 1:
        logits_RV, bits_RB = logits_RV.contiguous(), bits_RB.contiguous()
    out = torch.empty((rows, columns), dtype=logits_RV.dtype, device=logits_RV.device)
    only_allowed_kernel[(rows, triton.cdiv(columns, BLOCK))](
        logits_RV,
        bits_RB,
        out,
        columns,
        logits_RV.stride(0),
        bits_RB.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out
