"""Tokens that may be taken back: their inputs are noted, and the next step reads them again.

    noted rows [4, R] int32   before, settled, certain, place: `before` noted tokens of the request
                              come in front of the row's own; its state moves on by the first
                              `settled` of all of them; the row's own from `certain` on are noted,
                              behind `place` others
    notes [S, M, E]           of M tokens what is convolved [C], then the recurrence's steps
    mixed [S, M, E]           what the convolution makes of the noted ones, for the recurrence

A convolution (convolve.py) and a recurrence (state_walk.py) read the notes of a row; those of the
step are written by a launch of their own, behind both. Bytes: what is noted, read and written once.

T places, R rows, S slots, M noted tokens, C channels, E inputs of a token.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What a layer's kernels know of tokens that may be taken back."""

    noted_SME: Tensor
    mixed_SME: Tensor
    """Overwritten by every layer; where nothing is convolved, `noted_SME` itself."""
    rows_FR: Tensor
    """[4, R], the rows in the order of the step's table."""


@triton.jit
def noted_row(noted_rows, row, num_rows, count, NOTES: tl.constexpr):
    """`before`, `settled`, `certain` and `place` of a row; without notes all is certain."""
    before, settled, certain, place = 0, count, count, 0
    if NOTES > 0:
        before = tl.load(noted_rows + row)
        settled = tl.load(noted_rows + num_rows + row)
        certain = tl.load(noted_rows + 2 * num_rows + row)
        place = tl.load(noted_rows + 3 * num_rows + row)
    return before, settled, certain, place


@triton.jit(do_not_specialize=["num_rows"])
def note_kernel(
    x, steps, notes, rows, noted_rows, moves, num_rows, x_stride, steps_stride, channels, inputs,
    NOTES: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of the inputs of one row's tokens that may be taken back."""
    row = tl.program_id(0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    first = tl.load(rows + 3 * num_rows + row)
    _, _, certain, place = noted_row(noted_rows, row, num_rows, count, NOTES)
    count = tl.where((slot >= 0) & (tl.load(moves) != 0), count, 0)
    mixed, step = e < channels, (e >= channels) & (e < inputs)
    for i in range(certain, count):
        token = (first + i).to(tl.int64)
        own = tl.load(x + token * x_stride + e, mask=mixed, other=0.0)
        if GATED:
            other = tl.load(x + token * x_stride + 2 * channels + e, mask=mixed, other=0.0)
            own = (own.to(tl.float32) * other.to(tl.float32)).to(own.dtype)
        value = tl.load(steps + token * steps_stride + e - channels, mask=step, other=0.0)
        to = notes + (slot.to(tl.int64) * NOTES + place + i - certain) * inputs + e
        value = tl.where(mixed, own.to(notes.dtype.element_ty), value.to(notes.dtype.element_ty))
        tl.store(to, value, mask=e < inputs)


def note_rows(
    x_TE: Tensor,
    steps_TJ: Tensor,
    notes: Notes,
    rows_FR: Tensor,
    moves_1: Tensor,
    *,
    channels: int,
    gated: bool = False,
) -> None:
    """Note the inputs of each row's tokens that may be taken back, unless `moves_1` is 0.

    `x_TE`, `gated`: as `convolve_rows` has them. `steps_TJ`: what a recurrence reads beside it; as
    many of its columns as notes have behind the channels.
    """
    _, most, inputs = notes.noted_SME.shape
    num_rows, pdl = rows_FR.shape[1], overlaps(x_TE.device)
    note_kernel[(num_rows, triton.cdiv(inputs, BLOCK))](
        x_TE,
        steps_TJ,
        notes.noted_SME,
        rows_FR,
        notes.rows_FR,
        moves_1,
        num_rows,
        x_TE.stride(0),
        steps_TJ.stride(0),
        channels,
        inputs,
        NOTES=most,
        GATED=gated,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def noted_table(rows: Sequence[tuple[int, int, int, int]], num_rows: int) -> list[list[int]]:
    """Return the table of rows (before, settled, certain, place), padded to so many rows."""
    padding = [0] * (num_rows - len(rows))
    columns = zip(*rows, strict=True) if rows else ((),) * FIELDS
    return [[*column, *padding] for column in columns]


FIELDS = 4
"""Rows of the noted rows' table."""
