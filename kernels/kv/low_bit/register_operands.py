"""Scales, queries and probabilities as a tensor core's registers want them, inside a Triton kernel.

Everything here is a reshape of what each of a warp's 32 threads holds already (kv_block.py): the
compiler turns it into no instruction at all, except `movmatrix` for the probabilities.

R: columns of a product, 8n + g.  D: channels, a power of two, C of them stored.  KW: consecutive
columns of the left operand that a thread holds.  Axes n m r g t s half h c: see
formats/kv_block.py; c: 8 channels of a thread's D/4.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.float32_products import LOW_GAIN, high_and_low
from llmpq.kernels.kv.low_bit.unpack import TWO_24

MOVMATRIX = tl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
PREFETCH = tl.constexpr(
    "{.reg .pred p; setp.ne.u32 p, $2, 0;"
    "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}"
)


@triton.jit
def lane_vector(ptr, D: tl.constexpr, C: tl.constexpr):
    """Load C halves by channel; [D/32, 32 threads, 8]: thread 4g+t has channels t*C/4 + 8c + j.

    One compact load: a load of each thread's own copy costs twice the L2 traffic (ncu, H200).
    """
    e = tl.arange(0, D)
    if C == D:
        x = tl.load(ptr + e)
    else:
        own = e % (D // 4)
        x = tl.load(ptr + e // (D // 4) * (C // 4) + own, mask=own < C // 4, other=0.0)
    x = tl.permute(tl.reshape(x, (4, D // 32, 8)), (1, 0, 2))
    x = tl.broadcast_to(tl.expand_dims(x, 1), (D // 32, 8, 4, 8))
    return tl.reshape(x, (D // 32, 32, 8))


@triton.jit
def token_vector(ptr):
    """Load a tile's 64 per-token halves: [32 threads, 8], thread 4g+t gets those of row g."""
    x = tl.reshape(tl.load(ptr + tl.arange(0, 64)), (8, 1, 8))
    return tl.reshape(tl.broadcast_to(x, (8, 4, 8)), (32, 8))


