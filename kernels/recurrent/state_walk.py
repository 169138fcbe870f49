"""The recurrence of a step's rows, token by token: each state is read once and written once.

    state      S_t = a_t S_(t-1) + k_t u_t^T      o_t = S_t^T q_t
    delta rule u = b (v - (a S)^T k); q, k of length one; b = sigmoid(.), a = exp(-e^A softplus(.))
    KDA        the delta rule with an a of every channel of keys
    Mamba-2    u = dt v; o += skip v; dt = softplus(.), a = exp(-e^A dt); q = C, k = B
    lightning  u = v; a = exp(-e^A), the same for all tokens

    mixed [T, E]        what the convolution gives: q, k, v, or of Mamba-2 v, k, q, head by head;
                        SHARED heads have the queries and keys of one
    steps [T, .]        b and a of every head (KDA: channel), or dt, or nothing
    states [S, H, N, P] float32: zeros where a row starts at position 0
    notes               tokens in front of a row's own; how many the state moves on by (notes.py)

A program takes BLOCK_P columns of a head's state of one row: its columns need no others. Bytes of a
row of one token: its states twice, all else is small beside them. Longer rows take a token after
the other, the longest ones many at a time (state_scan.py).

T places, R rows, S slots, H heads, N key_dim, P value_dim.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps
from llmpq.kernels.recurrent.notes import Notes, noted_row

BLOCK_P, NUM_WARPS = 64, 2
FEW_BLOCK_P, FEW_NUM_WARPS = 32, 1
FEW_HEADS = 768
"""Heads of all rows up to which smaller programs fill the GPU better.

H200, Qwen3-Next's state, in us by 32 columns and 1 warp, and by 64 and 2: 8 rows 11.5, 12.0; 32
rows 43.5, 43.3; 128 rows 164, 149, of which 112 are its bytes at 4.8 TB/s. One row takes 4.4."""
ZEROS = 32
"""Places of padding at a time."""
EVERY_ROW = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """The tensors of a layer's recurrence."""

    delta: bool
    """By the delta rule, else Mamba-2's, or lightning attention's."""
    key_heads: int
    decay_H: Tensor
    bias_H: Tensor | None
    """[H], KDA's [H N]; None where decays are fixed."""
    skip_H: Tensor | None = None
    """Mamba-2's."""
    by_channel: bool = False
    """KDA: every channel of keys has a decay."""
    beta_factor: float = 1.0

    @property
    def fixed(self) -> bool:
        """Whether a head's decay is the same for all tokens (lightning attention)."""
        return self.bias_H is None


@triton.jit
def softplus(x):
    """log(1 + e^x), exact where e^x is small."""
    y = tl.exp(-tl.abs(x))
    one = 1.0 + y
    small = one - 1.0
    grown = tl.log(one) * (y / tl.where(small > 0, small, 1.0))
    return tl.maximum(x, 0.0) + tl.where(small > 0, grown, y)


