"""A delta rule's decode step of a token a row as one launch: convolution, recurrence, norm, gate.

    q, k, v = silu(conv(x))        convolve.py, from the row's tail, which moves on
    o       = the delta rule       state_walk.py; the state is read once and written once
    y       = rmsnorm(o) w gate(z) gated_norm.py, by heads

What the three launches round, this rounds. A program takes a head of one row, its state in
registers. SHARED heads convolve the queries and keys of one each for itself (a few hundred numbers
of the L2); the last of them to arrive writes that tail, when all have read it.

    b, a    of a head: two columns of a small matrix, times what its layer is given, made here and
            rounded as a product's result is: a launch less. KDA's come as `steps` [T, J]

T places (row r is place r), R rows, C channels, H heads, N key_dim, P value_dim, J = H + decays.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.overlap import overlaps
from llmpq.kernels.recurrent.state_walk import Recurrence, softplus

NUM_WARPS = 4
"""Of a program; taps are padded to as many, so that they lie as the state does. Otherwise Triton
moves the state by shared memory for the sums."""
MOST_HEADS = 512
"""Heads of all rows up to which this is faster than three launches, whose programs are smaller.

H200, Qwen3-Next's state, us of one and of three: 1 row 5.9, 8.0; 8 rows 14.1, 16.0; 32 rows 52.8,
46.9. With eight warps 9.8, 24.6 and 98: sums over keys go by shared memory."""
STEP_COLUMNS = 2048
"""Of the steps' matrix that a program takes at a time: the first are asked for early."""
MOST_ELEMENTS = 128 * 128
"""Of a head's state: what a program's registers hold."""


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """The convolution in front of a recurrence; a tap's weights are read side by side."""

    weight_C1K: Tensor
    bias_C: Tensor | None


@dataclass(frozen=True, kw_only=True)
class StepProduct:
    """b and a of all heads [T, 2 H], as the product that they are."""

    given_Th: Tensor
    """What a layer's mixer is given."""
    weight_Jh: Tensor


@dataclass(frozen=True, kw_only=True)
class GatedNorm:
    """The norm of a head behind a recurrence, and the gate that multiplies it."""

    weight_P: Tensor
    eps: float
    gate_TC: Tensor
    gate: Literal["silu", "sigmoid"] = "silu"


@triton.jit
def _weights(weight, c, live, weight_stride, tap_stride, TAPS: tl.constexpr, PADDED: tl.constexpr):
    """The weights [PADDED, C] of channels' taps."""
    t = tl.arange(0, PADDED)[:, None]
    at = weight + c[None, :] * weight_stride + t * tap_stride
    return tl.load(at, mask=(t < TAPS) & live[None, :], other=0.0)


@triton.jit
def _kept(tail, c, live, channels, TAPS: tl.constexpr, PADDED: tl.constexpr):
    """The last inputs [PADDED, C] of channels, oldest first, zeros behind them."""
    t = tl.arange(0, PADDED)[:, None]
    there = (t < TAPS - 1) & live[None, :]
    return tl.load(tail + t * channels + c[None, :], mask=there, other=0.0)


@triton.jit
def _newest(x, c, live, TAPS: tl.constexpr, PADDED: tl.constexpr):
    """A token's channels in the place [PADDED, C] behind those that are kept."""
    t = tl.arange(0, PADDED)[:, None]
    return tl.load(x + c[None, :] + t * 0, mask=(t == TAPS - 1) & live[None, :], other=0.0)


@triton.jit
def _convolved(
    new, old, bias, c, live, weights, TAPS: tl.constexpr, PADDED: tl.constexpr, BIAS: tl.constexpr
):
    """silu(conv) of a token's channels, rounded; its inputs [PADDED, C], oldest first."""
    t = tl.arange(0, PADDED)[:, None]
    inputs = tl.where(t == TAPS - 1, new, old)
    total = tl.sum(weights.to(tl.float32) * inputs.to(tl.float32), 0)
    if BIAS:
        total += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    total *= tl.sigmoid(total)
    return total.to(new.dtype).to(tl.float32), inputs


@triton.jit
def _move_tail(tail, c, live, channels, inputs, TAPS: tl.constexpr, PADDED: tl.constexpr):
    """Keep all inputs but the oldest, each in front of where it was."""
    t = tl.arange(0, PADDED)[:, None]
    moved = (t > 0) & (t < TAPS) & live[None, :]
    tl.store(tail + (t - 1) * channels + c[None, :], inputs.to(tail.dtype.element_ty), mask=moved)


@triton.jit
def _step_weights(weight, head, first, HEADS: tl.constexpr, GIVEN: tl.constexpr, BG: tl.constexpr):
    """BG columns from `first` on of the matrix [2 H, GIVEN] that makes a head's b and a."""
    c = first + tl.arange(0, BG)
    own = weight + head * GIVEN + c
    b = tl.load(own, mask=c < GIVEN, other=0.0)
    return b, tl.load(own + HEADS * GIVEN, mask=c < GIVEN, other=0.0)