@triton.jit
def over_scores(x, R: tl.constexpr):
    """[32, 8] per token -> [64, R] beside the scores."""
    x = tl.permute(tl.reshape(x, (8, 4, 4, 2)), (2, 3, 0, 1))  # g t m r -> m r g t
    x = tl.expand_dims(tl.expand_dims(x, 3), 5)  # m r g 1 t 1
    x = tl.broadcast_to(x, (4, 2, 8, R // 8, 4, 2))
    return tl.reshape(x, (64, R))


@triton.jit
def right_operand(x, D: tl.constexpr, R: tl.constexpr, KW: tl.constexpr):
    """[R/8, D/32, 32, 8] (columns' channels by thread) -> [D, R] right operand."""
    x = tl.reshape(x, (R // 8, D // 32, 8, 4, 2, 2, 2))  # n c g t s half h
    if KW == 4:  # noqa: SIM108  (a constexpr branch)
        x = tl.permute(x, (1, 4, 3, 5, 6, 0, 2))
    else:
        x = tl.permute(x, (1, 4, 5, 3, 6, 0, 2))
    return tl.reshape(x, (D, R))


@triton.jit
def zero_rows(z, D: tl.constexpr, KW: tl.constexpr):
    """[D/32, 32, 8] zeros by thread -> [16, D] left operand, every row the same."""
    x = tl.reshape(z, (D // 32, 8, 4, 2, 2, 2))  # c g t s half h
    x = tl.permute(x, (1, 0, 3, 4, 2, 5))  # g c s half t h
    x = tl.broadcast_to(tl.reshape(x, (1, 1, 8, D // 16, 2, 4, 2)), (1, 2, 8, D // 16, 2, 4, 2))
    if KW == 4:
        x = tl.permute(x, (0, 1, 2, 3, 5, 4, 6))
    return tl.reshape(x, (16, D))


@triton.jit
def probability_operand(p, R: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr):
    """fp16 [64, R] scores layout -> [64, R] right operand: 8x8 blocks transposed in registers."""
    if EMULATE:
        x = tl.reshape(p, (4, 2, 4, 2, R // 8, 8))  # m r t h n a
        x = tl.permute(x, (0, 1, 4, 5, 2, 3))  # m r n a t h
    else:
        y = tl.inline_asm_elementwise(
            MOVMATRIX, "=r,r", [p], dtype=tl.float16, is_pure=True, pack=2
        )
        x = tl.reshape(y, (4, 2, 8, R // 8, 4, 2))  # m r a n t h
        x = tl.permute(x, (0, 1, 3, 2, 4, 5))  # m r n a t h
    if KW == 4:  # noqa: SIM108  (a constexpr branch)
        x = tl.permute(x, (0, 4, 1, 5, 2, 3))  # m t r h n a
    else:
        x = tl.permute(x, (0, 1, 4, 5, 2, 3))  # m r t h n a
    return tl.reshape(x, (64, R))


@triton.jit
def words(ptr, V: tl.constexpr, STORED: tl.constexpr):
    """Load STORED * 32 * 4 words as int16 halves [V*32, 8], 16 bytes a thread, zeros behind."""
    halves = ptr.to(tl.pointer_type(tl.int16))
    row = tl.arange(0, V * 32)[:, None]
    at = halves + row * 8 + tl.arange(0, 8)[None, :]
    if V == STORED:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=row + tl.arange(0, 8)[None, :] * 0 < STORED * 32, other=0)
    return x


@triton.jit
def prefetch(address, nbytes):
    """Ask the L2 for `nbytes` (of a multiple of 16, 0 for nothing) at each lane's address."""
    tl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [address, nbytes], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_tiles(
    k_words, k_params, v_words, v_params, table, slot, table_width, head, first, end,
    G: tl.constexpr, D: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """Ask the L2 for tiles first..end-1, at most 8: lane 8n + i asks for part n of tile i."""
    lane = tl.arange(0, 32)
    kind = lane // 8
    tile = first + lane % 8
    live = tile < end
    block = tile // 2
    page = tl.load(table + slot * table_width + block, mask=live, other=0).to(tl.int64)
    at = page * G + head
    PLAIN: tl.constexpr = KEY_BITS == 16  # keys as they are, without scales
    ITEM: tl.constexpr = k_words.dtype.element_ty.primitive_bitwidth // 8
    K_TILE: tl.constexpr = 64 * D * ITEM if PLAIN else 8 * D * KEY_BITS
    V_TILE: tl.constexpr = 8 * D * VALUE_BITS
    K_BYTES: tl.constexpr = 0 if PLAIN else 4 * D
    number = 2 * at + tile % 2
    k_from = tl.where(
        kind == 0, k_words.to(tl.int64) + number * K_TILE, k_params.to(tl.int64) + at * K_BYTES
    )
    v_from = tl.where(
        kind == 1, v_words.to(tl.int64) + number * V_TILE, v_params.to(tl.int64) + at * 512
    )
    # a block's scales serve both tiles
    scales = (tile % 2 == 0) | (tile == first)
    codes = tl.where(kind == 0, K_TILE, V_TILE)
    size = tl.where(kind < 2, codes, tl.where(scales, tl.where(kind == 2, K_BYTES, 512), 0))
    prefetch(tl.where(kind % 2 == 0, k_from, v_from), tl.where(live, size, 0))


@triton.jit
def prefetch_ring(
    k_ring, v_ring, since, end, RING: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr
):
    """Ask the L2 for the ring's steps since..end-1 of keys (lanes 0-15) and values."""
    TOKEN_BYTES: tl.constexpr = D * k_ring.dtype.element_ty.primitive_bitwidth // 8
    lane = tl.arange(0, 32)
    pos = since + lane % 16 * STEP
    from_k = lane < 16
    at = pos % RING * TOKEN_BYTES
    at += tl.where(from_k, k_ring.to(tl.int64), v_ring.to(tl.int64))
    prefetch(at, tl.where(pos < end, STEP * TOKEN_BYTES, 0))


@triton.jit
def fold_keys(
    kp_at,
    q_plain,
    q_thread,
    GAIN: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    KW: tl.constexpr,
    KW0: tl.constexpr,
    C: tl.constexpr,
):
    """Queries times a block's key scales [D, R]; the scores of its zeros [16, R] to start from.

    Of float32 queries both halves (float32_products.py), `q_plain`'s too, which are 0 of others.
    """
    scale = lane_vector(kp_at, D, C)
    zero = zero_rows(lane_vector(kp_at + C, D, C), D, KW0)
    folded = q_thread * scale[None, :, :, :]
    if q_thread.dtype == tl.float32:
        high, low = high_and_low(folded)
        q_mat = (right_operand(high, D, R, KW), right_operand(low, D, R, KW))
    else:
        q_mat = (right_operand(folded, D, R, KW), 0)
    return q_mat, times_codes(zero, q_plain, q_thread.dtype == tl.float32) * (GAIN / TWO_24)


@triton.jit
def plain_queries(q_thread, D: tl.constexpr, R: tl.constexpr, KW: tl.constexpr):
    """Queries by thread as a right operand [D, R], of float32 ones both halves."""
    if q_thread.dtype == tl.float32:
        high, low = high_and_low(q_thread)
        q_mat = (right_operand(high, D, R, KW), right_operand(low, D, R, KW))
    else:
        q_mat = (right_operand(q_thread, D, R, KW), 0)
    return q_mat


@triton.jit
def times_codes(codes, q_mat, FLOAT32: tl.constexpr):
    """Codes, or other numbers of fp16, times queries (`fold_keys`), which may have two halves."""
    x = tl.dot(codes, q_mat[0])
    if FLOAT32:
        x += tl.dot(codes, q_mat[1]) * (1.0 / LOW_GAIN)
    return x


@triton.jit
def from_zero(init, R: tl.constexpr):
    """[16, R] equal rows -> [64, R]."""
    return tl.reshape(tl.broadcast_to(tl.reshape(init, (1, 16, R)), (4, 16, R)), (64, R))


@triton.jit
def by_thread(x, R: tl.constexpr):
    """[64, R] scores -> the largest of each thread's tokens [8, R]."""
    return tl.max(tl.reshape(x, (8, 8, R)), 0)


@triton.jit
def zero_by_thread(init, R: tl.constexpr):
    """[16, R] equal rows -> [8, R], beside `by_thread`."""
    return tl.max(tl.reshape(init, (2, 8, R)), 0)
