"""Many pairs sorted by expert, and the blocks of rows that they make, in two launches.

    count_kernel    a program counts BLOCK pairs by expert                      counts [B, EP]
    place_kernel    a program places its BLOCK pairs; program e writes expert e's run and blocks

    gather_kernel   the rows of all pairs, sorted so, for products that read x by TMA

A block is (expert, its first row, its end row, its first block): all of an expert's blocks say the
same but stand one after the other, so block b of all is block b - first block of its expert. In
`apart` the short blocks stand behind all others, each by itself: programs that take turns end
together, but read the weights of experts that have one twice; in `broad`, too, of twice as many
rows. `count` [4]: how many blocks, two zeros, which programs that do not take turns count by, and
how many broad ones.
`expert_kernel.assign_kernel` sorts few pairs in one launch, which of many pairs takes longer.

C pairs, E experts, EP the power of two from E on; WIDE rows of a block at most.
"""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 256
"""Pairs of a program."""
WIDE, SHORT = 128, 64
"""Rows of a block, and those up to which a block takes half as long."""
MOST_EXPERTS = 256
"""A program compares BLOCK pairs with every expert, in registers."""


@triton.jit
def _count(expert_C, begin, C, EP: tl.constexpr, BLOCK: tl.constexpr):
    """How many of BLOCK pairs go to each expert; what is no pair goes to none."""
    PART: tl.constexpr = 64
    e = tl.arange(0, EP)
    found = tl.zeros([EP], tl.int32)
    for j in tl.static_range(BLOCK // PART):
        c = begin + j * PART + tl.arange(0, PART)
        expert = tl.load(expert_C + c, mask=c < C, other=EP).to(tl.int32)
        found += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    return found


@triton.jit
def count_kernel(expert_C, counts, C, EP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Count one program's pairs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    found = _count(expert_C, b * BLOCK, C, EP, BLOCK)
    tl.store(counts + b * EP + tl.arange(0, EP), found)


@triton.jit
def _write(blocks, e, first, end, before, own):
    """Write `own` blocks from `before` on, which are rows first .. end - 1 of expert e."""
    for i0 in range(0, own, 64):
        i = i0 + tl.arange(0, 64)
        to = blocks + (before + i) * 4
        tl.store(to, e + i * 0, mask=i < own)
        tl.store(to + 1, first + i * 0, mask=i < own)
        tl.store(to + 2, end + i * 0, mask=i < own)
        tl.store(to + 3, before + i * 0, mask=i < own)


@triton.jit
def _write_apart(blocks, count, b, e, total, start, rows, WIDE: tl.constexpr, SHORT: tl.constexpr):
    """Write expert b's blocks, its short one behind all others; how many all are."""
    short = ((total % WIDE > 0) & (total % WIDE <= SHORT)).to(tl.int32)
    full = (total + WIDE - 1) // WIDE - short
    own = tl.sum(tl.where(e == b, full, 0), 0)
    middle = start + tl.minimum(own * WIDE, rows)
    _write(blocks, b, start, middle, tl.sum(tl.where(e < b, full, 0), 0), own)
    last = tl.sum(full, 0) + tl.sum(tl.where(e < b, short, 0), 0)
    _write(blocks, b, middle, start + rows, last, tl.sum(tl.where(e == b, short, 0), 0))
    if b == 0:
        tl.store(count, tl.sum(full + short, 0))


@triton.jit
def place_kernel(
    expert_C,
    counts,
    order,
    runs,
    blocks,
    apart,
    broad,
    count,
    C,
    E,
    B,
    EP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    SHORT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Place BLOCK pairs behind those of smaller experts and of programs before; write blocks."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    e = tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    ahead = tl.zeros([EP], tl.int32)
    for b0 in range(0, B, 32):
        other = b0 + tl.arange(0, 32)
        found = tl.load(counts + other[:, None] * EP + e[None, :], mask=(other < B)[:, None])
        found = tl.where((other < B)[:, None], found, 0)
        total += tl.sum(found, 0)
        ahead += tl.sum(tl.where(other[:, None] < b, found, 0), 0)
    first = tl.cumsum(total, 0) - total
    if b < B:
        c = b * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(expert_C + c, mask=c < C, other=EP).to(tl.int32)
        place = tl.sum(tl.where(expert[:, None] == e[None, :], (first + ahead)[None, :], 0), 1)
        PART: tl.constexpr = 64
        for j in tl.static_range(BLOCK // PART):
            cj = b * BLOCK + j * PART + tl.arange(0, PART)
            ej = tl.load(expert_C + cj, mask=cj < C, other=EP).to(tl.int32)
            same = (expert[:, None] == ej[None, :]) & (cj[None, :] < c[:, None])
            place += tl.sum(same.to(tl.int32), 1)
        tl.store(order + place, c, mask=c < C)
    if b < E:
        rows = tl.sum(tl.where(e == b, total, 0), 0)
        start = tl.sum(tl.where(e == b, first, 0), 0)
        tl.store(runs + b * 3, b)
        tl.store(runs + b * 3 + 1, start)
        tl.store(runs + b * 3 + 2, start + rows)
        each = (total + WIDE - 1) // WIDE
        before = tl.sum(tl.where(e < b, each, 0), 0)
        own = (rows + WIDE - 1) // WIDE
        _write(blocks, b, start, start + rows, before, own)
        _write_apart(apart, count, b, e, total, start, rows, WIDE, SHORT)
        _write_apart(broad, count + 3, b, e, total, start, rows, 2 * WIDE, WIDE)
        if b == 0:
            tl.store(count + 1, 0)
            tl.store(count + 2, 0)


@triton.jit
def gather_kernel(
    x_ptr, order, sorted_x, C, top, K, BR: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr
):
    """sorted_x [C, K]: every pair's token's row; grid (C / BR)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    source = tl.load(order + row, mask=row < C, other=0) // top
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        live = (row < C)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + source.to(tl.int64)[:, None] * K + k[None, :], mask=live)
        tl.store(sorted_x + row.to(tl.int64)[:, None] * K + k[None, :], x, mask=live)