@triton.jit
def _step_shares(
    given, weight, head, known, ahead, HEADS: tl.constexpr, GIVEN: tl.constexpr, BG: tl.constexpr
):
    """What threads have of a head's b and a; `ahead`: the first columns of their matrix."""
    b, a = tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32)
    for first in tl.static_range(0, GIVEN, BG):
        c = first + tl.arange(0, BG)
        own = ahead
        if first > 0:
            own = _step_weights(weight, head, first, HEADS, GIVEN, BG)
        g = tl.load(given + c, mask=known & (c < GIVEN), other=0.0).to(tl.float32)
        b += g * own[0].to(tl.float32)
        a += g * own[1].to(tl.float32)
    return b, a


@triton.jit(do_not_specialize=["num_rows"])
def delta_step_kernel(
    x, conv_weight, conv_bias, tails, steps, step_weight, decay, bias, states, gate, norm_weight,
    rows, moves, arrived, out, num_rows, x_stride, steps_stride, gate_stride, channels,
    weight_stride, tap_stride, scale, beta_factor, eps, HEADS: tl.constexpr, SHARED: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, PADDED_N: tl.constexpr, PADDED_P: tl.constexpr,
    TAPS: tl.constexpr, PADDED: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr,
    BG: tl.constexpr, BY_CHANNEL: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head // SHARED
    n, p = tl.arange(0, PADDED_N), tl.arange(0, PADDED_P)
    has_n, has_p = n < N, p < P
    KEYS: tl.constexpr = HEADS // SHARED * N
    q_at, k_at, v_at = key_head * N + n, KEYS + key_head * N + n, 2 * KEYS + head * P + p
    q_taps = _weights(conv_weight, q_at, has_n, weight_stride, tap_stride, TAPS, PADDED)
    k_taps = _weights(conv_weight, k_at, has_n, weight_stride, tap_stride, TAPS, PADDED)
    v_taps = _weights(conv_weight, v_at, has_p, weight_stride, tap_stride, TAPS, PADDED)
    w = tl.load(norm_weight + p, mask=has_p, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(decay + head).to(tl.float32))
    if BY_CHANNEL:
        shift = tl.load(bias + head * N + n, mask=has_n, other=0.0).to(tl.float32)
    else:
        shift = tl.load(bias + head).to(tl.float32)
        ahead = _step_weights(step_weight, head, 0, HEADS, GIVEN, BG)
    if PDL:
        gdc_launch_dependents()
    # Rows are sent before a step, whose first launches wait for all that went before; tails and
    # states are its own to write. So they are asked for while the kernel ahead still runs.
    slot = tl.load(rows + row)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    known = (slot >= 0) & (count > 0)
    going = known & (start > 0)
    own = states + (slot.to(tl.int64) * HEADS + head) * N * P + n[:, None] * P + p[None, :]
    held = has_n[:, None] & has_p[None, :]
    s = tl.load(own, mask=held & going, other=0.0)
    DT: tl.constexpr = x.dtype.element_ty
    token = x + place * x_stride
    tail = tails + slot.to(tl.int64) * (TAPS - 1) * channels
    q_old = _kept(tail, q_at, has_n & going, channels, TAPS, PADDED)
    k_old = _kept(tail, k_at, has_n & going, channels, TAPS, PADDED)
    v_old = _kept(tail, v_at, has_p & going, channels, TAPS, PADDED)
    if PDL:
        gdc_wait()
    # All that a kernel ahead made is asked for before the first sum, at whose barrier loads wait.
    moving = known & (tl.load(moves) != 0)
    q_new = _newest(token, q_at, has_n & known, TAPS, PADDED)
    k_new = _newest(token, k_at, has_n & known, TAPS, PADDED)
    v_new = _newest(token, v_at, has_p & known, TAPS, PADDED)
    z_at = gate + place * gate_stride + head * P + p
    z = tl.load(z_at, mask=has_p & known, other=0.0).to(tl.float32)
    at = steps + place * steps_stride
    if BY_CHANNEL:
        b = tl.load(at + head, mask=known, other=0.0).to(tl.float32)
        decays = at + HEADS + head * N + n
        a = tl.load(decays, mask=has_n & known, other=0.0).to(tl.float32)
        s *= tl.exp(rate * softplus(a + shift))[:, None]
    else:
        b, a = _step_shares(at, step_weight, head, known, ahead, HEADS, GIVEN, BG)
        b = tl.sum(b, 0).to(DT).to(tl.float32)
        a = tl.sum(a, 0).to(DT).to(tl.float32)
        s *= tl.exp(rate * softplus(a + shift))
    q, q_in = _convolved(q_new, q_old, conv_bias, q_at, has_n & known, q_taps, TAPS, PADDED, BIAS)
    k, k_in = _convolved(k_new, k_old, conv_bias, k_at, has_n & known, k_taps, TAPS, PADDED, BIAS)
    v, v_in = _convolved(v_new, v_old, conv_bias, v_at, has_p & known, v_taps, TAPS, PADDED, BIAS)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    u = (v - tl.sum(k[:, None] * s, 0)) * (tl.sigmoid(b) * beta_factor)
    s += k[:, None] * u[None, :]
    o = tl.sum(q[:, None] * s, 0).to(DT).to(tl.float32)
    tl.store(own, s, mask=held & moving)
    y = o * (tl.rsqrt(tl.sum(o * o, 0) / P + eps) * w)
    y *= tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
    y = tl.where(known, y, 0.0).to(out.dtype.element_ty)
    tl.store(out + place * (HEADS * P) + head * P + p, y, mask=has_p & (count > 0))
    _move_tail(tail, v_at, has_p & moving, channels, v_in, TAPS, PADDED)
    last = True
    if SHARED > 1:
        tl.debug_barrier()  # the tail is read
        counter = arrived + row * (HEADS // SHARED) + key_head
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SHARED - 1
        if last:
            tl.store(counter, 0)
    _move_tail(tail, q_at, has_n & moving & last, channels, q_in, TAPS, PADDED)
    _move_tail(tail, k_at, has_n & moving & last, channels, k_in, TAPS, PADDED)


def takes(num_rows: int, heads: int, key_dim: int, value_dim: int) -> bool:
    """Whether one launch is faster, and a program's registers hold a head's state."""
    padded = triton.next_power_of_2(key_dim) * triton.next_power_of_2(value_dim)
    return padded <= MOST_ELEMENTS and num_rows * heads <= MOST_HEADS


def delta_step(
    x_TE: Tensor,
    steps: Tensor | StepProduct,
    convolution: Convolution,
    form: Recurrence,
    norm: GatedNorm,
    tails_SKC: Tensor,
    states_SHNP: Tensor,
    rows_FR: Tensor,
    moves_1: Tensor,
) -> Tensor:
    """Return y [T, H P] of rows of one token each, and zeros of padding.

    Tails and states of the rows move on, unless `moves_1` is 0. `x_TE`: what is convolved, first
    queries and keys of all heads, then values; its rows and the gate's may lie further apart.
    `steps`: of KDA [T, J], else the product that they are.
    """
    _, heads, key_dim, value_dim = states_SHNP.shape
    weight, gate_TC = convolution.weight_C1K, norm.gate_TC
    channels, _, taps = weight.shape
    if isinstance(steps, StepProduct):
        given, step_weight, columns = steps.given_Th, steps.weight_Jh, steps.weight_Jh.shape[1]
    else:
        given, step_weight, columns = steps, steps, 0
    if form.by_channel == isinstance(steps, StepProduct):
        raise ValueError("steps: got a product of KDA's or a table of others, expected the reverse")
    if x_TE.stride(1) != 1 or gate_TC.stride(1) != 1 or given.stride(1) != 1:
        raise ValueError(f"a token's inputs must lie side by side, got strides {x_TE.stride()}")
    shape, num_rows = (x_TE.shape[0], heads * value_dim), rows_FR.shape[1]
    out_TC = torch.empty(shape, dtype=x_TE.dtype, device=x_TE.device)
    pdl, bias = overlaps(x_TE.device), convolution.bias_C
    assert form.delta and form.bias_H is not None
    delta_step_kernel[(num_rows, heads)](
        x_TE,
        weight,
        weight if bias is None else bias,
        tails_SKC,
        given,
        step_weight.contiguous(),
        form.decay_H,
        form.bias_H,
        states_SHNP,
        gate_TC,
        norm.weight_P,
        rows_FR,
        moves_1,
        arrivals(x_TE.device, num_rows * form.key_heads),
        out_TC,
        num_rows,
        x_TE.stride(0),
        given.stride(0),
        gate_TC.stride(0),
        channels,
        weight.stride(0),
        weight.stride(2),
        key_dim**-0.5,
        form.beta_factor,
        norm.eps,
        HEADS=heads,
        SHARED=heads // form.key_heads,
        N=key_dim,
        P=value_dim,
        PADDED_N=triton.next_power_of_2(key_dim),
        PADDED_P=triton.next_power_of_2(value_dim),
        TAPS=taps,
        PADDED=max(NUM_WARPS, triton.next_power_of_2(taps)),
        BIAS=bias is not None,
        GIVEN=columns,
        BG=min(STEP_COLUMNS, triton.next_power_of_2(max(1, columns))),
        BY_CHANNEL=form.by_channel,
        SIGMOID=norm.gate == "sigmoid",
        PDL=pdl,
        num_warps=NUM_WARPS,
        launch_pdl=pdl,
    )
    return out_TC
