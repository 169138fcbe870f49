"""The recurrence of long rows, 64 tokens at a time, in two launches (Yang et al., 2024).

    pairs    every block of 64 places by itself: c, the running sums of log decays; of tokens t >= s
             of one row  D . q k^T, and by the delta rule the inverse of 1 + (b D . k k^T, t > s)
    scan     a row's blocks in turn:    u = inverse (b (v - e^c k S)),  Mamba-2 u = dt v,
                                        lightning u = v
                                        o = e^c q S + (D . q k^T) u
                                        S = e^(c_last) S + sum_t e^(c_last - c_t) k_t u_t^T
             with D = e^(c_t - c_s)

    pairs, inverse [T, H, 64]   of place t the row t of its block's matrix

Blocks begin at places of the step that 64 divides, wherever rows begin: a matrix is zero between
tokens of unlike rows, and a row that begins within a block takes off the sum in front of it. Of the
inverse the 16 x 16 matrices on the diagonal are solved row by row, all at once (their powers would
cancel where keys are alike); with X those and M = -X times what is beside them, M^4 = 0 and the
whole is (1 + M) (1 + M^2) X. A program of `scan` takes BLOCK_P columns of a head's state. The
arithmetic is float32; products of 16-bit models round their factors to TF32, the inverse's to three
of those.

T places, R rows, S slots, H heads, N key_dim, P value_dim.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps
from llmpq.kernels.recurrent.state_walk import Recurrence, softplus
from llmpq.sizes.state_size import PAIRED_TOKENS

BLOCK_T = PAIRED_TOKENS
BLOCK_P = 32
NUM_WARPS = 4
SOLVED = 16
"""Rows of a block's inverse that are solved one after the other; the rest is products."""
NUM_STAGES = 1
"""A second block's keys do not fit beside the first's on most cards."""
FROM_TOKENS = 17
"""Tokens of a row from which it is scanned; shorter ones are walked."""


OLDEST = (8, 0)


