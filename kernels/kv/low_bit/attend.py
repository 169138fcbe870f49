"""Attention over the low-bit KV cache: one pass over packed tiles and 16-bit ring, then a combine.

    scores^T [64 tokens, R] = K [64, D] q^T [D, R]        K, V^T: packed words, unpacked in
    out^T    [D, R]        += V^T [D, 64] p [64, R]       registers (formats/kv_block.py draws them)

Keys and values are the left operand (16 rows a tile, always full); the R = 8 or 16 columns are the
query heads of one key-value head times the q_len new tokens, so GQA and a verify of several tokens
read each byte once. Scales never touch the unpacked elements: a channel's key scale folds into q, a
token's into p; zeros are one extra row of products (keys) and one sum (values). One warp a program:
words arrive in shared memory by asynchronous copies, STAGES deep, and go to the operand's registers
in 16-byte loads (straight loads were latency bound: ncu, H200, 20 % of issue slots used). GAIN:
stored scales make up for a plane's power of two (kv_block.py), sums are GAIN times too large.

Cost per output: D * bits/4 + (scales) bytes of keys and values per token and key-value head,
0.63 integer instructions per 4-bit element, 1 mma.m16n8k16 per 256 elements.

Programs: (G * column chunks, B, splits + RING_PARTS). The last 1 or 5 share the 16-bit ring, 32
tokens a step; the others take equal shares of the packed tiles, TILES at a step, or (DYNAMIC) are
dealt `first` tiles and draw `chunk` more from a counter until none is left. Each writes its
normalised output and log2-sum-exp, combine.py merges. Kernels launch early (PDL): before it
waits for the one in front, a program asks the L2 for its first `ahead` tiles.

B: requests.  Q: new tokens.  H: query heads.  G: key-value heads.  D: head_dim.  X: parts.
g, t, h, r, m, s: see formats/kv_block.py; thread 4g + t of the warp.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.register_operands import (
    by_thread,
    fold_keys,
    from_zero,
    over_scores,
    prefetch_ring,
    prefetch_tiles,
    probability_operand,
    right_operand,
    token_vector,
    words,
    zero_by_thread,
)
from llmpq.kernels.kv.low_bit.ring_attend import (
    BLOCK,
    LOG2_E,
    LOWEST,
    MASKED,
    RING,
    RING_STEP,
    attend_ring,
    capped,
    column_positions,
    packed_line,
)
from llmpq.kernels.kv.low_bit.unpack import TWO_24, unpack

TILE = tl.constexpr(64)
P_SHIFT = tl.constexpr(4.0)
"""Probabilities are kept times 2**4: fp16 keeps its precision down to 2**-14."""


@triton.jit
def score_unit(unit, CAPPED: tl.constexpr):
    """What makes an exponent of 2 of what `_tiles` calls a score."""
    return 1.0 if CAPPED else unit


@triton.jit
def first_step(position, window, STEP: tl.constexpr, WINDOWED: tl.constexpr):
    """The first step of STEP tokens with a key that the query at a position sees."""
    return tl.maximum(position - window + 1, 0) // STEP if WINDOWED else 0


@triton.jit
def _tiles(
    step0, step1, m_i, l_g, z_g, acc, k_words, k_params, v_words, v_params, table, slot,
    table_width, head, q_plain, q_thread, q_codes, q_sum, q_pos, q_line, slope, unit, cap, window,
    G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr, R: tl.constexpr, PAGED: tl.constexpr, ALIBI: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, KW: tl.constexpr, KW0: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    """Steps step0..step1-1 of TILES packed tiles; m_i, l_g, z_g, acc: the softmax so far.

    `unit` makes scores exponents of 2; those under a cap are so already (`score_unit`).
    """
    APART: tl.constexpr = KEY_GROUP > 32 and not CAPPED  # a group's zero joins the exponents
    score = unit
    unit = score_unit(unit, CAPPED)
    VECS: tl.constexpr = D * BITS // 64  # 16-byte loads a thread needs for a tile
    GAIN: tl.constexpr = 2 ** (8 - BITS)
    row = tl.arange(0, 64)
    row_token = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    for step in tl.range(step0, step1, num_stages=STAGES):
        tile = step * TILES
        block = tile // 2
        half = tile % 2
        if PAGED:
            page = tl.load(table + slot * table_width + block).to(tl.int64)
        else:
            page = slot * table_width + block
        at = page * G + head
        kw_at = k_words + at * (2 * VECS * 128) + half * (VECS * 128)
        vw_at = v_words + at * (2 * VECS * 128) + half * (VECS * 128)
        vp_at = v_params + at * (2 * BLOCK) + half * TILE
        # ---- scores of one or two tiles
        k0 = unpack(words(kw_at, VECS), 4, D // 16, BITS, KW, EMULATE)
        if TILES == 2:
            k1 = unpack(words(kw_at + VECS * 128, VECS), 4, D // 16, BITS, KW, EMULATE)
        if KEY_GROUP == 0:
            kp_at = k_params + at * (2 * BLOCK) + half * TILE
            x0 = tl.dot(k0, q_codes) * TWO_24
            x0 = x0 * over_scores(token_vector(kp_at).to(tl.float32), R)
            x0 += q_sum[None, :] * over_scores(token_vector(kp_at + BLOCK).to(tl.float32), R)
            if TILES == 2:
                x1 = tl.dot(k1, q_codes) * TWO_24
                x1 = x1 * over_scores(token_vector(kp_at + TILE).to(tl.float32), R)
                zero1 = token_vector(kp_at + BLOCK + TILE).to(tl.float32)
                x1 += q_sum[None, :] * over_scores(zero1, R)
        else:
            kp_at = k_params + at * (BLOCK // KEY_GROUP * 2 * D)
            kp_at += half * (TILE // KEY_GROUP * 2 * D)
            q_mat, init = fold_keys(kp_at, q_plain, q_thread, GAIN, D, R, KW, KW0)
            if KEY_GROUP > 32:
                x0 = tl.dot(k0, q_mat)
                init0 = init
            else:
                x0 = tl.dot(k0, q_mat, from_zero(init, R))
                q_mat, init = fold_keys(kp_at + 2 * D, q_plain, q_thread, GAIN, D, R, KW, KW0)
                x0 = tl.where((row < 32)[:, None], x0, tl.dot(k0, q_mat, from_zero(init, R)))
            if TILES == 2:
                if KEY_GROUP < 128:
                    kp1 = kp_at + BLOCK // KEY_GROUP * D
                    q_mat, init = fold_keys(kp1, q_plain, q_thread, GAIN, D, R, KW, KW0)
                if KEY_GROUP > 32:
                    x1 = tl.dot(k1, q_mat)
                else:
                    x1 = tl.dot(k1, q_mat, from_zero(init, R))
                    kp1 = kp_at + 6 * D
                    q_mat, init = fold_keys(kp1, q_plain, q_thread, GAIN, D, R, KW, KW0)
                    x1 = tl.where((row < 32)[:, None], x1, tl.dot(k1, q_mat, from_zero(init, R)))
        if ALIBI:
            pos = tile * TILE + row_token
            x0 += slope[None, :] * (pos[:, None] - q_pos[None, :]).to(tl.float32)
            if TILES == 2:
                x1 += slope[None, :] * (pos[:, None] + TILE - q_pos[None, :]).to(tl.float32)
        if CAPPED:
            if KEY_GROUP > 32:
                x0 += from_zero(init0, R)
            x0 = capped(x0 * score, cap)
            if TILES == 2:
                if KEY_GROUP > 32:
                    x1 += from_zero(init, R)
                x1 = capped(x1 * score, cap)
        if WINDOWED:
            hidden = q_pos[None, :] - window - tile * TILE
            x0 = tl.where(row_token[:, None] > hidden, x0, MASKED)
            if TILES == 2:
                x1 = tl.where(row_token[:, None] + TILE > hidden, x1, MASKED)
        # ---- softmax
        # a group's zero has one score a column: it joins the largest and the shift
        if APART:
            top_g = by_thread(x0, R) + zero_by_thread(init0, R)
            if TILES == 2:
                top_g = tl.maximum(top_g, by_thread(x1, R) + zero_by_thread(init, R))
        else:
            top_g = by_thread(tl.maximum(x0, x1) if TILES == 2 else x0, R)
        top = tl.max(top_g, 0)
        if Q > 1:  # the last block may lie beyond the line of the first queries
            seen = q_line > block * BLOCK
            top = tl.where(seen, top, LOWEST)
        m_new = tl.maximum(m_i, top)
        alpha = tl.exp2((m_i - m_new) * unit)
        shift = m_new * unit - P_SHIFT
        if Q > 1:
            shift = tl.where(seen, shift, -MASKED)
        m_i = m_new
        if APART:
            p0 = tl.exp2(x0 * unit + from_zero(init0 * unit - shift[None, :], R))
        else:
            p0 = tl.exp2(x0 * unit - shift[None, :])
        pz = p0 * over_scores(token_vector(vp_at + BLOCK).to(tl.float32), R)
        p_all = p0
        if TILES == 2:
            if APART:
                p1 = tl.exp2(x1 * unit + from_zero(init * unit - shift[None, :], R))
            else:
                p1 = tl.exp2(x1 * unit - shift[None, :])
            pz += p1 * over_scores(token_vector(vp_at + BLOCK + TILE).to(tl.float32), R)
            p_all += p1
        l_g = l_g * alpha[None, :] + tl.sum(tl.reshape(p_all, (8, 8, R)), 0)
        z_g = z_g * alpha[None, :] + tl.sum(tl.reshape(pz, (8, 8, R)), 0)
        # ---- output
        p0 = p0 * over_scores(token_vector(vp_at).to(tl.float32), R)
        p0_mat = probability_operand(p0.to(tl.float16), R, KW, EMULATE)
        v0 = unpack(words(vw_at, VECS), D // 16, 4, BITS, KW, EMULATE)
        acc = tl.dot(v0, p0_mat, acc * alpha[None, :])
        if TILES == 2:
            p1 = p1 * over_scores(token_vector(vp_at + TILE).to(tl.float32), R)
            p1_mat = probability_operand(p1.to(tl.float16), R, KW, EMULATE)
            v1 = unpack(words(vw_at + VECS * 128, VECS), D // 16, 4, BITS, KW, EMULATE)
            acc = tl.dot(v1, p1_mat, acc)
    return m_i, l_g, z_g, acc


@triton.jit(
    do_not_specialize=["chunk", "first", "table_width", "num_parts", "ahead", "cap", "window"]
)
def attend_split(
    q_ptr, k_words, k_params, v_words, v_params, k_ring, v_ring, table, slots, starts, counts,
    slopes, tickets, part_out, part_lse, score_scale, chunk, first, table_width, num_parts,
    ahead, cap, window,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr, R: tl.constexpr, PAGED: tl.constexpr, ALIBI: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, RING_PARTS: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, DYNAMIC: tl.constexpr, KW: tl.constexpr, KW0: tl.constexpr,
    PDL: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """One part of one request's one key-value head: see the file's docstring."""
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C * Q + R - 1) // R
    head = tl.program_id(0) // CHUNKS
    first_col = tl.program_id(0) % CHUNKS * R
    b = tl.program_id(1)
    part = tl.program_id(2)
    start = tl.load(starts + b)
    end = start + tl.load(counts + b)
    slot = tl.load(slots + b).to(tl.int64)
    line = packed_line(end - 1)
    programs = num_parts - RING_PARTS  # those of the ring come last
    share = part
    ring_part = part - programs
    hidden = first_step(start, window, TILE * TILES, WINDOWED)
    steps_all = tl.maximum(line // (TILE * TILES) - hidden, 0)
    dealers = tl.minimum(programs, steps_all)  # a request shorter than planned is spread as wide
    dealt, shares = steps_all, dealers
    if DYNAMIC:
        # one step at least: the combine reads the first `dealers` programs of a short request alone
        dealt = tl.minimum(programs * tl.maximum(first // TILES, 1), steps_all)
        shares = programs + (steps_all - dealt + chunk // TILES - 1) // (chunk // TILES)
    step0 = hidden + dealt * tl.minimum(share, dealers) // tl.maximum(dealers, 1)
    step1 = hidden + dealt * tl.minimum(share + 1, dealers) // tl.maximum(dealers, 1)
    STEPS: tl.constexpr = RING // RING_STEP // RING_PARTS
    since = packed_line(start) + ring_part * (STEPS * RING_STEP)
    ring_at = (slot * G + head) * (RING * D)
    if PDL:
        # Blocks that the step before this kernel's completes may be packed now: asking the L2 for
        # them is harmless. Where they are (starts, counts, slots, table) is older than that step.
        if ahead > 0:
            if ring_part >= 0:
                prefetch_ring(
                    k_ring + ring_at, v_ring + ring_at, since,
                    tl.minimum(end, since + STEPS * RING_STEP), RING, RING_STEP, D,
                )  # fmt: skip
            elif share < shares:
                prefetch_tiles(
                    k_words, k_params, v_words, v_params, table, slot, table_width, head,
                    step0 * TILES, tl.minimum(step0 * TILES + ahead, step1 * TILES), G, D, BITS,
                    KEY_GROUP, PAGED,
                )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_of_all = b * G * CHUNKS + tl.program_id(0)
    out_at = (row_of_all * num_parts + part).to(tl.int64)
    c = tl.arange(0, R)
    used = first_col + c < C * Q

    if ring_part >= 0:
        if since < end:
            steps = tl.minimum(STEPS, (end - since + RING_STEP - 1) // RING_STEP)
            out, lse = attend_ring(
                q_ptr, k_ring, v_ring, slopes, since, steps, start, end,
                ring_at, b, head, first_col, score_scale, cap, window, H, G, Q, D, R, ALIBI,
                CAPPED, WINDOWED,
            )  # fmt: skip
            tl.store(part_lse + out_at * R + c, lse, mask=used)
            o_at = part_out + (out_at * R + c[None, :]) * D + tl.arange(0, D)[:, None]
            tl.store(o_at, out, mask=used[None, :])
    else:
        # equal shares, TILES tiles a step: of all tiles, or (DYNAMIC) of the `first` ones
        lane = tl.arange(0, 32)
        if DYNAMIC:  # drawn early, looked at late: a program never waits for its next share
            to_draw = tickets + row_of_all + lane * 0
            draw = tl.atomic_add(to_draw, 1, mask=lane < 1, sem="relaxed")
            if share >= dealers:
                share = programs + tl.sum(tl.where(lane == 0, draw, 0), 0)
        if share < shares:
            NC: tl.constexpr = D // 32
            NB: tl.constexpr = R // 8
            GAIN: tl.constexpr = 2 ** (8 - BITS)
            # ---- queries by thread: column 8n + g, channels t*D/4 + 8c + j
            row = tl.arange(0, NB * NC * 32)[:, None]
            channel = row % 4 * (D // 4) + row // 32 % NC * 8 + tl.arange(0, 8)[None, :]
            q_col = first_col + row // (32 * NC) * 8 + row // 4 % 8
            q_at = ((b * Q + q_col // C) * H + head * C + q_col % C) * D
            q_raw = tl.load(q_ptr + q_at + channel, mask=q_col < C * Q, other=0.0)
            q_thread = tl.reshape(q_raw, (NB, NC, 32, 8)).to(tl.float16)
            cols = first_col + c
            q_pos = column_positions(cols, start, end, C)
            q_line = packed_line(q_pos)
            q_plain = right_operand(q_thread, D, R, KW0)
            if KEY_GROUP == 0:
                plane = (tl.arange(0, 8) // 2) % (8 // BITS)
                fold = tl.exp2(-BITS * plane.to(tl.float32)).to(tl.float16)
                q_codes = right_operand(q_thread * fold[None, None, None, :], D, R, KW)
                q_sum = tl.max(tl.dot(tl.full([16, D], 1.0, tl.float16), q_plain), 0)
            else:
                q_codes, q_sum = 0, 0
            # scores stay in the product's units, and become exponents of 2 in the exponential
            unit = score_scale if KEY_GROUP == 0 else score_scale * (TWO_24 / GAIN)
            if ALIBI:
                slope = tl.load(slopes + head * C + cols % C, mask=used, other=0.0) * LOG2_E / unit
            else:
                slope = 0
            m_i = tl.full([R], LOWEST, tl.float32)
            l_g = tl.zeros([8, R], tl.float32)
            z_g = tl.zeros([8, R], tl.float32)
            acc = tl.zeros([D, R], tl.float32)
            if not DYNAMIC:
                m_i, l_g, z_g, acc = _tiles(
                    step0, step1, m_i, l_g, z_g, acc, k_words, k_params, v_words, v_params, table,
                    slot, table_width, head, q_plain, q_thread, q_codes, q_sum, q_pos, q_line,
                    slope, unit, cap, window, G, Q, D, BITS, KEY_GROUP, R, PAGED, ALIBI, CAPPED,
                    WINDOWED, TILES, STAGES, KW, KW0, EMULATE,
                )  # fmt: skip
            else:
                while share < shares:
                    m_i, l_g, z_g, acc = _tiles(
                        step0, step1, m_i, l_g, z_g, acc, k_words, k_params, v_words, v_params,
                        table, slot, table_width, head, q_plain, q_thread, q_codes, q_sum, q_pos,
                        q_line, slope, unit, cap, window, G, Q, D, BITS, KEY_GROUP, R, PAGED, ALIBI,
                        CAPPED, WINDOWED, TILES, STAGES, KW, KW0, EMULATE,
                    )  # fmt: skip
                    share = programs + tl.sum(tl.where(lane == 0, draw, 0), 0)
                    step0 = hidden + dealt + (share - programs) * (chunk // TILES)
                    step1 = tl.minimum(step0 + chunk // TILES, hidden + steps_all)
                    left = tl.where(share < shares, 1, 0)
                    draw = tl.atomic_add(to_draw, 1, mask=lane < left, sem="relaxed")
            l_i = tl.sum(l_g, 0)
            z_i = tl.sum(z_g, 0)
            norm = 1.0 / tl.maximum(l_i, 1e-30)
            out = (acc * (TWO_24 / GAIN) + z_i[None, :]) * norm[None, :]
            top = m_i * score_unit(unit, CAPPED) - P_SHIFT
            lse = tl.where(l_i > 0, top + tl.log2(tl.maximum(l_i, 1e-30)), MASKED)
            out = tl.permute(tl.reshape(out, (D // 16, 2, 8, R)), (3, 2, 0, 1)).reshape(R, D)
            tl.store(part_lse + out_at * R + c, lse, mask=used)
            o_at = part_out + (out_at * R + c[:, None]) * D + tl.arange(0, D)[None, :]
            tl.store(o_at, out, mask=used[:, None])
        # each program draws until it finds nothing: the last one leaves the counter at 0
        if DYNAMIC and share == programs + shares - 1:
            tl.store(tickets + row_of_all, 0)
