"""Attention over the low-bit KV cache: one pass over packed tiles and 16-bit ring, then a combine.

    scores^T [64 tokens, R] = K [64, D] q^T [D, R]         K, V^T: packed words, unpacked in registers
    out^T    [D, R]        += V^T [D, 64] p [64, R]        (kv_formats.py draws them)

Keys and values are the left operand (16 rows a tile, always full); the R = 8 or 16 columns are the
query heads of one key-value head times the q_len new tokens, so GQA and a verify of several tokens
read each byte once. Scales never touch the unpacked elements: a channel's key scale folds into q, a
token's into p; zeros are one extra row of products (keys) and one sum (values). One warp a program,
no shared memory in the packed loop: words go from global memory to the operand's registers.

Cost per output: D * bits/4 + (scales) bytes of keys and values per token and key-value head,
0.63 integer instructions per 4-bit element, 1 mma.m16n8k16 per 256 elements.

Programs: (3 + splits, G * column chunks, B). The first 3 take 64-token tiles of the ring (16-bit), the
others `chunk` packed tiles each; each writes its normalised output and log2-sum-exp, `combine` merges.

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
RING_PARTS = tl.constexpr(-(-RING_TOKENS // 64))
P_SHIFT = tl.constexpr(6.0)
"""Probabilities are kept times 2**6: a plane divides them by up to 2**6, and fp16 ends at 2**-14."""
LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-3.0e30)
LOWEST = tl.constexpr(-1.0e30)
MOVMATRIX = tl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@triton.jit
def packed_line(position):
    """packed_end(position) of llmpq/kv_format.py."""
    return tl.maximum(position - HOLDBACK, 0) // BLOCK * BLOCK


@triton.jit
def _lane_vector(ptr, N: tl.constexpr, PER_T: tl.constexpr):
    """Load [N, 32 threads, 8] halves, 16 bytes a thread; a thread's run starts at t * PER_T."""
    row = tl.arange(0, N * 32)[:, None]  # two axes, or Triton would not give a row to each thread
    at = row % 4 * PER_T + row // 32 * 8 + tl.arange(0, 8)[None, :]
    return tl.reshape(tl.load(ptr + at), (N, 32, 8))


