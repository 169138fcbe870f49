"""Attention over the low-bit KV cache: one pass over packed tiles and 16-bit ring, then a combine.

    scores^T [64 tokens, R] = K [64, D] q^T [D, R]         K, V^T: packed words, unpacked in registers
    out^T    [D, R]        += V^T [D, 64] p [64, R]        (kv_formats.py draws them)

Keys and values are the left operand (16 rows a tile, always full); the R = 8 or 16 columns are the
query heads of one key-value head times the q_len new tokens, so GQA and a verify of several tokens
read each byte once. Scales never touch the unpacked elements: a channel's key scale folds into q, a
token's into p; zeros are one extra row of products (keys) and one sum (values). One warp a program,
no shared memory in the packed loop: words go from global memory to the operand's registers. GAIN:
stored scales make up for a plane's power of two (kv_formats.py), sums are then GAIN times too large.

Cost per output: D * bits/4 + (scales) bytes of keys and values per token and key-value head,
0.63 integer instructions per 4-bit element, 1 mma.m16n8k16 per 256 elements.

Programs: (5 + splits, G * column chunks, B). The first 5 take 32 tokens of the 16-bit ring each, the
others `chunk` packed blocks; each writes its normalised output and log2-sum-exp, `combine` merges.

B: requests.  Q: new tokens.  H: query heads.  G: key-value heads.  D: head_dim.  X: parts.
g, t, h, r, m, s: see kv_formats.py; thread 4g + t of the warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv_unpack import TWO_24, unpack
from llmpq.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
HOLDBACK = tl.constexpr(HOLDBACK_TOKENS)
RING = tl.constexpr(RING_TOKENS)
TILE = tl.constexpr(64)
RING_STEP = tl.constexpr(32)
RING_PARTS = tl.constexpr(-(-RING_TOKENS // 32))
P_SHIFT = tl.constexpr(4.0)
"""Probabilities are kept times 2**4: fp16 keeps its precision down to 2**-14."""
WORD_CACHE = tl.constexpr("")
LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-3.0e30)
LOWEST = tl.constexpr(-1.0e30)
MOVMATRIX = tl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@triton.jit
def packed_line(position):
    """packed_end(position) of llmpq/kv_format.py."""
    return tl.maximum(position - HOLDBACK, 0) // BLOCK * BLOCK


@triton.jit
def _lane_vector(ptr, D: tl.constexpr):
    """Load D halves by channel; [D/32, 32 threads, 8]: thread 4g+t has channels t*D/4 + 8c + j.

    One compact load: a load of each thread's own copy costs twice the L2 traffic (ncu, H200).
    """
    x = tl.permute(tl.reshape(tl.load(ptr + tl.arange(0, D)), (4, D // 32, 8)), (1, 0, 2))
    x = tl.broadcast_to(tl.expand_dims(x, 1), (D // 32, 8, 4, 8))
    return tl.reshape(x, (D // 32, 32, 8))


@triton.jit
def _token_vector(ptr):
    """Load a tile's 64 per-token halves: [32 threads, 8], thread 4g+t gets those of row g."""
    x = tl.reshape(tl.load(ptr + tl.arange(0, 64)), (8, 1, 8))
    return tl.reshape(tl.broadcast_to(x, (8, 4, 8)), (32, 8))