@triton.jit(do_not_specialize=["num_rows", "longest"])
def walk_kernel(
    mixed, steps, decay, bias, skip, states, rows, moves, out, noted_mixed, notes, noted_rows,
    num_rows, longest, mixed_stride, steps_stride, inputs, scale, beta_factor, HEADS: tl.constexpr,
    SHARED: tl.constexpr, N: tl.constexpr, P: tl.constexpr, PADDED_N: tl.constexpr,
    BLOCK_P: tl.constexpr, ZEROS: tl.constexpr, DELTA: tl.constexpr, BY_CHANNEL: tl.constexpr,
    FIXED: tl.constexpr, NOTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of columns of a head of one row of at most `longest` tokens."""
    row, head = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, PADDED_N)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    has_n, has_p = n < N, p < P
    rate = -tl.exp(tl.load(decay + head).to(tl.float32))
    if BY_CHANNEL:
        shift = tl.load(bias + head * N + n, mask=has_n, other=0.0).to(tl.float32)
    elif not FIXED:
        shift = tl.load(bias + head).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows + row)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    first = tl.load(rows + 3 * num_rows + row)
    before, settled, _, _ = noted_row(noted_rows, row, num_rows, count, NOTES)
    known = slot >= 0
    mine = known & (count <= longest)
    moving = mine & (count > 0) & (tl.load(moves) != 0)
    own = states + (slot.to(tl.int64) * HEADS + head) * N * P + n[:, None] * P + p[None, :]
    held = has_n[:, None] & has_p[None, :] & mine & (count > 0)
    s = tl.load(own, mask=held & (start > 0), other=0.0)
    KEYS: tl.constexpr = HEADS // SHARED * N
    if DELTA or FIXED:
        q_at, k_at, v_at = 0, KEYS, 2 * KEYS
    else:
        q_at, k_at, v_at = HEADS * P + KEYS, HEADS * P, 0
        through = tl.load(skip + head).to(tl.float32)
    q_own = q_at + head // SHARED * N + n
    k_own = k_at + head // SHARED * N + n
    v_own = v_at + head * P + p
    for i in range(-before, tl.where(mine, count, -before)):
        place = (first + i).to(tl.int64)
        at = mixed + place * mixed_stride
        step_at = steps + place * steps_stride
        if NOTES > 0:  # noqa: SIM102
            if i < 0:
                noted = (slot.to(tl.int64) * NOTES + before + i) * inputs
                at = noted_mixed + noted
                step_at = notes + noted + KEYS * 2 + HEADS * P
        q = tl.load(at + q_own, mask=has_n, other=0.0).to(tl.float32)
        k = tl.load(at + k_own, mask=has_n, other=0.0).to(tl.float32)
        v = tl.load(at + v_own, mask=has_p, other=0.0).to(tl.float32)
        if DELTA:
            b = tl.load(step_at + head).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            if BY_CHANNEL:
                a = tl.load(step_at + HEADS + head * N + n, mask=has_n, other=0.0).to(tl.float32)
                s *= tl.exp(rate * softplus(a + shift))[:, None]
            else:
                a = tl.load(step_at + HEADS + head).to(tl.float32)
                s *= tl.exp(rate * softplus(a + shift))
            u = (v - tl.sum(k[:, None] * s, 0)) * (tl.sigmoid(b) * beta_factor)
        elif FIXED:
            s *= tl.exp(rate)
            u = v
        else:
            dt = softplus(tl.load(step_at + head).to(tl.float32) + shift)
            s *= tl.exp(rate * dt)
            u = v * dt
        s += k[:, None] * u[None, :]
        o = tl.sum(q[:, None] * s, 0)
        if not DELTA and not FIXED:
            o += through * v
        to = out + place * (HEADS * P) + head * P + p
        tl.store(to, o.to(out.dtype.element_ty), mask=has_p & (i >= 0))
        if NOTES > 0:  # noqa: SIM102
            if before + i + 1 == settled:
                tl.store(own, s, mask=held & moving)
    if NOTES == 0:
        tl.store(own, s, mask=held & moving)
    for begin in range(0, tl.where(known, 0, count), ZEROS):
        empty = begin + tl.arange(0, ZEROS)
        there = out + (first + empty).to(tl.int64)[:, None] * (HEADS * P) + head * P + p[None, :]
        padding = (empty < count)[:, None] & has_p[None, :]
        tl.store(there, tl.zeros((ZEROS, BLOCK_P), out.dtype.element_ty), mask=padding)


def walk_rows(
    mixed_TE: Tensor,
    steps_TJ: Tensor,
    form: Recurrence,
    states_SHNP: Tensor,
    rows_FR: Tensor,
    moves_1: Tensor,
    *,
    longest: int = EVERY_ROW,
    notes: Notes | None = None,
) -> Tensor:
    """Return o [T, H P] of rows of up to `longest` tokens, and zeros of padding.

    The rows' states move on, unless `moves_1` is 0. Places of longer rows are left out. `notes`: of
    tokens that may be taken back, which longer rows have none of.
    """
    _, heads, key_dim, value_dim = states_SHNP.shape
    if mixed_TE.stride(1) != 1 or steps_TJ.stride(1) != 1:
        raise ValueError(f"a token's inputs must lie side by side, got strides {mixed_TE.stride()}")
    shape = (mixed_TE.shape[0], heads * value_dim)
    out_TC = torch.empty(shape, dtype=mixed_TE.dtype, device=mixed_TE.device)
    num_rows, pdl = rows_FR.shape[1], overlaps(mixed_TE.device)
    few = num_rows * heads <= FEW_HEADS
    block, warps = (FEW_BLOCK_P, FEW_NUM_WARPS) if few else (BLOCK_P, NUM_WARPS)
    block = min(block, triton.next_power_of_2(value_dim))
    walk_kernel[(num_rows, heads, triton.cdiv(value_dim, block))](
        mixed_TE,
        steps_TJ,
        form.decay_H,
        form.decay_H if form.bias_H is None else form.bias_H,
        form.decay_H if form.skip_H is None else form.skip_H,
        states_SHNP,
        rows_FR,
        moves_1,
        out_TC,
        mixed_TE if notes is None else notes.mixed_SME,
        steps_TJ if notes is None else notes.noted_SME,
        rows_FR if notes is None else notes.rows_FR,
        num_rows,
        longest,
        mixed_TE.stride(0),
        steps_TJ.stride(0),
        0 if notes is None else notes.noted_SME.shape[2],
        key_dim**-0.5,
        form.beta_factor,
        HEADS=heads,
        SHARED=heads // form.key_heads,
        N=key_dim,
        P=value_dim,
        PADDED_N=triton.next_power_of_2(key_dim),
        BLOCK_P=block,
        ZEROS=ZEROS,
        DELTA=form.delta,
        BY_CHANNEL=form.by_channel,
        FIXED=form.fixed,
        NOTES=0 if notes is None else notes.noted_SME.shape[1],
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out_TC
