"""Prompt lookup on the device: what followed the latest earlier copy of a request's newest tokens.

    history [S, T]   tokens of each slot by position; the newest, at `start`, comes as an argument
                     and is written there
    out [B, Q]       the newest token, then Q - 1 drafts

A program: one request. It compares all places of the last LOOK_BACK tokens with the newest LONGEST
at once: a copy of LONGEST tokens beats one of SHORTEST, a later one beats an earlier. Drafts that
nothing was found for repeat the newest token. Bytes: 4 * LONGEST * LOOK_BACK read a request, from
cache but for the first 4 * LOOK_BACK. Its twin is runtime/drafts/ngram.py.

S slots, T slot length, B requests, Q drafts and one.
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


@triton.jit
def look_up_kernel(
    history, slots, starts, tokens, out, slot_stride,
    Q: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, LOOK_BACK: tl.constexpr,
    PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One request."""
    LONG: tl.constexpr = 1 << 30
    b = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts + b).to(tl.int32)
    newest = tl.load(tokens + b).to(tl.int32)
    of_slot = history + tl.load(slots + b).to(tl.int64) * slot_stride

    # ---- places of the newest token before it, and how many tokens up to each are equal
    first = tl.maximum(start + 1 - LOOK_BACK, 0)
    place = first + tl.arange(0, PADDED)
    agrees = (place < start) & (tl.load(of_slot + place, mask=place < start, other=0) == newest)
    length = agrees.to(tl.int32)
    for back in tl.static_range(1, LONGEST):
        there = agrees & (place - back >= first)
        token = tl.load(of_slot + start - back, mask=start >= back, other=0)
        agrees = there & (tl.load(of_slot + place - back, mask=there, other=0) == token)
        length += agrees.to(tl.int32)
    rank = tl.where(length >= SHORTEST, place, -1) + tl.where(length >= LONGEST, LONG, 0)
    best = tl.max(rank, 0)
    copy = tl.where(best >= LONG, best - LONG, best)

    # ---- what followed; the copy may reach to the newest token, which is not in the history yet
    for i in tl.static_range(Q):
        source = tl.where(copy >= 0, copy + i, start)
        draft = tl.load(of_slot + source, mask=(i > 0) & (source < start), other=newest)
        tl.store(out + b * Q + i, draft.to(tl.int64))
    tl.store(of_slot + start, newest)


def look_up(
    history_ST: Tensor,
    slots_B: Tensor,
    start_B: Tensor,
    newest_B: Tensor,
    gamma: int,
    *,
    longest: int,
    shortest: int,
    look_back: int,
) -> Tensor:
    """Return the newest tokens and `gamma` drafts behind each [B, 1 + gamma], int64."""
    pdl = overlaps(history_ST.device)
    out = torch.empty(len(slots_B), 1 + gamma, dtype=torch.long, device=history_ST.device)
    look_up_kernel[(len(slots_B),)](
        history_ST,
        slots_B,
        start_B,
        newest_B,
        out,
        history_ST.stride(0),
        Q=1 + gamma,
        LONGEST=longest,
        SHORTEST=shortest,
        LOOK_BACK=look_back,
        PADDED=triton.next_power_of_2(look_back),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
