"""The causal convolution in front of a recurrence, over a step's rows, as one launch.

    y[t, c] = silu(sum_k w[c, k] x[t - K + 1 + k, c] + b[c])      a channel by itself
    gated (LFM2): x = before * x, y = behind * (sum + b)          the three lie side by side

    rows [7, R]      kernels/kv/paged/paged_rows.py: a program finds its tokens there
    tails [S, K-1, C]  the last inputs of each request, oldest first: read in front of a row's first
                     token, zeros where that is at position 0, and written behind its last
    notes            tokens that come between the two, and how many the tail moves on by (notes.py)

Bytes: x read once (K times from the cache), y written once. A program takes BLOCK channels of a
row, STEP tokens at a time. Of steps with long rows PARTS programs share a row, and the tails are
written by a launch of their own, when everyone has read them.

T places, R rows, S slots, C channels, K taps.
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
from llmpq.kernels.recurrent.notes import Notes, noted_row

BLOCK = 128
SINGLE_BLOCK = 256
"""... of rows of one token: 8 channels a thread, in 16-byte accesses."""
STEP = 16
"""Tokens at a time of rows that may have several."""
PART_TOKENS = 256
"""Tokens of a step for which a row may have another program."""
MOST_PARTS = 32


@triton.jit
def input_of(
    x, tails, notes, slot, first, before, j, c, mask, going, x_stride, channels, inputs,
    TAPS: tl.constexpr, GATED: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    """Inputs number `j` of a row: those below zero are noted, or in front of that in its tail."""
    at = x + (first + j).to(tl.int64) * x_stride + c
    new = tl.load(at, mask=mask & (j >= 0), other=0.0).to(tl.float32)
    if GATED:
        other = tl.load(at + 2 * channels, mask=mask & (j >= 0), other=0.0).to(tl.float32)
        new = (new * other).to(x.dtype.element_ty).to(tl.float32)
    kept = tails + (slot.to(tl.int64) * (TAPS - 1) + TAPS - 1 + before + j) * channels + c
    old = tl.load(kept, mask=mask & (before + j < 0) & going, other=0.0).to(tl.float32)
    if NOTES > 0:
        at = notes + (slot.to(tl.int64) * NOTES + before + j) * inputs + c
        noted = tl.load(at, mask=mask & (j < 0) & (before + j >= 0), other=0.0).to(tl.float32)
        old = tl.where(before + j >= 0, noted, old)
    return tl.where(j >= 0, new, old)


@triton.jit
def write_tail(
    x, tails, notes, slot, settled, first, before, c, mask, going, x_stride, channels, inputs,
    TAPS: tl.constexpr, GATED: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    """Keep a row's last settled inputs, each in front of those still to be read."""
    for k in tl.static_range(TAPS - 1):
        j = settled - before - (TAPS - 1) + k
        kept = input_of(
            x, tails, notes, slot, first, before, j, c, mask, going, x_stride, channels, inputs,
            TAPS, GATED, NOTES,
        )  # fmt: skip
        at = tails + (slot.to(tl.int64) * (TAPS - 1) + k) * channels + c
        tl.store(at, kept.to(tails.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def convolve_kernel(
    x, weight, bias, tails, rows, moves, out, notes, noted_rows, mixed, num_rows, x_stride,
    channels, inputs, weight_stride, tap_stride, TAPS: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
    NOTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of channels of one row, or of every PARTS-th group of its tokens."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < channels
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows + row)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    first = tl.load(rows + 3 * num_rows + row)
    before, settled, _, _ = noted_row(noted_rows, row, num_rows, count, NOTES)
    known, going = slot >= 0, (slot >= 0) & (start > 0)
    begins = 0 if GATED else -before  # behind a gated convolution no recurrence reads again
    for begin in range(begins + tl.program_id(2) * STEP, count, PARTS * STEP):
        i = begin + tl.arange(0, STEP)
        mask = (i < count)[:, None] & live[None, :]
        total = tl.zeros((STEP, BLOCK), tl.float32)
        for k in tl.static_range(TAPS):
            own = weight + c * weight_stride + k * tap_stride
            w = tl.load(own, mask=live, other=0.0).to(tl.float32)
            j = (i - (TAPS - 1) + k)[:, None]
            total += w[None, :] * input_of(
                x, tails, notes, slot, first, before, j, c[None, :], mask, going, x_stride,
                channels, inputs, TAPS, GATED, NOTES,
            )  # fmt: skip
        if BIAS:
            total += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)[None, :]
        place = (first + i).to(tl.int64)[:, None]
        if GATED:
            behind = x + place * x_stride + channels + c[None, :]
            total *= tl.load(behind, mask=mask, other=0.0).to(tl.float32)
        else:
            total *= tl.sigmoid(total)
        total = tl.where(known, total, 0.0).to(out.dtype.element_ty)
        if NOTES > 0 and not GATED:
            again = mixed + (slot.to(tl.int64) * NOTES + before + i)[:, None] * inputs + c[None, :]
            tl.store(again, total, mask=mask & (i < 0)[:, None])
            mask = mask & (i >= 0)[:, None]
        tl.store(out + place * channels + c[None, :], total, mask=mask)
    if PARTS == 1:
        tl.debug_barrier()  # a tail that others of this program still read
        moving = live & known & (count > 0) & (tl.load(moves) != 0)
        write_tail(
            x, tails, notes, slot, settled, first, before, c, moving, going, x_stride, channels,
            inputs, TAPS, GATED, NOTES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def tail_kernel(
    x, tails, rows, moves, notes, noted_rows, num_rows, x_stride, channels, inputs,
    TAPS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, NOTES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The tail of a block of channels of one row."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows + row)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    first = tl.load(rows + 3 * num_rows + row)
    before, settled, _, _ = noted_row(noted_rows, row, num_rows, count, NOTES)
    moving = (c < channels) & (slot >= 0) & (count > 0) & (tl.load(moves) != 0)
    write_tail(
        x, tails, notes, slot, settled, first, before, c, moving, start > 0, x_stride, channels,
        inputs, TAPS, GATED, NOTES,
    )  # fmt: skip


def convolve_rows(
    x_TE: Tensor,
    weight_C1K: Tensor,
    bias_C: Tensor | None,
    tails_SKC: Tensor,
    rows_FR: Tensor,
    moves_1: Tensor,
    *,
    chunks: bool,
    gated: bool = False,
    notes: Notes | None = None,
) -> Tensor:
    """Return y [T, C] and move the rows' tails on, unless `moves_1` is 0.

    `x_TE`: rows of [C], or of before, behind and x [3 C] side by side (`gated`), that may lie
    further apart. `chunks`: rows may have several tokens. Weights are read best where a tap's lie
    side by side in memory. `notes`: of tokens that may be taken back; what is made of those of
    earlier steps goes to its `mixed_SME`, but behind a gate.
    """
    channels, _, taps = weight_C1K.shape
    tokens, num_rows = x_TE.shape[0], rows_FR.shape[1]
    if x_TE.stride(1) != 1:
        raise ValueError(f"a token's inputs must lie side by side, got strides {x_TE.stride()}")
    out = torch.empty((tokens, channels), dtype=x_TE.dtype, device=x_TE.device)
    parts = min(MOST_PARTS, triton.cdiv(tokens, PART_TOKENS)) if chunks else 1
    block, pdl = BLOCK if chunks else SINGLE_BLOCK, overlaps(x_TE.device)
    blocks = triton.cdiv(channels, block)
    noted = (x_TE, rows_FR) if notes is None else (notes.noted_SME, notes.rows_FR)
    most, inputs = (0, 0) if notes is None else notes.noted_SME.shape[1:]
    common = {"TAPS": taps, "GATED": gated, "BLOCK": block, "NOTES": most, "PDL": pdl}
    common["launch_pdl"] = pdl
    convolve_kernel[(num_rows, blocks, parts)](
        x_TE,
        weight_C1K,
        weight_C1K if bias_C is None else bias_C,
        tails_SKC,
        rows_FR,
        moves_1,
        out,
        *noted,
        x_TE if notes is None else notes.mixed_SME,
        num_rows,
        x_TE.stride(0),
        channels,
        inputs,
        weight_C1K.stride(0),
        weight_C1K.stride(2),
        BIAS=bias_C is not None,
        STEP=STEP if chunks else 1,
        PARTS=parts,
        num_warps=4 if chunks else 1,
        **common,
    )
    if parts > 1:
        tail_kernel[(num_rows, blocks)](
            x_TE,
            tails_SKC,
            rows_FR,
            moves_1,
            *noted,
            num_rows,
            x_TE.stride(0),
            channels,
            inputs,
            num_warps=1,
            **common,
        )
    return out
