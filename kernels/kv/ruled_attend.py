"""Attention over an unquantised KV cache by a `ScoreRule`: windows, soft caps, sinks, latents.

    rows of a key/value head: its C = H / G query heads times the step's new tokens, R a program
        row c is head c % C, new token c // C; it sees keys p - window < t <= p of its position p
    scores [R, N] = q [R, D] K^T [D, N]      cap tanh(score / cap) where there is a cap
    out    [R, V] += p [R, N] V [N, V]       V <= D channels; latents (MLA) are their own values
    a sink is one more score of every row, of a key without a value: it starts the sums

D is cut in two, a power of two and the rest: 576 = 512 + 64, 96 = 64 + 32, 80 = 64 + 16.

    programs: (splits, G * row chunks, B); a program takes 1 / splits of the keys that its rows see
    Decode steps split (lengths are read on the device, so that one captured step serves all);
    prompts have programs enough. `combine` of plain_attend.py merges the splits.

Cost per output: 2 D elements of the cache per key seen, D where values are keys, read once per R
rows. Keys outside the window are not read.

B requests, Q new tokens, H query heads, G key/value heads, D head_dim, S slots, T slot length.
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

from llmpq.kernels.kv.launch_plan import shared_memory
from llmpq.kernels.kv.plain_attend import (
    MAX_Q_LEN,
    PROGRAMS_PER_SM,
    choose_splits,
    merge_splits,
)
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.overlap import overlaps

BESIDE = 8192
"""Bytes of shared memory that a program takes beside its tiles, at most."""


@triton.jit
def _tile(pointer, at, live, dims, D: tl.constexpr):
    """Load channels `dims` of some keys [N, len(dims)]."""
    inside = live[:, None] & (dims < D)[None, :]
    return tl.load(pointer + at[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
def ruled_attend_kernel(
    q_ptr, k_ptr, v_ptr, slots, starts, counts, sinks, out_ptr, part_ptr, lse_ptr,
    scale, cap, window, slot_stride, head_stride, token_stride, Q, chunks, splits,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, LATENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of some rows of one request's one key/value head."""
    C: tl.constexpr = H // G
    WIDE: tl.constexpr = V > MAIN
    split = tl.program_id(0)
    group = tl.program_id(1) // chunks
    chunk = tl.program_id(1) % chunks
    b = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts + b).to(tl.int32)
    count = tl.load(counts + b).to(tl.int32)
    slot = tl.load(slots + b).to(tl.int64)

    # ---- queries
    c = chunk * R + tl.arange(0, R)
    used = c < C * Q
    position = start + tl.minimum(c // C, count - 1)
    head = group * C + c % C
    d = tl.arange(0, MAIN)
    row = (b * Q + c // C).to(tl.int64) * H + head
    q = tl.load(
        q_ptr + row[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0
    )
    if REST > 0:
        e = MAIN + tl.arange(0, REST)
        q_rest = tl.load(
            q_ptr + row[:, None] * D + e[None, :], mask=used[:, None] & (e < D)[None, :], other=0.0
        )

    # ---- the keys that some row sees; this part's share of them in whole tiles
    low = start + tl.minimum((chunk * R) // C, count - 1)
    high = start + tl.minimum((chunk * R + R - 1) // C, count - 1)
    begin = tl.where(window > 0, tl.maximum(low - window + 1, 0), 0) // N * N
    end = tl.where((chunk * R) // C < count, high + 1, begin)  # padding alone sees nothing
    share = ((end - begin + N - 1) // N + splits - 1) // splits * N
    first = begin + split * share
    last = tl.minimum(end, first + share)
    reach = tl.where(window > 0, window, 2147483647)

    m_i = tl.full([R], -1.0e30, tl.float32)
    l_i = tl.zeros([R], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        m_i = tl.where(split == 0, sink, m_i)
        l_i = tl.where(split == 0, 1.0, l_i)
    acc = tl.zeros([R, MAIN], tl.float32)
    if WIDE:
        acc_rest = tl.zeros([R, REST], tl.float32)
    base = slot * slot_stride + group * head_stride
    for t0 in tl.range(first, last, N, num_stages=STAGES):
        t = t0 + tl.arange(0, N)
        live = t < end
        at = base + t.to(tl.int64) * token_stride
        k = _tile(k_ptr, at, live, d, D)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _tile(k_ptr, at, live, e, D)
            x = tl.dot(q_rest, tl.trans(k_rest), x, input_precision="ieee")
        x *= scale
        if CAPPED:  # tanh(y) = 1 - 2 / (e^2y + 1)
            x = cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))
        x *= 1.4426950408889634
        ahead = position[:, None] - t[None, :]
        seen = (ahead >= 0) & (ahead < reach)
        x = tl.where(seen, x, -1.0e30)
        m_new = tl.maximum(m_i, tl.max(x, 1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.where(seen, tl.exp2(x - m_new[:, None]), 0.0)
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 1)
        v = k if LATENT else _tile(v_ptr, at, live, d, D)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        if WIDE:
            v_rest = _tile(v_ptr, at, live, e, D)
            acc_rest = tl.dot(
                p.to(v.dtype), v_rest, acc_rest * alpha[:, None], input_precision="ieee"
            )

    # ---- results
    whole = tl.maximum(l_i, 1e-30)[:, None]
    if SPLIT:
        r = ((b * G * chunks + tl.program_id(1)) * splits + split).to(tl.int64) * R + tl.arange(
            0, R
        )
        lse = tl.where(l_i > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), -1.0e30)
        tl.store(lse_ptr + r, lse)
        out_at, out = part_ptr + r[:, None] * PADDED, part_ptr
    else:
        out_at, out = out_ptr + row[:, None] * V, out_ptr
    kind = out.dtype.element_ty
    tl.store(out_at + d[None, :], (acc / whole).to(kind), mask=used[:, None] & (d < V)[None, :])
    if WIDE:
        tl.store(
            out_at + e[None, :], (acc_rest / whole).to(kind), mask=used[:, None] & (e < V)[None, :]
        )


@dataclass(frozen=True)
class Tiles:
    """How a program is cut."""

    rows: int
    keys: int
    stages: int
    warps: int
    per_sm: int = PROGRAMS_PER_SM
    """Programs of a decode step that a multiprocessor runs at once."""


def halves(dim: int) -> tuple[int, int]:
    """Return the power of two and the rest, a power of two as well or 0, that cover `dim`."""
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - main
    return main, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


def choose_tiles(dim: int, item: int, rows: int, *, latent: bool, block: int) -> Tiles:
    """Return the tiles of a program whose head has `rows` rows, within `block` bytes shared.

    Queries stay in shared memory beside the tiles on their way: one of keys, one of values.
    """
    main, rest = halves(dim)
    width = (main + rest) * item
    tensors = 1 if latent else 2

    def needed(r: int, n: int, stages: int) -> int:
        return width * (r + (stages - 1) * n * tensors) + BESIDE + 4 * r * n

    # Latents are both keys and values. 64 of them keep 8 warps at work; with 32 half the warps have
    # no scores to make, and each tile's chain of sums is as long.
    if latent and rows <= 16 and main * item >= 1024 and needed(16, 64, 3) <= block:
        return Tiles(16, 64, 3, 8, per_sm=1)
    most = 16 if rows <= 16 else 32 if rows <= 32 or main * item > 512 else 64
    for r, n in ((most, 64), (most, 32), (min(most, 32), 32), (16, 32), (16, 16)):
        stages = next((s for s in (4, 3, 2) if needed(r, n, s) <= block), 0)
        if stages and not (n == 64 and main * item > 256):
            return Tiles(r, n, stages, 8 if r * main >= 1 << 14 or main >= 512 else 4)
    raise ValueError(f"heads of {dim} channels of {item} bytes need more than {block} bytes shared")


def ruled_attend(
    q_BQHD: Tensor,
    k_cache_SGTD: Tensor,
    v_cache_SGTD: Tensor,
    slots_B: Tensor,
    start_B: Tensor,
    num_new_B: Tensor,
    *,
    max_end: int,
    scale: float,
    rule: ScoreRule = EVERYTHING,
    value_dim: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return o [B, Q, H, V]; the step's own keys and values are in the cache already.

    `max_end` bounds every request's length; it only decides the number of programs. `value_dim`:
    V, the first channels of values that anyone wants, all unless given. Padding gives anything.
    """
    (batch, q_len, heads, dim), strides = q_BQHD.shape, k_cache_SGTD.stride()
    if strides != v_cache_SGTD.stride() or strides[3] != 1:
        raise ValueError(f"caches must have equal strides, channels last, got {strides}")
    groups, q_BQHD = k_cache_SGTD.shape[1], q_BQHD.contiguous()
    value_dim, item = value_dim or dim, q_BQHD.element_size()
    latent = k_cache_SGTD.data_ptr() == v_cache_SGTD.data_ptr()
    block, _ = shared_memory(q_BQHD.device)
    tiles = choose_tiles(dim, item, heads // groups * q_len, latent=latent, block=block)
    chunks = -(-(heads // groups * q_len) // tiles.rows)
    seen = min(max_end, rule.window + tiles.keys) if rule.window else max_end
    if splits is None:
        few = q_len <= MAX_Q_LEN
        programs = batch * groups * chunks
        sms = multiprocessors(q_BQHD.device)
        splits = 1
        if few:
            splits = choose_splits(programs, seen, tiles.keys, sms, per_sm=tiles.per_sm)
    out = q_BQHD.new_empty(batch, q_len, heads, value_dim)
    padded = max(16, triton.next_power_of_2(value_dim))
    parts = batch * groups * chunks * splits * tiles.rows if splits > 1 else 1
    part = q_BQHD.new_empty(parts * padded, dtype=torch.float32)
    lse = q_BQHD.new_empty(parts, dtype=torch.float32)
    pdl, (main, rest) = overlaps(q_BQHD.device), halves(dim)
    same = {"H": heads, "G": groups, "PADDED": padded, "R": tiles.rows, "PDL": pdl}
    kinds = {"CAPPED": rule.cap > 0, "SINKS": rule.sinks_H is not None, "LATENT": latent}
    ruled_attend_kernel[(splits, groups * chunks, batch)](
        *(q_BQHD, k_cache_SGTD, v_cache_SGTD, slots_B, start_B, num_new_B),
        *(lse if rule.sinks_H is None else rule.sinks_H, out, part, lse),
        *(float(scale), float(rule.cap or 1.0), rule.window, *strides[:3], q_len, chunks, splits),
        **same | kinds | {"D": dim, "V": value_dim, "MAIN": main, "REST": rest},
        N=tiles.keys,
        STAGES=tiles.stages,
        SPLIT=splits > 1,
        num_warps=tiles.warps,
        launch_pdl=pdl,
    )
    if splits > 1:
        merge_splits(part, lse, out, splits, same)
    return out


def attend_prompts(
    q_BQHD: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    num_new_B: Tensor,
    *,
    scale: float,
    rule: ScoreRule = EVERYTHING,
    value_dim: int | None = None,
) -> Tensor:
    """Return o [B, Q, H, V] of whole prompts, right padded, over their own keys and values."""
    if k_BQGD.stride() != v_BQGD.stride() or k_BQGD.stride(3) != 1:
        k_BQGD, v_BQGD = k_BQGD.contiguous(), v_BQGD.contiguous()
    rows = torch.arange(len(num_new_B), device=num_new_B.device)
    return ruled_attend(
        *(q_BQHD, k_BQGD.transpose(1, 2), v_BQGD.transpose(1, 2)),
        *(rows, torch.zeros_like(rows), num_new_B),
        max_end=q_BQHD.shape[1],
        scale=scale,
        rule=rule,
        value_dim=value_dim,
    )


def ruled_attend_reference(
    q_BQHD: Tensor,
    k_cache_SGTD: Tensor,
    v_cache_SGTD: Tensor,
    slots_B: Tensor,
    start_B: Tensor,
    num_new_B: Tensor,
    *,
    scale: float,
    rule: ScoreRule = EVERYTHING,
    value_dim: int | None = None,
) -> Tensor:
    """The twin: float64, one request at a time; rows beyond a count see the last token."""
    value_dim = value_dim or q_BQHD.shape[3]
    out = q_BQHD.new_empty(*q_BQHD.shape[:3], value_dim)
    rep = q_BQHD.shape[2] // k_cache_SGTD.shape[1]
    for row in range(q_BQHD.shape[0]):
        slot, start = int(slots_B[row]), int(start_B[row])
        end = start + int(num_new_B[row])
        k = k_cache_SGTD[slot, :, :end].double().repeat_interleave(rep, dim=0)
        v = v_cache_SGTD[slot, :, :end, :value_dim].double().repeat_interleave(rep, dim=0)
        q = q_BQHD[row].transpose(0, 1).double()
        position = (start + torch.arange(q.shape[1], device=q.device)).clamp(max=end - 1)
        behind = position[:, None] - torch.arange(end, device=q.device)
        x = q @ k.transpose(1, 2) * scale
        if rule.cap:
            x = (x / rule.cap).tanh() * rule.cap
        unseen = (behind < 0) | (behind >= (rule.window or end))
        x = x.masked_fill(unseen, float("-inf"))
        if rule.sinks_H is not None:
            sinks = rule.sinks_H.double()[:, None, None].expand(-1, x.shape[1], 1)
            x = torch.cat((x, sinks), dim=-1)
        share = x.softmax(dim=-1)[..., :end]
        out[row] = (share @ v).transpose(0, 1).to(out.dtype)
    return out
