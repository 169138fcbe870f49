"""One new token a request over an unquantised KV cache: rotation, append and attention at once.

    q [R, D] = rotated query heads of one key/value head, R = 16 rows
    new token    k rotated, written to the cache with v; its score starts the running softmax
    older tokens scores [R, N] = q K^T in halves of D, out [R, D] += p [R, N] V [N, D]

    programs: (splits, G, B), as in plain_attend.py, whose `combine_kernel` merges the parts; the
    first of a request's programs takes the new token, so nobody reads what another one writes.

Cost: that of plain_attend.py; q, k and v are read once more instead of written and read by a
kernel of their own (H200, decode of 32 rows: one launch and 2 us a layer less).

B requests, H query heads, G key/value heads, D head_dim, S slots, T slot length.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.fused_rope import rope_append_reference, tokens_of
from llmpq.kernels.overlap import overlaps
from llmpq.kernels.plain_attend import (
    LOG2_E,
    choose_splits,
    combine_kernel,
    plain_attend_reference,
    sm_count,
)

ROWS = 16
"""Query heads of a key/value head at most."""


@triton.jit
def rope_attend_kernel(
    q_ptr, k_ptr, v_ptr, k_cache, v_cache, slots, starts, inv_freq, out_ptr, part_ptr, lse_ptr,
    score_scale, q_stride, k_stride, v_stride, slot_stride, head_stride, token_stride, splits,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one request's one key/value head; `*_stride` between tokens of an input."""
    C: tl.constexpr = H // G
    HALF: tl.constexpr = D // 2
    split, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half, d = tl.arange(0, HALF), tl.arange(0, D)
    frequency = tl.load(inv_freq + half)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts + b).to(tl.int32)
    slot = tl.load(slots + b).to(tl.int64)
    base = slot * slot_stride + group * head_stride

    # ---- rotate the query heads (rows past C are zero) and the new key
    angle = start.to(tl.float32) * frequency
    cos, sin = tl.cos(angle), tl.sin(angle)
    c = tl.arange(0, R)
    used = (c < C)[:, None]
    q_at = q_ptr + b.to(tl.int64) * q_stride + ((group * C + c) * D)[:, None] + half[None, :]
    a = tl.load(q_at, mask=used, other=0.0).to(tl.float32)
    e = tl.load(q_at + HALF, mask=used, other=0.0).to(tl.float32)
    q_low = (a * cos[None, :] - e * sin[None, :]).to(q_ptr.dtype.element_ty)
    q_high = (e * cos[None, :] + a * sin[None, :]).to(q_ptr.dtype.element_ty)
    k_at = k_ptr + b.to(tl.int64) * k_stride + group * D + half
    a, e = tl.load(k_at).to(tl.float32), tl.load(k_at + HALF).to(tl.float32)
    k_low = (a * cos - e * sin).to(k_ptr.dtype.element_ty)
    k_high = (e * cos + a * sin).to(k_ptr.dtype.element_ty)
    v_new = tl.load(v_ptr + b.to(tl.int64) * v_stride + group * D + d)

    # ---- the new token: written, and the start of the running softmax, by the first part
    mine = split == 0
    place = base + start.to(tl.int64) * token_stride
    written = half < tl.where(mine, HALF, 0)
    tl.store(k_cache + place + half, k_low, mask=written)
    tl.store(k_cache + place + HALF + half, k_high, mask=written)
    tl.store(v_cache + place + d, v_new, mask=d < tl.where(mine, D, 0))
    score = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)[None, :], 1)
    score += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32)[None, :], 1)
    m_i = tl.where(mine, score * score_scale, -1.0e30)
    l_i = tl.where(mine, 1.0, 0.0) + tl.zeros([R], tl.float32)
    acc = tl.where(mine, v_new.to(tl.float32), 0.0)[None, :] + tl.zeros([R, D], tl.float32)

    # ---- this part's older tokens: whole tiles, as even as the request's length allows
    share = (tl.cdiv(start, N) + splits - 1) // splits
    first = split * share * N
    for t0 in tl.range(first, tl.minimum(start, first + share * N), N, num_stages=STAGES):
        t = t0 + tl.arange(0, N)
        live = (t < start)[:, None]
        at = base + t[:, None].to(tl.int64) * token_stride
        low = tl.load(k_cache + at + half[None, :], mask=live, other=0.0)
        high = tl.load(k_cache + at + HALF + half[None, :], mask=live, other=0.0)
        v = tl.load(v_cache + at + d[None, :], mask=live, other=0.0)
        x = tl.dot(q_low, tl.trans(low), input_precision="ieee")
        x = tl.dot(q_high, tl.trans(high), x, input_precision="ieee") * score_scale
        x = tl.where(t[None, :] < start, x, -1.0e30)
        m_new = tl.maximum(m_i, tl.max(x, 1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.where(t[None, :] < start, tl.exp2(x - m_new[:, None]), 0.0)
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    out = acc / tl.maximum(l_i, 1e-30)[:, None]
    if SPLIT:
        at = ((b * G + group) * splits + split).to(tl.int64) * R
        lse = tl.where(l_i > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), -1.0e30)
        tl.store(lse_ptr + at + c, lse)
        tl.store(part_ptr + (at + c)[:, None] * D + d[None, :], out, mask=used)
    else:
        at = out_ptr + (b.to(tl.int64) * H + group * C + c)[:, None] * D + d[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=used)


def fits(q_BQHD: Tensor, k_cache_SGTD: Tensor) -> bool:
    """Return whether the kernel takes a step: one new token, few heads of a power of two."""
    _, q_len, heads, dim = q_BQHD.shape
    even = 32 <= dim <= 256 and dim & (dim - 1) == 0
    return q_len == 1 and even and heads // k_cache_SGTD.shape[1] <= ROWS


def rope_attend(
    q_BQHD: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    k_cache_SGTD: Tensor,
    v_cache_SGTD: Tensor,
    slots_B: Tensor,
    start_B: Tensor,
    inv_freq: Tensor,
    *,
    max_end: int,
    scale: float,
    splits: int | None = None,
) -> Tensor:
    """Return o [B, 1, H, D] of one new token a request; its key and value join the cache.

    `max_end` bounds every request's length; it only decides the number of programs.
    """
    if not fits(q_BQHD, k_cache_SGTD) or k_cache_SGTD.stride() != v_cache_SGTD.stride():
        raise ValueError(
            f"rope_attend: got q {tuple(q_BQHD.shape)} and a cache {tuple(k_cache_SGTD.shape)}, "
            f"expected one new token, D a power of 2 and H / G <= {ROWS}; see plain_attend"
        )
    batch, _, heads, dim = q_BQHD.shape
    groups, device = k_cache_SGTD.shape[1], q_BQHD.device
    wide = q_BQHD.dtype == torch.float32
    tile = 32 if wide or dim > 128 else 64
    if splits is None:
        splits = choose_splits(batch * groups, max_end, tile, sm_count(device))
    rows = batch * groups * splits * ROWS if splits > 1 else 1
    out = q_BQHD.new_empty(batch, 1, heads, dim)
    part = q_BQHD.new_empty(rows * dim, dtype=torch.float32)
    lse = q_BQHD.new_empty(rows, dtype=torch.float32)
    (q, q_stride), (k, k_stride), (v, v_stride) = map(tokens_of, (q_BQHD, k_BQGD, v_BQGD))
    pdl = overlaps(device)
    shape = {"H": heads, "G": groups, "D": dim, "R": ROWS, "PDL": pdl, "launch_pdl": pdl}
    rope_attend_kernel[(splits, groups, batch)](
        *(q, k, v, k_cache_SGTD, v_cache_SGTD, slots_B, start_B, inv_freq, out, part, lse),
        scale * LOG2_E,
        *(q_stride, k_stride, v_stride, *k_cache_SGTD.stride()[:3]),
        splits,
        **shape,
        N=tile,
        SPLIT=splits > 1,
        STAGES=2 if wide else 3,
        num_warps=4,
    )
    if splits > 1:
        power = triton.next_power_of_2(splits)
        combine_kernel[(heads, batch)](
            part, lse, out, splits, **shape, Q=1, PADDED=dim, X=power, num_warps=2
        )
    return out


def rope_attend_reference(
    q_BQHD: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    k_cache_SGTD: Tensor,
    v_cache_SGTD: Tensor,
    slots_B: Tensor,
    start_B: Tensor,
    inv_freq: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The twin: the twins of its two halves, one after the other."""
    rows = (slots_B, start_B, torch.ones_like(start_B))
    caches = (k_cache_SGTD, v_cache_SGTD)
    q = rope_append_reference(q_BQHD, k_BQGD, v_BQGD, *caches, *rows, inv_freq)
    return plain_attend_reference(q, *caches, *rows, scale=scale)