def scans(device: torch.device) -> bool:
    """Return whether long rows are scanned on a device, else walked.

    Before sm_80 Triton drives no tensor core, and a block's operands take more shared memory than
    those cards have.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST


@triton.jit
def unit(x):
    """Rows of length one."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def pairs_kernel(
    mixed, steps, decay, bias, slots, sums, pairs, inverse, places, mixed_stride, steps_stride,
    scale, beta_factor, HEADS: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, PADDED_N: tl.constexpr, BLOCK_T: tl.constexpr, SOLVED: tl.constexpr,
    DELTA: tl.constexpr, FIXED: tl.constexpr, PRECISION: tl.constexpr, MERGED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One block of places, one head."""
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK_T)
    t = tl.program_id(0) * BLOCK_T + i
    n = tl.arange(0, PADDED_N)
    rate = -tl.exp(tl.load(decay + head).to(tl.float32))
    if not FIXED:
        shift = tl.load(bias + head).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    live = t < places
    place = t.to(tl.int64)
    slot = tl.load(slots + t, mask=live, other=-1)
    KEYS: tl.constexpr = HEADS // SHARED * N
    if DELTA or FIXED:
        q_at, k_at, step_at = 0, KEYS, HEADS + head
    else:
        q_at, k_at, step_at = HEADS * P + KEYS, HEADS * P, head
    at = mixed + place[:, None] * mixed_stride + (head // SHARED * N + n)[None, :]
    has = live[:, None] & (n < N)[None, :]
    q = tl.load(at + q_at, mask=has, other=0.0).to(tl.float32)
    k = tl.load(at + k_at, mask=has, other=0.0).to(tl.float32)
    if FIXED:
        c = tl.cumsum(tl.where(live, rate, 0.0), 0)
    else:
        step = tl.load(steps + place * steps_stride + step_at, mask=live, other=0.0).to(tl.float32)
        c = tl.cumsum(tl.where(live, rate * softplus(step + shift), 0.0), 0)
    tl.store(sums + place * HEADS + head, c, mask=live)
    own = slot[:, None] == slot[None, :]
    known = own & (i[:, None] >= i[None, :])
    apart = tl.exp(tl.where(known, c[:, None] - c[None, :], float("-inf")))
    if DELTA:
        q = unit(q) * scale
        k = unit(k)
    to = (place * HEADS + head)[:, None] * BLOCK_T + i[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * apart
    tl.store(pairs + to, scores.to(pairs.dtype.element_ty), mask=live[:, None])
    if DELTA:
        b = tl.load(steps + place * steps_stride + head, mask=live, other=0.0).to(tl.float32)
        alike = tl.dot(k, tl.trans(k), input_precision=PRECISION) * apart
        share = tl.sigmoid(b) * beta_factor
        given = tl.where(i[:, None] > i[None, :], -alike * share[:, None], 0.0)
        together = (i // SOLVED)[:, None] == (i // SOLVED)[None, :]
        inner = tl.where(together, given, 0.0)
        for row in range(1, SOLVED):
            here = (i % SOLVED == row)[:, None]
            mine = tl.sum(tl.where(here, inner, 0.0), 0)
            mine += tl.sum(mine[:, None] * inner, 0)
            inner = tl.where(here & together, mine[None, :], inner)
        inner += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        m = tl.dot(inner, tl.where(together, 0.0, given), input_precision=MERGED)
        solved = inner + tl.dot(tl.dot(m, m, input_precision=MERGED), inner, input_precision=MERGED)
        solved += tl.dot(m, solved, input_precision=MERGED)
        tl.store(inverse + to, solved.to(inverse.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["num_rows", "shortest"])
def scan_kernel(
    mixed, steps, bias, skip, sums, pairs, inverse, states, rows, moves, out, num_rows, shortest,
    mixed_stride, steps_stride, scale, beta_factor, HEADS: tl.constexpr, SHARED: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, PADDED_N: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr, DELTA: tl.constexpr, FIXED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block of columns of a head of one row of at least `shortest` tokens."""
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK_T)
    n = tl.arange(0, PADDED_N)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    has_n, has_p = n < N, p < P
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows + row)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    first = tl.load(rows + 3 * num_rows + row)
    mine = (slot >= 0) & (count >= shortest)
    own = states + (slot.to(tl.int64) * HEADS + head) * N * P + n[:, None] * P + p[None, :]
    held = has_n[:, None] & has_p[None, :] & mine
    s = tl.load(own, mask=held & (start > 0), other=0.0)
    KEYS: tl.constexpr = HEADS // SHARED * N
    if DELTA or FIXED:
        q_at, k_at, v_at = 0, KEYS, 2 * KEYS
    else:
        q_at, k_at, v_at = HEADS * P + KEYS, HEADS * P, 0
        shift = tl.load(bias + head).to(tl.float32)
        through = tl.load(skip + head).to(tl.float32)
    end = tl.where(mine, first + count, first)
    for begin in range(first // BLOCK_T * BLOCK_T, end, BLOCK_T):
        t = begin + i
        live = (t >= first) & (t < end)
        place = t.to(tl.int64)
        known = live[:, None] & has_n[None, :]
        at = mixed + place[:, None] * mixed_stride
        keys = (head // SHARED * N + n)[None, :]
        q = tl.load(at + q_at + keys, mask=known, other=0.0).to(tl.float32)
        k = tl.load(at + k_at + keys, mask=known, other=0.0).to(tl.float32)
        values = live[:, None] & has_p[None, :]
        v = tl.load(at + v_at + (head * P + p)[None, :], mask=values, other=0.0).to(tl.float32)
        c = tl.load(sums + place * HEADS + head, mask=live, other=0.0)
        within = begin < first
        before = tl.load(sums + (first - 1).to(tl.int64) * HEADS + head, mask=within, other=0.0)
        c = tl.where(live, c - before, 0.0)
        last = tl.sum(tl.where(t == tl.minimum(begin + BLOCK_T, end) - 1, c, 0.0), 0)
        matrix = (place * HEADS + head)[:, None] * BLOCK_T + i[None, :]
        scores = tl.load(pairs + matrix, mask=live[:, None], other=0.0).to(tl.float32)
        if DELTA:
            q = unit(q) * scale
            k = unit(k)
            b = tl.load(steps + place * steps_stride + head, mask=live, other=0.0).to(tl.float32)
            said = tl.dot(k, s, input_precision=PRECISION) * tl.exp(c)[:, None]
            share = tl.sigmoid(b) * beta_factor
            given = tl.where(live[:, None], (v - said) * share[:, None], 0.0)
            solved = tl.load(inverse + matrix, mask=live[:, None], other=0.0).to(tl.float32)
            u = tl.dot(solved, given, input_precision=PRECISION)
        elif FIXED:
            u = v
        else:
            step = tl.load(steps + place * steps_stride + head, mask=live, other=0.0)
            u = v * softplus(step.to(tl.float32) + shift)[:, None]
        o = tl.dot(q, s, input_precision=PRECISION) * tl.exp(c)[:, None]
        o += tl.dot(scores, u, input_precision=PRECISION)
        if not DELTA and not FIXED:
            o += through * v
        to = out + place[:, None] * (HEADS * P) + (head * P + p)[None, :]
        tl.store(to, o.to(out.dtype.element_ty), mask=values)
        k *= tl.exp(last - c)[:, None]
        s = s * tl.exp(last) + tl.dot(tl.trans(k), u, input_precision=PRECISION)
    tl.store(own, s, mask=held & (tl.load(moves) != 0))


def scan_rows(
    mixed_TE: Tensor,
    steps_TJ: Tensor,
    form: Recurrence,
    states_SHNP: Tensor,
    rows_FR: Tensor,
    slots_T: Tensor,
    moves_1: Tensor,
    out_TC: Tensor,
) -> None:
    """Write o [T, H P] of rows from FROM_TOKENS tokens on, whose states move on.

    `slots_T`: the slot of every place, the same of all padding and of no row.
    """
    places, (_, heads, key_dim, value_dim) = mixed_TE.shape[0], states_SHNP.shape
    device, pdl = mixed_TE.device, overlaps(mixed_TE.device)
    assert not form.by_channel, "rows of decays by channel are walked"
    sums_TH = torch.empty((places, heads), dtype=torch.float32, device=device)
    shape = (places, heads, BLOCK_T)
    pairs = torch.empty(shape, dtype=mixed_TE.dtype, device=device)
    inverse = torch.empty_like(pairs) if form.delta else pairs
    halves = mixed_TE.dtype != torch.float32
    common: dict[str, Any] = {
        "HEADS": heads,
        "SHARED": heads // form.key_heads,
        "N": key_dim,
        "P": value_dim,
        "PADDED_N": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_T": BLOCK_T,
        "DELTA": form.delta,
        "FIXED": form.fixed,
        "PRECISION": "tf32" if halves else "ieee",
        "PDL": pdl,
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
        "launch_pdl": pdl,
    }
    pairs_kernel[(triton.cdiv(places, BLOCK_T), heads)](
        mixed_TE,
        steps_TJ,
        form.decay_H,
        form.decay_H if form.bias_H is None else form.bias_H,
        slots_T,
        sums_TH,
        pairs,
        inverse,
        places,
        mixed_TE.stride(0),
        steps_TJ.stride(0),
        key_dim**-0.5,
        form.beta_factor,
        SOLVED=SOLVED,
        MERGED="tf32x3" if halves else "ieee",
        **common,
    )
    block = max(16, min(BLOCK_P, triton.next_power_of_2(value_dim)))
    scan_kernel[(rows_FR.shape[1], heads, triton.cdiv(value_dim, block))](
        mixed_TE,
        steps_TJ,
        form.decay_H if form.bias_H is None else form.bias_H,
        form.decay_H if form.skip_H is None else form.skip_H,
        sums_TH,
        pairs,
        inverse,
        states_SHNP,
        rows_FR,
        moves_1,
        out_TC,
        rows_FR.shape[1],
        FROM_TOKENS,
        mixed_TE.stride(0),
        steps_TJ.stride(0),
        key_dim**-0.5,
        form.beta_factor,
        BLOCK_P=block,
        **common,
    )
