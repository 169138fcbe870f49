"""Parts of one row's attention, of several programs, merged.

The tiles of all rows stand in one line (paged_attend.py), of which every program takes as much. Row
r's part of program p is number r + p: rows and programs only go on together, so no two are alike.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def merge_parts(
    part_ptr, lse_ptr, out_ptr, first, last, row, group, place, channel,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, X: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Merge what programs first..last have of a row, of a key/value head's query heads.

    Of its channels those from `channel` on.
    """
    C: tl.constexpr = H // G
    h = tl.arange(0, HEADS)
    x = tl.arange(0, X)
    d = channel + tl.arange(0, CHANNELS)
    top = tl.full([HEADS], -1.0e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, CHANNELS], tl.float32)
    for program in range(first, last + 1, X):
        live = (program + x <= last)[:, None] & (h < C)[None, :]
        part = ((row + program + x).to(tl.int64) * G + group)[:, None] * R + h[None, :]
        lse = tl.load(lse_ptr + part, mask=live, other=-1.0e30, cache_modifier=".cg")
        at = part_ptr + part[:, :, None] * PADDED + d[None, None, :]
        out = tl.load(at, mask=live[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(lse, 0))
        kept = tl.exp2(top - higher)
        weight = tl.where(live, tl.exp2(lse - higher[None, :]), 0.0)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept[:, None] + tl.sum(out * weight[:, :, None], 0)
        top = higher
    out = acc / tl.maximum(total, 1e-30)[:, None]
    at = (place * H + group * C + h)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(h < C)[:, None] & (d < D)[None])


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    part_ptr, lse_ptr, rows, work_split, out_ptr, num_rows,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr,
    PROGRAMS: tl.constexpr, HEADS: tl.constexpr, MERGED: tl.constexpr,
    WINDOWED: tl.constexpr, PDL: tl.constexpr, WORK_SPLIT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, of channels of one key/value head, if several programs had some.

    A program takes few channels, so that it has many parts at once: one row's parts are those of
    all programs, and each round of them takes what memory takes to answer.
    """
    row = tl.program_id(0)
    group = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    sums = rows + (6 if WINDOWED else 5) * num_rows
    share = tl.load(work_split + (PROGRAMS * WORK_SPLIT if WINDOWED else 0) + 3)
    begin = tl.load(sums + row - 1, mask=row > 0, other=0)
    end = tl.load(sums + row)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    if PDL:
        gdc_wait()
    first = begin // share
    last = tl.where(begin < end, (end - 1) // share, first)
    if first < last:
        merge_parts(
            part_ptr, lse_ptr, out_ptr, first, last, row, group, place,
            tl.program_id(2) * CHANNELS, H, G, D, PADDED, R, HEADS, MERGED, CHANNELS,
        )  # fmt: skip
