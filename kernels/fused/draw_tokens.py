"""Tokens drawn from logits [B, V] with temperature, top-k and top-p, without a wait of the host.

A program a row, in one launch; nothing is sorted, no distribution is written. Numbers become keys,
unsigned integers in the same order, as wide as the logits' precision needs.

    top     the largest number; weights are exp((x - top) / temperature)
    top-k   the k-th largest key, two bits a pass: how many keys reach each of three candidates?
    top-p   the key at and above which the kept ones have the share p, likewise by weight
    draw    the first column whose weights, summed up to it, exceed the row's number

Of equals at the threshold the first columns are kept, as many as k or p ask for.

torch's operators for this need a full copy of the distribution a step, its largest values in
order, and the host to ask whether those were enough. V columns.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Columns at a time."""

KEY_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""Upper bits of float32 that tell a type's values apart: sign, exponent and its fraction's. An
even number of them."""

FIELDS = 4
"""What a row has of its request: temperature, k, p and a number in [0, 1)."""


@triton.jit
def _key(x, BITS: tl.constexpr):
    """float32 as an unsigned integer of BITS bits in the same order; zeros are equal."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >> 31 == 0, bits | 0x80000000, ~bits)
    return ordered >> (32 - BITS)


@triton.jit
def _block(x, start, columns, top, rate, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Columns, their keys, weights and which of them there are."""
    column = start + tl.arange(0, BLOCK)
    there = column < columns
    values = tl.load(x + column, mask=there, other=float("-inf")).to(tl.float32)
    weight = tl.where(there, tl.exp2((values - top) * rate), 0.0)
    return column, _key(values, BITS), weight, there


@triton.jit
def _threshold(
    x, columns, top, rate, need, COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key at and above which there are `need` columns, or weights of so much."""
    found = tl.zeros([], dtype=tl.uint32)
    for step in range(BITS // 2):
        shift = BITS - 2 - 2 * step
        unit = tl.full([], 1, tl.uint32) << shift
        one = tl.zeros([BLOCK], dtype=tl.float32)
        two = tl.zeros([BLOCK], dtype=tl.float32)
        three = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, columns, BLOCK):
            _, key, weight, there = _block(x, start, columns, top, rate, BITS, BLOCK)
            amount = there.to(tl.float32) if COUNT else weight
            one += tl.where(key >= found + unit, amount, 0.0)
            two += tl.where(key >= found + 2 * unit, amount, 0.0)
            three += tl.where(key >= found + 3 * unit, amount, 0.0)
        digit = (tl.sum(one) >= need).to(tl.uint32)
        digit += (tl.sum(two) >= need).to(tl.uint32)
        digit += (tl.sum(three) >= need).to(tl.uint32)
        found += digit * unit
    return found


@triton.jit
def _around(x, columns, top, rate, threshold, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """How many columns lie above a key, what they weigh, and what a column at the key weighs."""
    count = tl.zeros([BLOCK], dtype=tl.float32)
    above = tl.zeros([BLOCK], dtype=tl.float32)
    same = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        _, key, weight, there = _block(x, start, columns, top, rate, BITS, BLOCK)
        over = there & (key > threshold)
        count += over.to(tl.float32)
        above += tl.where(over, weight, 0.0)
        same = tl.where(there & (key == threshold), weight, same)
    return tl.sum(count), tl.sum(above), tl.max(same)


@triton.jit
def sample_kernel(x, how, out, rows, columns, row_stride, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(how + row)
    k = tl.load(how + rows + row)
    # A share of nothing, which float32 may make of it, would keep no column.
    p = tl.maximum(tl.load(how + 2 * rows + row).to(tl.float32), 1e-30)
    number = tl.load(how + 3 * rows + row)
    # Whatever float32 makes of it, the largest number's weight is 1, that of minus infinity 0.
    temperature = tl.minimum(tl.maximum(temperature, 1e-37), 1e37)
    rate = (1.4426950408889634 / temperature).to(tl.float32)
    x += row * row_stride

    most = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(x + column, mask=column < columns, other=float("-inf"))
        most = tl.maximum(most, values.to(tl.float32))
    top = tl.max(most)

    threshold = tl.zeros([], dtype=tl.uint32)
    if k < columns:
        need = k.to(tl.float32)
        threshold = _threshold(x, columns, top, rate, need, True, BITS, BLOCK)
    count, above, same = _around(x, columns, top, rate, threshold, BITS, BLOCK)
    equals = k - count.to(tl.float64)  # how many of those at the threshold are kept
    if p < 1.0:
        first, of_them = threshold, equals
        # Without top-k nothing lies at the lowest key that could weigh anything.
        need = p * (above + tl.where(k < columns, equals.to(tl.float32) * same, 0.0))
        threshold = _threshold(x, columns, top, rate, need, False, BITS, BLOCK)
        # Where sums round below a share of nearly 1, no key reaches it: top-k holds all the same.
        threshold = tl.maximum(threshold, first)
        count, above, same = _around(x, columns, top, rate, threshold, BITS, BLOCK)
        equals = tl.maximum(tl.ceil((need - above) / same), 1.0).to(tl.float64)
        equals = tl.where(threshold == first, tl.minimum(equals, of_them), equals)

    whole = above.to(tl.float64)
    if threshold > 0:
        whole += equals * same
    target = number * whole
    before = tl.zeros([], dtype=tl.float64)
    passed = tl.zeros([], dtype=tl.int32)
    found, last = columns, 0
    top_key = _key(top, BITS)
    for start in range(0, columns, BLOCK):
        column, key, weight, there = _block(x, start, columns, top, rate, BITS, BLOCK)
        tie = there & (key == threshold)
        place = passed + tl.cumsum(tie.to(tl.int32)) - 1
        kept = (there & (key > threshold)) | (tie & (place < equals))
        # An infinite number less itself is none; the largest weighs 1 whatever it is.
        weight = tl.where(key == top_key, 1.0, weight)
        weight = tl.where(kept, weight, 0.0)
        up_to = before + tl.cumsum(weight).to(tl.float64)
        # Partial sums round apart: one may exceed the number at a column that weighs nothing.
        hit = (weight > 0) & (up_to > target)
        found = tl.minimum(found, tl.min(tl.where(hit, column, columns)))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, column, 0)))
        before += tl.sum(weight).to(tl.float64)
        passed += tl.sum(tie.to(tl.int32))
    # Rounding may leave the number at the very end: the last token with a probability is meant.
    tl.store(out + row, tl.minimum(found, last).to(tl.int64))


def sample_rows(logits_BV: Tensor, how_4B: Tensor, *, block: int = BLOCK) -> Tensor:
    """Return a token [B] of each row.

    `how_4B`, float64 on the device: temperatures, k (V for all), p (1 for all), values in [0, 1).
    """
    rows, columns = logits_BV.shape
    if how_4B.shape != (FIELDS, rows) or how_4B.dtype != torch.float64:
        raise ValueError(
            f"rows have {FIELDS} values each, float64 [{FIELDS}, {rows}]; "
            f"got {how_4B.dtype} {list(how_4B.shape)}"
        )
    if logits_BV.dtype not in KEY_BITS:
        known = ", ".join(str(dtype) for dtype in KEY_BITS)
        raise ValueError(f"logits are {logits_BV.dtype}, expected one of {known}; convert them")
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    out = torch.empty(rows, dtype=torch.long, device=logits_BV.device)
    sample_kernel[(rows,)](
        logits_BV,
        how_4B.contiguous(),
        out,
        rows,
        columns,
        logits_BV.stride(0),
        BITS=KEY_BITS[logits_BV.dtype],
        BLOCK=block,
        num_warps=16,
    )
    return out