@triton.jit
def _token_vector(ptr):
    """Load a tile's 64 per-token halves: [32 threads, 8], thread 4g+t gets those of row g."""
    g = (tl.arange(0, 32) // 4)[:, None]
    return tl.load(ptr + g * 8 + tl.arange(0, 8)[None, :])


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
def _plane_factor(index, BITS: tl.constexpr):
    """2**-(BITS * plane) of an octet's index."""
    I: tl.constexpr = 8 // BITS
    return tl.exp2(-BITS * (index % I).to(tl.float32))


@triton.jit
def _words(ptr, V: tl.constexpr):
    """Load [V, 32, 4] words, 16 bytes a thread."""
    row = tl.arange(0, V * 32)[:, None]
    return tl.reshape(tl.load(ptr + row * 4 + tl.arange(0, 4)[None, :]), (V, 32, 4))


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
        since = packed_line(start) + part * TILE
        if since < end:
            # ---- 16-bit keys: two steps of 32 tokens, operands through Triton's own layouts; bf16
            # goes through fp16, whose three more bits keep the probabilities' error below 2**-11
            cols = first_col + tl.arange(0, R)
            q_pos = _column_positions(cols, start, end, C)
            q_line = packed_line(q_pos)
            d = tl.arange(0, D)
            q_at = ((b * Q + cols // C) * H + head * C + cols % C) * D
            q = tl.load(q_ptr + q_at[None, :] + d[:, None], mask=(cols < C * Q)[None, :], other=0.0)
            q = q.to(tl.float16)
            m_i = tl.full([R], LOWEST, tl.float32)
            l_i = tl.zeros([R], tl.float32)
            acc = tl.zeros([D, R], tl.float32)
            if ALIBI:
                slope = tl.load(slopes + head * C + cols % C) * LOG2_E
            ring_at = (slot * G + head) * RING * D
            for step in tl.range(0, TILE, 32, num_stages=1):
                pos = since + step + tl.arange(0, 32)
                live = pos < end
                at = ring_at + (pos % RING)[:, None] * D + d[None, :]
                k = tl.load(k_ring + at, mask=live[:, None], other=0.0)
                x = tl.dot(k.to(tl.float16), q) * score_scale
                if ALIBI:
                    x += slope[None, :] * (pos[:, None] - q_pos[None, :]).to(tl.float32)
                seen = (pos[:, None] >= q_line[None, :]) & (pos[:, None] <= q_pos[None, :])
                x = tl.where(seen & live[:, None], x, MASKED)
                m_new = tl.maximum(m_i, tl.max(x, 0))
                alpha = tl.exp2(m_i - m_new)
                p = tl.exp2(x - m_new[None, :])
                m_i = m_new
                l_i = l_i * alpha + tl.sum(p, 0)
                v = tl.load(v_ring + at, mask=live[:, None], other=0.0)
                acc = tl.dot(tl.trans(v.to(tl.float16)), p.to(tl.float16), acc * alpha[None, :])
            norm = 1.0 / tl.maximum(l_i, 1e-30)
            lse = tl.where(l_i > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), MASKED)
            c = tl.arange(0, R)
            tl.store(part_lse + out_at * R + c, lse)
            o_at = part_out + (out_at * R + c[None, :]) * D + d[:, None]
            tl.store(o_at, acc * norm[None, :])
    else:
        tile0 = (part - RING_PARTS) * chunk
        tile1 = tl.minimum(tile0 + chunk, line // TILE)
        if tile0 < tile1:
            NC: tl.constexpr = D // 32
            NB: tl.constexpr = R // 8
            OW: tl.constexpr = D * BITS // 64
            KV_VECS: tl.constexpr = D * BITS // 64
            # ---- queries by thread: column 8n + g, channels t*D/4 + 8c + j
            row = tl.arange(0, NB * NC * 32)[:, None]
            channel = row % 4 * (D // 4) + row // 32 % NC * 8 + tl.arange(0, 8)[None, :]
            q_col = first_col + row // (32 * NC) * 8 + row // 4 % 8
            q_at = ((b * Q + q_col // C) * H + head * C + q_col % C) * D
            q_raw = tl.load(q_ptr + q_at + channel, mask=q_col < C * Q, other=0.0)
            q_raw = tl.reshape(q_raw, (NB, NC, 32, 8))
            q_thread = q_raw.to(tl.float16)
            fold = _plane_factor((tl.arange(0, 8) // 2) % 4, BITS).to(tl.float16)
            q_fold = q_thread * fold[None, None, None, :]
            q_plain = _right_operand(q_thread, D, R, KW0)
            cols = first_col + tl.arange(0, R)
            q_pos = _column_positions(cols, start, end, C)
            q_line = packed_line(q_pos)
            if KEY_GROUP == 0:
                q_codes = _right_operand(q_fold, D, R, KW)
                ones = tl.full([16, D], 1.0, tl.float16)
                q_sum = tl.max(tl.dot(ones, q_plain), 0)
            if ALIBI:
                slope = tl.load(slopes + head * C + cols % C) * LOG2_E
            row = tl.arange(0, 64)
            row_token = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
            token_factor = _plane_factor(tl.arange(0, 8), BITS)

            m_i = tl.full([R], LOWEST, tl.float32)
            l_g = tl.zeros([8, R], tl.float32)
            z_g = tl.zeros([8, R], tl.float32)
            acc = tl.zeros([D, R], tl.float32)
            for tile in tl.range(tile0, tile1, num_stages=STAGES):
                block = tile // 2
                if PAGED:
                    page = tl.load(table + slot * table_width + block).to(tl.int64)
                else:
                    page = slot * table_width + block
                at = page * G + head
                half = tile % 2
                kw_at = k_words + at * (2 * KV_VECS * 128) + half * (KV_VECS * 128)
                vw_at = v_words + at * (2 * KV_VECS * 128) + half * (KV_VECS * 128)
                vp_at = v_params + at * (2 * BLOCK) + half * TILE
                # ---- scores
                if KEY_GROUP == 0:
                    kp_at = k_params + at * (2 * BLOCK) + half * TILE
                    k_mat = unpack(_words(kw_at, KV_VECS), 4, D // 16, BITS, KW, EMULATE)
                    scores = tl.dot(k_mat, q_codes) * TWO_24
                    k_scale = _over_scores(_token_vector(kp_at).to(tl.float32), R)
                    k_zero = _over_scores(_token_vector(kp_at + BLOCK).to(tl.float32), R)
                    scores = scores * k_scale + q_sum[None, :] * k_zero
                    x = scores * score_scale
                else:
                    PER_TILE: tl.constexpr = 64 // KEY_GROUP if KEY_GROUP < 64 else 1
                    ROWS: tl.constexpr = 64 // PER_TILE
                    kp_at = k_params + at * (BLOCK // KEY_GROUP * 2 * D)
                    kp_at += half * TILE // KEY_GROUP * (2 * D)
                    k_scale = _lane_vector(kp_at, NC, D // 4)
                    k_zero = _lane_vector(kp_at + D, NC, D // 4)
                    q_mat = _right_operand(q_fold * k_scale[None, :, :, :], D, R, KW)
                    init = tl.dot(_zero_rows(k_zero, D, KW0), q_plain) * (1.0 / TWO_24)
                    k_mat = unpack(_words(kw_at, KV_VECS // PER_TILE), ROWS // 16, D // 16, BITS, KW, EMULATE)
                    init = tl.broadcast_to(tl.reshape(init, (1, 16, R)), (ROWS // 16, 16, R))
                    scores = tl.dot(k_mat, q_mat, tl.reshape(init, (ROWS, R)))
                    if PER_TILE == 2:
                        k_scale = _lane_vector(kp_at + 2 * D, NC, D // 4)
                        k_zero = _lane_vector(kp_at + 3 * D, NC, D // 4)
                        q_mat = _right_operand(q_fold * k_scale[None, :, :, :], D, R, KW)
                        init = tl.dot(_zero_rows(k_zero, D, KW0), q_plain) * (1.0 / TWO_24)
                        kw2 = kw_at + KV_VECS // PER_TILE * 128
                        k_mat = unpack(_words(kw2, KV_VECS // PER_TILE), ROWS // 16, D // 16, BITS, KW, EMULATE)
                        init = tl.broadcast_to(tl.reshape(init, (1, 16, R)), (ROWS // 16, 16, R))
                        more = tl.dot(k_mat, q_mat, tl.reshape(init, (ROWS, R)))
                        scores = tl.permute(tl.join(scores, more), (2, 0, 1)).reshape(64, R)
                    x = scores * (score_scale * TWO_24)
                if ALIBI:
                    pos = tile * TILE + row_token
                    x += slope[None, :] * (pos[:, None] - q_pos[None, :]).to(tl.float32)
                if Q > 1:
                    x += tl.where(block * BLOCK < q_line, 0.0, MASKED)[None, :]
                # ---- softmax, with probabilities kept times 2**P_SHIFT
                m_new = tl.maximum(m_i, tl.max(x, 0))
                alpha = tl.exp2(m_i - m_new)
                p = tl.exp2(x - (m_new - P_SHIFT)[None, :])
                m_i = m_new
                v_scale = _token_vector(vp_at).to(tl.float32) * token_factor[None, :]
                v_zero = _token_vector(vp_at + BLOCK).to(tl.float32)
                pz = p * _over_scores(v_zero, R)
                l_g = l_g * alpha[None, :] + tl.sum(tl.reshape(p, (8, 8, R)), 0)
                z_g = z_g * alpha[None, :] + tl.sum(tl.reshape(pz, (8, 8, R)), 0)
                # ---- output
                pv = (p * _over_scores(v_scale, R)).to(tl.float16)
                p_mat = _probability_operand(pv, R, KW, EMULATE)
                v_mat = unpack(_words(vw_at, KV_VECS), D // 16, 4, BITS, KW, EMULATE)
                acc = tl.dot(v_mat, p_mat, acc * alpha[None, :])
            l_i = tl.sum(l_g, 0)
            z_i = tl.sum(z_g, 0)
            norm = 1.0 / tl.maximum(l_i, 1e-30)
            out = (acc * TWO_24 + z_i[None, :]) * norm[None, :]
            lse = tl.where(l_i > 0, m_i - P_SHIFT + tl.log2(tl.maximum(l_i, 1e-30)), MASKED)
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
    tiles = packed_line(end - 1) // TILE
    parts = tl.where(tiles > 0, RING_PARTS + (tiles + chunk - 1) // chunk, RING_PARTS)
    first = ((b * G + head) * CHUNKS + col // R).to(tl.int64) * num_parts
    if PDL:
        tl.extra.cuda.gdc_wait()
    m_i = LOWEST
    l_i = 0.0
    acc = tl.zeros([D_STEP], tl.float32)
    for x0 in range(0, parts, X_STEP):
        x = x0 + tl.arange(0, X_STEP)
        live = tl.where(x < RING_PARTS, since + x * TILE < end, x < parts)
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
