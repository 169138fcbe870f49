"""The place of the largest number of each row, the first of equals: greedy tokens of logits [B, V].

As torch's argmax, a NaN counts as larger than any number: the column is one of the row's, always.

    parts   programs (row, part): the largest of BLOCK columns and its column
    merge   a program a row: the largest of the parts, the lowest column of equals

torch's own argmax gives a row to few programs (H200, 32 rows of 128256: 36 us). V columns.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

BLOCK = 4096
"""Columns of a program."""


@triton.jit
def _order(x):
    """float32 as int32 in the same order: zeros are equal, a NaN comes last."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)  # noqa: PLR0124


@triton.jit
def parts_kernel(x, best, place, columns, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One block of columns of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + column, mask=column < columns, other=float("-inf"))
    top, at = tl.max(_order(values.to(tl.float32)), 0, return_indices=True)
    tl.store(best + row * parts + part, top)
    tl.store(place + row * parts + part, part * BLOCK + at)


@triton.jit
def merge_kernel(
    best,
    place,
    out,
    slots,
    table,
    parts,
    NOT_FINITE: tl.constexpr,
    PARTS: tl.constexpr,
    REMEMBER: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    there = part < parts
    tops = tl.load(best + row * parts + part, mask=there, other=-0x80000000)
    top, at = tl.max(tops, 0, return_indices=True)
    column = tl.load(place + row * parts + at).to(tl.int64)
    if NOT_FINITE < 0:
        finite = (top < 0x7F800000) & (top > -0x7F800001)  # between the infinities in this order
        tl.store(out + row, tl.where(finite, column, NOT_FINITE))
    else:
        tl.store(out + row, column)
    if REMEMBER:
        tl.store(table + tl.load(slots + row), column)


def argmax(
    x_BV: Tensor,
    *,
    slots_B: Tensor | None = None,
    table_S: Tensor | None = None,
    not_finite: int = 0,
) -> Tensor:
    """Return the column [B] of each row's largest number, the first of equals.

    With slots and a table of int64, a row's column also goes to its slot's place there. A negative
    `not_finite` is returned (the table gets the column all the same) for a row whose largest number
    is NaN or infinite.
    """
    rows, columns = x_BV.shape
    x_BV = x_BV.contiguous()
    parts, pdl = triton.cdiv(columns, BLOCK), overlaps(x_BV.device)
    best = x_BV.new_empty(rows * parts, dtype=torch.int32)
    place = x_BV.new_empty(rows * parts, dtype=torch.int32)
    out = x_BV.new_empty(rows, dtype=torch.long)
    parts_kernel[(rows, parts)](
        x_BV, best, place, columns, parts, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    merge_kernel[(rows,)](
        best,
        place,
        out,
        out if slots_B is None else slots_B,
        out if table_S is None else table_S,
        parts,
        NOT_FINITE=not_finite,
        PARTS=triton.next_power_of_2(parts),
        REMEMBER=table_S is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return out