@triton.jit
def _over_scores(x, R: tl.constexpr):
    """[32, 8] per token -> [64, R] beside the scores."""
    x = tl.permute(tl.reshape(x, (8, 4, 4, 2)), (2, 3, 0, 1))  # g t m r -> m r g t
    x = tl.expand_dims(tl.expand_dims(x, 3), 5)  # m r g 1 t 1
    x = tl.broadcast_to(x, (4, 2, 8, R // 8, 4, 2))
    return tl.reshape(x, (64, R))


@triton.jit
def _right_operand(x, D: tl.constexpr, R: tl.constexpr, KW: tl.constexpr):
    """[R/8, D/32, 32, 8] (columns' channels by thread) -> [D, R] right operand."""
    x = tl.reshape(x, (R // 8, D // 32, 8, 4, 2, 2, 2))  # n c g t s half h
    if KW == 4:
        x = tl.permute(x, (1, 4, 3, 5, 6, 0, 2))
    else:
        x = tl.permute(x, (1, 4, 5, 3, 6, 0, 2))
    return tl.reshape(x, (D, R))


@triton.jit
def _zero_rows(z, D: tl.constexpr, KW: tl.constexpr):
    """[D/32, 32, 8] zeros by thread -> [16, D] left operand, every row the same."""
    x = tl.reshape(z, (D // 32, 8, 4, 2, 2, 2))  # c g t s half h
    x = tl.permute(x, (1, 0, 3, 4, 2, 5))  # g c s half t h
    x = tl.broadcast_to(tl.reshape(x, (1, 1, 8, D // 16, 2, 4, 2)), (1, 2, 8, D // 16, 2, 4, 2))
    if KW == 4:
        x = tl.permute(x, (0, 1, 2, 3, 5, 4, 6))
    return tl.reshape(x, (16, D))


@triton.jit
def _probability_operand(p, R: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr):
    """fp16 [64, R] scores layout -> [64, R] right operand: 8x8 blocks transposed in registers."""
    if EMULATE:
        x = tl.reshape(p, (4, 2, 4, 2, R // 8, 8))  # m r t h n a
        x = tl.permute(x, (0, 1, 4, 5, 2, 3))  # m r n a t h
    else:
        y = tl.inline_asm_elementwise(MOVMATRIX, "=r,r", [p], dtype=tl.float16, is_pure=True, pack=2)
        x = tl.reshape(y, (4, 2, 8, R // 8, 4, 2))  # m r a n t h
        x = tl.permute(x, (0, 1, 3, 2, 4, 5))  # m r n a t h
    if KW == 4:
        x = tl.permute(x, (0, 4, 1, 5, 2, 3))  # m t r h n a
    else:
        x = tl.permute(x, (0, 1, 4, 5, 2, 3))  # m r t h n a
    return tl.reshape(x, (64, R))


@triton.jit
def _words(ptr, V: tl.constexpr):
    """Load V * 32 * 4 words as int16 halves [V*32, 8], 16 bytes a thread."""
    halves = ptr.to(tl.pointer_type(tl.int16))
    row = tl.arange(0, V * 32)[:, None]
    return tl.load(halves + row * 8 + tl.arange(0, 8)[None, :], cache_modifier=WORD_CACHE)


@triton.jit
def _fold_keys(kp_at, q_plain, q_thread, GAIN: tl.constexpr, D: tl.constexpr, R: tl.constexpr, KW: tl.constexpr, KW0: tl.constexpr):
    """Queries times a group's key scales [D, R], and the group's zeros' scores [16, R] to start from."""
    scale = _lane_vector(kp_at, D)
    zero = _lane_vector(kp_at + D, D)
    q_mat = _right_operand(q_thread * scale[None, :, :, :], D, R, KW)
    return q_mat, tl.dot(_zero_rows(zero, D, KW0), q_plain) * (GAIN / TWO_24)


@triton.jit
def _from_zero(init, R: tl.constexpr):
    """[16, R] equal rows -> [64, R]."""
    return tl.reshape(tl.broadcast_to(tl.reshape(init, (1, 16, R)), (4, 16, R)), (64, R))


@triton.jit
def _column_positions(col, start, end, GROUP_HEADS: tl.constexpr):
    """Position of each column's query; columns beyond the step take its last."""
    return tl.minimum(start + col // GROUP_HEADS, end - 1)


@triton.jit
def attend_split(
    q_ptr, k_words, k_params, v_words, v_params, k_ring, v_ring, table, slots, starts, counts, slopes,
    part_out, part_lse, score_scale, chunk, table_width, num_parts,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr, R: tl.constexpr, PAGED: tl.constexpr, ALIBI: tl.constexpr,
    KW: tl.constexpr, KW0: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """One part of one request's one key-value head: see the file's docstring."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C * Q + R - 1) // R
    head = tl.program_id(1) // CHUNKS
    first_col = tl.program_id(1) % CHUNKS * R
    b = tl.program_id(2)
    start = tl.load(starts + b)
    end = start + tl.load(counts + b)
    slot = tl.load(slots + b).to(tl.int64)
    line = packed_line(end - 1)
    out_at = ((b * G * CHUNKS + tl.program_id(1)) * num_parts + part).to(tl.int64)

    if part < RING_PARTS:
        since = packed_line(start) + part * RING_STEP
        if since < end:
            # ---- 16-bit keys: 32 tokens, operands through Triton's own layouts; bf16 goes through
            # fp16, whose three more bits keep the probabilities' error below 2**-11
            cols = first_col + tl.arange(0, R)
            q_pos = _column_positions(cols, start, end, C)
            q_line = packed_line(q_pos)
            d = tl.arange(0, D)
            q_at = ((b * Q + cols // C) * H + head * C + cols % C) * D
            q = tl.load(q_ptr + q_at[None, :] + d[:, None], mask=(cols < C * Q)[None, :], other=0.0)
            pos = since + tl.arange(0, RING_STEP)
            live = (pos < end)[:, None]
            at = (slot * G + head) * RING * D + (pos % RING)[:, None] * D + d[None, :]
            k = tl.load(k_ring + at, mask=live, other=0.0)
            v = tl.load(v_ring + at, mask=live, other=0.0)
            x = tl.dot(k.to(tl.float16), q.to(tl.float16)) * score_scale
            if ALIBI:
                slope = tl.load(slopes + head * C + cols % C) * LOG2_E
                x += slope[None, :] * (pos[:, None] - q_pos[None, :]).to(tl.float32)
            seen = (pos[:, None] >= q_line[None, :]) & (pos[:, None] <= q_pos[None, :]) & live
            x = tl.where(seen, x, MASKED)
            m_i = tl.maximum(tl.max(x, 0), LOWEST)
            p = tl.exp2(x - m_i[None, :])
            l_i = tl.sum(p, 0)
            acc = tl.dot(tl.trans(v.to(tl.float16)), p.to(tl.float16))
            norm = 1.0 / tl.maximum(l_i, 1e-30)
            lse = tl.where(l_i > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), MASKED)
            c = tl.arange(0, R)
            tl.store(part_lse + out_at * R + c, lse)
            o_at = part_out + (out_at * R + c[None, :]) * D + d[:, None]
            tl.store(o_at, acc * norm[None, :])
    else:
        block0 = (part - RING_PARTS) * chunk
        block1 = tl.minimum(block0 + chunk, line // BLOCK)
        if block0 < block1:
            NC: tl.constexpr = D // 32
            NB: tl.constexpr = R // 8
            VECS: tl.constexpr = D * BITS // 64  # 16-byte loads a thread needs for a tile
            GAIN: tl.constexpr = 2 ** (8 - BITS)
            # ---- queries by thread: column 8n + g, channels t*D/4 + 8c + j
            row = tl.arange(0, NB * NC * 32)[:, None]
            channel = row % 4 * (D // 4) + row // 32 % NC * 8 + tl.arange(0, 8)[None, :]
            q_col = first_col + row // (32 * NC) * 8 + row // 4 % 8
            q_at = ((b * Q + q_col // C) * H + head * C + q_col % C) * D
            q_raw = tl.load(q_ptr + q_at + channel, mask=q_col < C * Q, other=0.0)
            q_thread = tl.reshape(q_raw, (NB, NC, 32, 8)).to(tl.float16)
            cols = first_col + tl.arange(0, R)
            q_pos = _column_positions(cols, start, end, C)
            q_line = packed_line(q_pos)
            q_plain = _right_operand(q_thread, D, R, KW0)
            if KEY_GROUP == 0:
                plane = (tl.arange(0, 8) // 2) % (8 // BITS)
                fold = tl.exp2(-BITS * plane.to(tl.float32)).to(tl.float16)
                q_codes = _right_operand(q_thread * fold[None, None, None, :], D, R, KW)
                q_sum = tl.max(tl.dot(tl.full([16, D], 1.0, tl.float16), q_plain), 0)
            # scores stay in the product's units, and become exponents of 2 in the exponential
            unit = score_scale if KEY_GROUP == 0 else score_scale * (TWO_24 / GAIN)
            if ALIBI:
                slope = tl.load(slopes + head * C + cols % C) * LOG2_E / unit
            row = tl.arange(0, 64)
            row_token = row // 16 * 16 + row % 8 * 2 + row // 8 % 2

            m_i = tl.full([R], LOWEST, tl.float32)
            l_g = tl.zeros([8, R], tl.float32)
            z_g = tl.zeros([8, R], tl.float32)
            acc = tl.zeros([D, R], tl.float32)
            for block in tl.range(block0, block1, num_stages=STAGES):
                if PAGED:
                    page = tl.load(table + slot * table_width + block).to(tl.int64)
                else:
                    page = slot * table_width + block
                at = page * G + head
                kw_at = k_words + at * (2 * VECS * 128)
                vw_at = v_words + at * (2 * VECS * 128)
                vp_at = v_params + at * (2 * BLOCK)
                # ---- scores of two tiles
                k0 = unpack(_words(kw_at, VECS), 4, D // 16, BITS, KW, EMULATE)
                k1 = unpack(_words(kw_at + VECS * 128, VECS), 4, D // 16, BITS, KW, EMULATE)
                if KEY_GROUP == 0:
                    kp_at = k_params + at * (2 * BLOCK)
                    x0 = tl.dot(k0, q_codes) * TWO_24
                    x0 = x0 * _over_scores(_token_vector(kp_at).to(tl.float32), R)
                    x0 += q_sum[None, :] * _over_scores(_token_vector(kp_at + BLOCK).to(tl.float32), R)
                    x1 = tl.dot(k1, q_codes) * TWO_24
                    x1 = x1 * _over_scores(_token_vector(kp_at + TILE).to(tl.float32), R)
                    zero1 = _token_vector(kp_at + BLOCK + TILE).to(tl.float32)
                    x1 += q_sum[None, :] * _over_scores(zero1, R)
                else:
                    kp_at = k_params + at * (BLOCK // KEY_GROUP * 2 * D)
                    q_mat, init = _fold_keys(kp_at, q_plain, q_thread, GAIN, D, R, KW, KW0)
                    x0 = tl.dot(k0, q_mat, _from_zero(init, R))
                    if KEY_GROUP == 32:
                        q_mat, init = _fold_keys(kp_at + 2 * D, q_plain, q_thread, GAIN, D, R, KW, KW0)
                        x0 = tl.where((row < 32)[:, None], x0, tl.dot(k0, q_mat, _from_zero(init, R)))
                    if KEY_GROUP < 128:
                        kp1 = kp_at + BLOCK // KEY_GROUP * D
                        q_mat, init = _fold_keys(kp1, q_plain, q_thread, GAIN, D, R, KW, KW0)
                    x1 = tl.dot(k1, q_mat, _from_zero(init, R))
                    if KEY_GROUP == 32:
                        kp1 = kp_at + 6 * D
                        q_mat, init = _fold_keys(kp1, q_plain, q_thread, GAIN, D, R, KW, KW0)
                        x1 = tl.where((row < 32)[:, None], x1, tl.dot(k1, q_mat, _from_zero(init, R)))
                if ALIBI:
                    pos = block * BLOCK + row_token
                    x0 += slope[None, :] * (pos[:, None] - q_pos[None, :]).to(tl.float32)
                    x1 += slope[None, :] * (pos[:, None] + TILE - q_pos[None, :]).to(tl.float32)
                # ---- softmax
                top = tl.max(tl.maximum(x0, x1), 0)
                if Q > 1:  # the last block may lie beyond the line of the first queries
                    seen = q_line > block * BLOCK
                    top = tl.where(seen, top, LOWEST)
                m_new = tl.maximum(m_i, top)
                alpha = tl.exp2((m_i - m_new) * unit)
                shift = m_new * unit - P_SHIFT
                if Q > 1:
                    shift = tl.where(seen, shift, -MASKED)
                shift = shift[None, :]
                p0 = tl.exp2(x0 * unit - shift)
                p1 = tl.exp2(x1 * unit - shift)
                m_i = m_new
                pz = p0 * _over_scores(_token_vector(vp_at + BLOCK).to(tl.float32), R)
                pz += p1 * _over_scores(_token_vector(vp_at + BLOCK + TILE).to(tl.float32), R)
                l_g = l_g * alpha[None, :] + tl.sum(tl.reshape(p0 + p1, (8, 8, R)), 0)
                z_g = z_g * alpha[None, :] + tl.sum(tl.reshape(pz, (8, 8, R)), 0)
                # ---- output
                p0 = p0 * _over_scores(_token_vector(vp_at).to(tl.float32), R)
                p1 = p1 * _over_scores(_token_vector(vp_at + TILE).to(tl.float32), R)
                p0 = _probability_operand(p0.to(tl.float16), R, KW, EMULATE)
                p1 = _probability_operand(p1.to(tl.float16), R, KW, EMULATE)
                v0 = unpack(_words(vw_at, VECS), D // 16, 4, BITS, KW, EMULATE)
                acc = tl.dot(v0, p0, acc * alpha[None, :])
                v1 = unpack(_words(vw_at + VECS * 128, VECS), D // 16, 4, BITS, KW, EMULATE)
                acc = tl.dot(v1, p1, acc)
            l_i = tl.sum(l_g, 0)
            z_i = tl.sum(z_g, 0)
            norm = 1.0 / tl.maximum(l_i, 1e-30)
            out = (acc * (TWO_24 / GAIN) + z_i[None, :]) * norm[None, :]
            lse = tl.where(l_i > 0, m_i * unit - P_SHIFT + tl.log2(tl.maximum(l_i, 1e-30)), MASKED)
            out = tl.permute(tl.reshape(out, (D // 16, 2, 8, R)), (3, 2, 0, 1)).reshape(R, D)
            c1 = tl.arange(0, R)
            tl.store(part_lse + out_at * R + c1, lse)
            o_at = part_out + (out_at * R + c1[:, None]) * D + tl.arange(0, D)[None, :]
            tl.store(o_at, out)


@triton.jit
def combine_parts(
    part_out, part_lse, out_ptr, starts, counts, chunk, num_parts,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    D_STEP: tl.constexpr, X_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum_x 2**(lse_x - max) out_x / sum_x 2**(lse_x - max) for one query head and token."""
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C * Q + R - 1) // R
    col = tl.program_id(0) % (C * Q)
    head = tl.program_id(0) // (C * Q)
    d = tl.program_id(1) * D_STEP + tl.arange(0, D_STEP)
    b = tl.program_id(2)
    start = tl.load(starts + b)
    end = start + tl.load(counts + b)
    since = packed_line(start)
    parts = RING_PARTS + (packed_line(end - 1) // BLOCK + chunk - 1) // chunk
    first = ((b * G + head) * CHUNKS + col // R).to(tl.int64) * num_parts
    if PDL:
        tl.extra.cuda.gdc_wait()
    m_i = LOWEST
    l_i = 0.0
    acc = tl.zeros([D_STEP], tl.float32)
    for x0 in range(0, parts, X_STEP):
        x = x0 + tl.arange(0, X_STEP)
        live = tl.where(x < RING_PARTS, since + x * RING_STEP < end, x < parts)
        at = (first + x) * R + col % R
        lse = tl.load(part_lse + at, mask=live, other=MASKED)
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        alpha = tl.exp2(m_i - m_new)
        w = tl.exp2(lse - m_new)
        o = tl.load(part_out + at[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        l_i = l_i * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(o * w[:, None], 0)
        m_i = m_new
    out = acc / tl.maximum(l_i, 1e-30)
    out_at = ((b * Q + col // C) * H + head * C + col % C) * D
    tl.store(out_ptr + out_at + d, out.to(out_ptr.dtype.element_ty))
