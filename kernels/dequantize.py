"""Triton: a packed weight to a dense one, w[n, k] = (code - zero) * scale.

Any layout comes down to bytes at computed addresses, so one kernel serves ROWS, FRAGMENT and every
GPU; it is the first half of dequantise-then-cuBLAS and the oracle-like simple kernel of the room.

    program (row block of 16, run of k-groups): loads row bytes of one k-group at a time
    [16, 64] (4, 8 bit) or [16, 16] (3 bit), writes [16, 128] of w

Cost: bits/8 + 2 bytes moved per weight; at 4 bits 0.58 us a million weights at 4.3 TB/s.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.formats import Layout
from llmpq.kernels.qweight import QuantizedWeight

_GROUPS_PER_PROGRAM = 4


@triton.jit
def _nibble_address(row, byte, group, groups, full, FRAGMENT: tl.constexpr):
    """Address of row byte `byte` (0..63) of a 4-bit plane."""
    rows_form = (row * groups + group) * 64 + byte
    if not FRAGMENT:
        return rows_form
    r = row % 16
    lane = (r % 8) * 4 + byte // 2 % 4
    inner = byte // 16 % 2 * 8 + byte // 8 % 2 * 4 + r // 8 * 2 + byte % 2
    block_form = (row // 16 * groups + group) * 1024 + byte // 32 * 512 + lane * 16 + inner
    return tl.where(row < full, block_form, rows_form)


@triton.jit
def _plane3_address(
    row, j, half, group, groups, full, HALVES: tl.constexpr, FRAGMENT: tl.constexpr
):
    """Address of byte j (0..15) of a 3-bit plane with HALVES (2: A and B, 1: C) bytes a j."""
    rows_form = ((row * groups + group) * HALVES + half) * 16 + j
    if not FRAGMENT:
        return rows_form
    r = row % 16
    lane = (r % 8) * 4 + j // 2 % 4
    inner = half * 8 + j // 8 * 4 + r // 8 * 2 + j % 2
    block_form = (row // 16 * groups + group) * (256 * HALVES) + lane * (8 * HALVES) + inner
    return tl.where(row < full, block_form, rows_form)


@triton.jit
def _scale_address(row, group, groups, full, FRAGMENT: tl.constexpr):
    rows_form = row * groups + group
    if not FRAGMENT:
        return rows_form
    block_form = (row // 16 * groups + group) * 16 + row % 16
    return tl.where(row < full, block_form, rows_form)


@triton.jit
def dequantize_kernel(
    PLANE0,
    PLANE1,
    SCALE,
    ZERO,
    OUT,
    first_row,
    last_row,
    N,
    K,
    groups,
    BITS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    FRAGMENT: tl.constexpr,
    GROUPS_PER_PROGRAM: tl.constexpr,
):
    """OUT [last_row - first_row, K] = rows first_row.. of w; `groups` are k-groups of 128."""
    row = first_row + tl.program_id(0) * 16 + tl.arange(0, 16)
    full = N // 16 * 16
    inside = row < last_row
    out_row = OUT + (row - first_row).to(tl.int64) * K
    for step in range(GROUPS_PER_PROGRAM):
        group = tl.program_id(1) * GROUPS_PER_PROGRAM + step
        live = inside & (row * 0 + group < groups)
        scale_group = 0 if PER_CHANNEL else group
        scale_groups = 1 if PER_CHANNEL else groups
        at = _scale_address(row, scale_group, scale_groups, full, FRAGMENT)
        scale = tl.load(SCALE + at, mask=live, other=0.0).to(tl.float32)[:, None]
        if SYMMETRIC:
            zero = tl.full((16, 1), 1 << (BITS - 1), tl.float32)
        else:
            zero = tl.load(ZERO + at, mask=live, other=0.0).to(tl.float32)[:, None]
        row64 = row.to(tl.int64)[:, None]
        if BITS == 3:
            j = tl.arange(0, 16)[None, :]
            at = _plane3_address(row64, j, 0, group, groups, full, 1, FRAGMENT)
            third = tl.load(PLANE1 + at, mask=live[:, None], other=0)
            for half in tl.static_range(2):
                at = _plane3_address(row64, j, half, group, groups, full, 2, FRAGMENT)
                two = tl.load(PLANE0 + at, mask=live[:, None], other=0)
                for field in tl.static_range(4):
                    code = (two >> (2 * field) & 3) | (third >> (2 * field + half) & 1) << 2
                    w = (code.to(tl.float32) - zero) * scale
                    k = group * 128 + (half * 4 + field) * 16 + j
                    keep = live[:, None] & (k < K)
                    tl.store(out_row[:, None] + k, w.to(OUT.dtype.element_ty), mask=keep)
        else:
            byte = tl.arange(0, 64)[None, :]
            at = _nibble_address(row64, byte, group, groups, full, FRAGMENT)
            p = tl.load(PLANE0 + at, mask=live[:, None], other=0)
            low, high = p & 15, p >> 4
            if BITS == 8:
                q = tl.load(PLANE1 + at, mask=live[:, None], other=0)
                low, high = low << 4 | q & 15, high << 4 | q >> 4
            k = group * 128 + byte
            w_low = (low.to(tl.float32) - zero) * scale
            w_high = (high.to(tl.float32) - zero) * scale
            keep = live[:, None] & (k < K)
            tl.store(out_row[:, None] + k, w_low.to(OUT.dtype.element_ty), mask=keep)
            keep = live[:, None] & (k + 64 < K)
            tl.store(out_row[:, None] + k + 64, w_high.to(OUT.dtype.element_ty), mask=keep)


def dequantize_triton(
    qweight: QuantizedWeight, dtype: torch.dtype, first_row: int = 0, last_row: int | None = None
) -> Tensor:
    """Return rows first_row..last_row (first_row a multiple of 16) of w [N, K] in `dtype`."""
    if qweight.layout not in (Layout.ROWS, Layout.FRAGMENT):
        raise ValueError(
            f"dequantize_triton: got layout {qweight.layout.value}, expected rows or fragment"
        )
    last_row = qweight.out_features if last_row is None else last_row
    out = torch.empty(last_row - first_row, qweight.in_features, dtype=dtype, device=qweight.device)
    groups = -(-qweight.in_features // 128)
    grid = (triton.cdiv(last_row - first_row, 16), triton.cdiv(groups, _GROUPS_PER_PROGRAM))
    if out.numel():
        dequantize_kernel[grid](
            qweight.planes[0],
            qweight.planes[-1],
            qweight.scale,
            qweight.scale if qweight.zero is None else qweight.zero,
            out,
            first_row,
            last_row,
            qweight.out_features,
            qweight.in_features,
            groups,
            BITS=qweight.bits,
            PER_CHANNEL=qweight.group_size is None,
            SYMMETRIC=qweight.symmetric,
            FRAGMENT=qweight.layout is Layout.FRAGMENT,
            GROUPS_PER_PROGRAM=_GROUPS_PER_PROGRAM,
        )
    return out
