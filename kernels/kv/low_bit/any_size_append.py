"""Append to the low-bit KV cache where heads have a number of channels that is no power of two.

    append_rows    up to HOLDBACK new tokens of a request and head go to the 16-bit ring; of the
                   block that they complete (one at most, all in the ring) scales and zeros are made
    pack_rows      ... and then its words, one program for WORDS words of keys or of values

Every word gathers the channels and tokens that the drawing (formats/kv_block.py) gives it, one
load each: latents of 576 channels pack a block in one of 128 steps. append.py is for heads whose
channels a warp's threads share evenly; longer steps are packed by its twin in plain torch.

B: requests.  Q: new tokens.  G: key-value heads.  D: head_dim.  C: D padded to 32s.
n m r g t o i h M R: see formats/kv_block.py.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.pack import _codes, _gained, _grid
from llmpq.kernels.kv.storage import DeviceRows, KVLayer
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
HOLDBACK = tl.constexpr(HOLDBACK_TOKENS)
RING = tl.constexpr(RING_TOKENS)
CHANNELS = tl.constexpr(64)
"""Channels, or tokens, whose scales a program makes at once."""
WORDS = tl.constexpr(512)


@triton.jit
def _completed(starts, counts, b):
    """The number of the block that a step completes, and whether it does."""
    start = tl.load(starts + b)
    count = tl.load(counts + b)
    done = (start + count - 1 - HOLDBACK) // BLOCK
    return done - 1, (count > 0) & (done > 0) & (done * BLOCK + HOLDBACK >= start)


@triton.jit
def _ring(ring, block, token, channel, live, D: tl.constexpr):
    """Load tokens of a block from the ring, as float32."""
    at = (block * BLOCK + token) % RING * D + channel
    return tl.load(ring + at, mask=live & (channel < D), other=0.0).to(tl.float32)


@triton.jit
def _token_scales(
    ring, params, block, D: tl.constexpr, BITS: tl.constexpr, PADDED: tl.constexpr,
    GAINED: tl.constexpr,
):  # fmt: skip
    """Make a scale and a zero for each token of a block."""
    d = tl.arange(0, PADDED)[None, :]
    for first in range(0, BLOCK, 16):
        token = first + tl.arange(0, 16)
        x = _ring(ring, block, token[:, None], d, d < D, D)
        low = tl.min(tl.where(d < D, x, float("inf")), 1)
        high = tl.max(tl.where(d < D, x, float("-inf")), 1)
        scale, zero, _ = _grid(low, high, BITS)
        if GAINED:
            scale = _gained(scale, token % 64 // 16 * 2 + token % 2, BITS)
        to = params + token // 64 * 64 + token % 16 // 2 * 8 + token % 64 // 16 * 2 + token % 2
        tl.store(to, scale)
        tl.store(to + BLOCK, zero)


@triton.jit(do_not_specialize=["table_width"])
def append_rows(
    k_new, v_new, k_ring, v_ring, k_params, v_params, table, slots, starts, counts, table_width,
    stride_b, stride_t, stride_g,
    Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write the new tokens of one request and head; make the scales of the block they complete."""
    head = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b).to(tl.int64)
    start = tl.load(starts + b)
    count = tl.load(counts + b)
    d = tl.arange(0, PADDED)
    ring = (slot * G + head) * (RING * D)
    for i in range(Q):
        live = d < tl.where(count > i, D, 0)
        new = b * stride_b + i * stride_t + head * stride_g + d
        to = ring + (start + i) % RING * D + d
        tl.store(k_ring + to, tl.load(k_new + new, mask=live), mask=live)
        tl.store(v_ring + to, tl.load(v_new + new, mask=live), mask=live)
    block, completes = _completed(starts, counts, b)
    if completes:
        at = tl.load(table + slot * table_width + block).to(tl.int64) * G + head
        _token_scales(v_ring + ring, v_params + at * (2 * BLOCK), block, D, BITS, PADDED, True)
        if KEY_GROUP == 0:
            _token_scales(k_ring + ring, k_params + at * (2 * BLOCK), block, D, BITS, PADDED, False)
        else:
            token = tl.arange(0, KEY_GROUP)[:, None]
            for first in range(0, C, CHANNELS):
                c = first + tl.arange(0, CHANNELS)
                for group in tl.static_range(BLOCK // KEY_GROUP):
                    x = _ring(
                        k_ring + ring, block, group * KEY_GROUP + token, c[None, :], c[None, :] < D,
                        D,
                    )  # fmt: skip
                    scale, zero, _ = _grid(tl.min(x, 0), tl.max(x, 0), BITS)
                    to = k_params + at * (BLOCK // KEY_GROUP * 2 * C) + group * (2 * C) + c
                    tl.store(to, _gained(scale, c % (C // 4) // 2, BITS), mask=c < C)
                    tl.store(to + C, zero, mask=c < C)


@triton.jit
def _rounded(x, scale, zero, inside, BITS: tl.constexpr):
    """Codes against a stored scale without its gain; 0 of padding."""
    step = scale.to(tl.float32)
    one = tl.full(step.shape, 1.0, tl.float32)
    inverse = tl.where(step > 0, tl.div_rn(one, tl.maximum(step, 1e-30)), 0.0)
    return tl.where(inside, _codes(x, zero, inverse, BITS), 0)


@triton.jit
def _ungained(scale, octet, BITS: tl.constexpr):
    """A stored scale without its gain: a power of two, so nothing is rounded."""
    plane = octet % (8 // BITS)
    return scale.to(tl.float32) * tl.exp2((BITS - 8 + plane * BITS).to(tl.float32))


@triton.jit(do_not_specialize=["table_width"])
def pack_rows(
    k_ring, v_ring, k_words, v_words, k_params, v_params, table, slots, starts, counts, table_width,
    G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """WORDS words of the keys (or, from program PIECES on, the values) of a completed block."""
    I: tl.constexpr = 8 // BITS  # noqa: E741
    head = tl.program_id(0)
    b = tl.program_id(1)
    piece = tl.program_id(2)
    block, completes = _completed(starts, counts, b)
    if completes:
        slot = tl.load(slots + b).to(tl.int64)
        at = tl.load(table + slot * table_width + block).to(tl.int64) * G + head
        ring = (slot * G + head) * (RING * D)
        word = piece % PIECES * WORDS + tl.arange(0, WORDS)
        live = word < 4 * C * BITS
        n = word // (2 * C * BITS)
        inner = word % (2 * C * BITS)
        lane = inner % 128 // 4
        number = inner // 128 * 4 + inner % 4
        g = lane // 4
        t = lane % 4
        made = tl.zeros([WORDS], tl.int32)
        if piece < PIECES:
            m = number // (C * BITS // 64)
            o = number % (C * BITS // 64)
            for j in tl.static_range(4 * I):  # h r i
                h, r, i = j // (2 * I), j // I % 2, j % I
                token = 64 * n + 16 * m + 2 * g + r
                c = t * (C // 4) + 2 * (o * I + i) + h
                x = _ring(k_ring + ring, block, token, c, live, D)
                if KEY_GROUP == 0:
                    order = 64 * n + 8 * g + 2 * m + r
                    params = k_params + at * (2 * BLOCK) + order
                    zero = tl.load(params + BLOCK, mask=live, other=0.0)
                    scale = tl.load(params, mask=live, other=0.0)
                else:
                    params = k_params + at * (BLOCK // KEY_GROUP * 2 * C)
                    params += token // KEY_GROUP * (2 * C) + c
                    zero = tl.load(params + C, mask=live, other=0.0)
                    scale = tl.load(params, mask=live, other=0.0)
                    scale = _ungained(scale, o * I + i, BITS)
                made |= _rounded(x, scale, zero, live & (c < D), BITS) << (
                    8 * (2 * h + r) + i * BITS
                )
            tl.store(k_words + at * (4 * C * BITS) + word, made, mask=live)
        else:
            m = number // BITS
            o = number % BITS
            for j in tl.static_range(4 * I):
                h, r, i = j // (2 * I), j // I % 2, j % I
                octet = o * I + i
                token = 64 * n + 16 * (octet // 2) + 4 * t + 2 * h + octet % 2
                c = g * (C // 8) + 2 * m + r
                x = _ring(v_ring + ring, block, token, c, live, D)
                order = token // 64 * 64 + token % 16 // 2 * 8 + token % 64 // 16 * 2 + token % 2
                params = v_params + at * (2 * BLOCK) + order
                zero = tl.load(params + BLOCK, mask=live, other=0.0)
                scale = _ungained(tl.load(params, mask=live, other=0.0), octet, BITS)
                made |= _rounded(x, scale, zero, live & (c < D), BITS) << (
                    8 * (2 * h + r) + i * BITS
                )
            tl.store(v_words + at * (4 * C * BITS) + word, made, mask=live)


def append_any_size(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    rows: DeviceRows,
) -> None:
    """Append steps of at most HOLDBACK tokens; `reference.append` is the twin."""
    batch, q_len, groups, dim = k_BQGD.shape
    if q_len > HOLDBACK_TOKENS:
        raise ValueError(f"at most {HOLDBACK_TOKENS} new tokens a step, got {q_len}")
    if k_BQGD.stride() != v_BQGD.stride() or k_BQGD.stride(-1) != 1:
        k_BQGD, v_BQGD = k_BQGD.contiguous(), v_BQGD.contiguous()
    where = (table_SN, rows.slots, rows.starts, rows.counts, table_SN.shape[1])
    same = {"G": groups, "D": dim, "C": fmt.channels, "BITS": fmt.bits}
    same["KEY_GROUP"] = fmt.key_group or 0
    rings, params = (layer.k_ring_SGRD, layer.v_ring_SGRD), (layer.k_params_PG, layer.v_params_PG)
    append_rows[(groups, batch)](
        *(k_BQGD, v_BQGD, *rings, *params, *where, *k_BQGD.stride()[:3]),
        **same | {"Q": q_len, "PADDED": max(16, triton.next_power_of_2(dim))},
        num_warps=8,
    )
    pieces = -(-fmt.block_words // int(WORDS))
    pack_rows[(groups, batch, 2 * pieces)](
        *(*rings, layer.k_words_PGW, layer.v_words_PGW, *params, *where),
        **same | {"PIECES": pieces},
        num_warps=4,
    )
