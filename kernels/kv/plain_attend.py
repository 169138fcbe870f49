"""Attention of a few new tokens over an unquantised KV cache, lengths read from the device.

    scores [R, 64] = q [R, D] K^T [D, 64]        R = 16 or 32 rows: the query heads of one key/value
    out    [R, D] += p [R, 64] V [64, D]         head times the new tokens, so GQA reads K, V once

    programs: (splits, G * row chunks, B); a program takes 1 / splits of its request's tokens, as
    the request's own length says, so a CUDA graph captured at one length serves every other.
    With one split the program writes the result; with more, `combine` merges normalised parts
    by their log2-sum-exp.

Cost per output: 2 D elements of the cache per token and key/value head, read once. With as many
programs as fit on the GPU at once (two per SM), splits are used only where requests are few.

B requests, Q new tokens, H query heads, G key/value heads, D head_dim, S slots, T slot length.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.kv.launch_plan import shared_memory
from llmpq.kernels.kv.low_bit.register_operands import prefetch
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.kernels.overlap import overlaps

MAX_Q_LEN = 16
"""New tokens of a step; longer chunks are compute bound and belong to a prefill kernel."""

PROGRAMS_PER_SM = 2
MAX_SPLITS = 64
COMBINE_PROGRAMS = 64
"""As many programs of the combine leave multiprocessors to the product behind, which then asks for
its weights early. More only where these would load more than `COMBINE_ELEMENTS` each."""
COMBINE_ELEMENTS = 1 << 14
MAX_STAGES = 6
BESIDE = 8192
"""Bytes of shared memory that a program takes beside its tiles, at most."""
AHEAD = 2
"""Tiles a program asks the L2 for while the kernel in front ends."""
LOG2_E = 1.4426950408889634


@triton.jit
def ask_tiles(k_at, v_at, first, end, D: tl.constexpr, TOKENS: tl.constexpr):
    """Ask the L2 for keys and values of TOKENS tokens from `first` on, 64 threads for either."""
    item: tl.constexpr = k_at.dtype.element_ty.primitive_bitwidth // 8
    PIECE: tl.constexpr = TOKENS * D * item // 64
    thread = tl.arange(0, 128)
    at = thread % 64 * PIECE
    size = tl.minimum(tl.maximum((end - first) * (D * item) - at, 0), PIECE)
    base = tl.where(thread < 64, k_at.to(tl.int64), v_at.to(tl.int64))
    prefetch(base + first.to(tl.int64) * (D * item) + at, size)


@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, slots, starts, counts, slopes, out_ptr, part_ptr, lse_ptr,
    score_scale, slot_stride, head_stride, token_stride, splits,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, ALIBI: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one request's one key/value head."""
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C * Q + R - 1) // R
    split = tl.program_id(0)
    group = tl.program_id(1) // CHUNKS
    chunk = tl.program_id(1) % CHUNKS
    b = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        if AHEAD > 0:
            # Only what is asked of the L2 depends on these: where rows stand may yet be written.
            known = tl.load(starts + b, volatile=True) + tl.load(counts + b, volatile=True)
            row = tl.load(slots + b, volatile=True) * slot_stride + group * head_stride
            asked = split * (((known + N - 1) // N + splits - 1) // splits) * N
            ask_tiles(
                k_ptr + row, v_ptr + row, asked.to(tl.int32), known.to(tl.int32), D, AHEAD * N
            )
        gdc_wait()
    start = tl.load(starts + b).to(tl.int32)
    end = start + tl.load(counts + b).to(tl.int32)
    slot = tl.load(slots + b).to(tl.int64)

    # ---- queries: row c is head c % C of the group, new token c // C
    c = chunk * R + tl.arange(0, R)
    used = c < C * Q
    position = tl.minimum(start + c // C, end - 1)
    d = tl.arange(0, PADDED)
    inside = d < D
    head = group * C + c % C
    q_at = ((b * Q + c // C) * H + head) * D
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=used[:, None] & inside[None, :], other=0.0)
    if ALIBI:
        slope = tl.load(slopes + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634

    # ---- this part's tokens: whole tiles, as even as the request's length allows
    tiles = (end + N - 1) // N
    share = (tiles + splits - 1) // splits
    first = split * share * N
    last = tl.minimum(end, first + share * N)
    base = slot * slot_stride + group * head_stride
    m_i = tl.full([R], -1.0e30, tl.float32)
    l_i = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, PADDED], tl.float32)
    for t0 in tl.range(first, last, N, num_stages=STAGES):
        t = t0 + tl.arange(0, N)
        live = (t < end)[:, None] & inside[None, :]
        at = base + t[:, None].to(tl.int64) * token_stride + d[None, :]
        k = tl.load(k_ptr + at, mask=live, other=0.0)
        v = tl.load(v_ptr + at, mask=live, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
        if ALIBI:
            x += slope[:, None] * (t[None, :] - position[:, None]).to(tl.float32)
        x = tl.where(t[None, :] <= position[:, None], x, -1.0e30)
        m_new = tl.maximum(m_i, tl.max(x, 1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.where(t[None, :] <= position[:, None], tl.exp2(x - m_new[:, None]), 0.0)
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    out = acc / tl.maximum(l_i, 1e-30)[:, None]
    stored = used[:, None] & inside[None, :]
    if SPLIT:
        at = ((b * G * CHUNKS + tl.program_id(1)) * splits + split).to(tl.int64) * R
        r = tl.arange(0, R)
        lse = tl.where(l_i > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), -1.0e30)
        tl.store(lse_ptr + at + r, lse)
        tl.store(part_ptr + (at + r)[:, None] * PADDED + d[None, :], out, mask=stored)
    else:
        at = out_ptr + q_at[:, None] + d[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["splits", "outputs"])
def combine_kernel(
    part_ptr, lse_ptr, out_ptr, splits, outputs,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    R: tl.constexpr, X: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of some outputs, each one query head of one new token.

    Parts without tokens hold zeros: all are loaded at once, whatever their weights.
    """
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C * Q + R - 1) // R
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = n // (H * Q)
    group = n // (C * Q) % G
    c = n % (C * Q)
    x = tl.arange(0, X)
    d = tl.arange(0, PADDED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = ((b * G + group) * CHUNKS + c // R).to(tl.int64) * splits
    at = (first[:, None] + x[None, :]) * R + (c % R)[:, None]
    there = (n < outputs)[:, None] & (x < splits)[None, :]
    lse = tl.load(lse_ptr + at, mask=there, other=-1.0e30)
    live = there[:, :, None] & (d < D)[None, None, :]
    part = tl.load(part_ptr + at[:, :, None] * PADDED + d[None, None, :], mask=live, other=0.0)
    weight = tl.where(lse > -1.0e29, tl.exp2(lse - tl.max(lse, 1)[:, None]), 0.0)
    total = tl.maximum(tl.sum(weight, 1), 1e-30)
    out = tl.sum(part * weight[:, :, None], 1) / total[:, None]
    out_at = ((b * Q + c // C) * H + group * C + c % C) * D
    stored = (n < outputs)[:, None] & (d < D)[None, :]
    tl.store(out_ptr + out_at[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=stored)


def choose_splits(
    programs: int, tokens: int, tile: int, sms: int, *, per_sm: int = PROGRAMS_PER_SM
) -> int:
    """Return the parts a request is split into: as many programs as run at once, no empty parts."""
    return max(1, min(per_sm * sms // programs, -(-tokens // tile), MAX_SPLITS))


def choose_stages(tile_bytes: int, block: int, everywhere: int) -> int:
    """Return the stages with which `PROGRAMS_PER_SM` programs fill a multiprocessor, no more.

    A loop of s stages holds s - 1 tiles of `tile_bytes`. Where a third program fits, some
    multiprocessors get three and others one, and all wait for those (H200, 32 requests of 562
    tokens: 26.5 us with 3 stages, 21.7 with 4).
    """
    most = min(block, everywhere // PROGRAMS_PER_SM - 1024) - BESIDE
    return max(2, min(MAX_STAGES, 1 + most // tile_bytes))


def tiles_ahead(strides: tuple[int, ...], tile: int, dim: int, item: int) -> int:
    """Return the tiles that are asked of the L2 early: none where tokens do not lie in a row."""
    whole = strides[2] == dim and dim * item % 16 == 0 and AHEAD * tile * dim * item % 1024 == 0
    return AHEAD if whole else 0


def combine_rows(outputs: int, elements: int) -> int:
    """Return the outputs a program of the combine takes, of `elements` numbers each to load."""
    wanted = triton.next_power_of_2(triton.cdiv(outputs, COMBINE_PROGRAMS))
    return max(1, min(wanted, COMBINE_ELEMENTS // elements))


def plain_attend(
    q_BQHD: Tensor,
    k_cache_SGTD: Tensor,
    v_cache_SGTD: Tensor,
    slots_B: Tensor,
    start_B: Tensor,
    num_new_B: Tensor,
    *,
    max_end: int,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return o [B, Q, H, D]; the step's own keys and values are in the cache already.

    `max_end` bounds every request's length; it only decides the number of programs.
    """
    batch, q_len, heads, dim = q_BQHD.shape
    groups, strides = k_cache_SGTD.shape[1], k_cache_SGTD.stride()
    _check(q_len, strides, v_cache_SGTD.stride())
    q_BQHD = q_BQHD.contiguous()
    out = torch.empty_like(q_BQHD)
    padded = max(16, triton.next_power_of_2(dim))
    tile = 32 if q_BQHD.dtype == torch.float32 or padded > 128 else 64
    columns = 16 if heads // groups * q_len <= 16 else 32
    chunks = groups * -(-(heads // groups * q_len) // columns)
    if splits is None:
        splits = choose_splits(batch * chunks, max_end, tile, multiprocessors(q_BQHD.device))
    rows = batch * chunks * splits * columns if splits > 1 else 1
    part = q_BQHD.new_empty(rows * padded, dtype=torch.float32)
    lse = q_BQHD.new_empty(rows, dtype=torch.float32)
    pdl = overlaps(q_BQHD.device)
    shape = {"H": heads, "G": groups, "Q": q_len, "D": dim, "PADDED": padded, "R": columns}
    options = shape | {"PDL": pdl, "launch_pdl": pdl}
    stages = choose_stages(2 * tile * padded * q_BQHD.element_size(), *shared_memory(out.device))
    attend_kernel[(splits, chunks, batch)](
        *(q_BQHD, k_cache_SGTD, v_cache_SGTD),
        *(slots_B, start_B, num_new_B),
        lse if alibi_slopes_H is None else alibi_slopes_H,
        out,
        part,
        lse,
        scale * LOG2_E,
        *strides[:3],
        splits,
        **options,
        N=tile,
        SPLIT=splits > 1,
        ALIBI=alibi_slopes_H is not None,
        STAGES=stages,
        AHEAD=tiles_ahead(strides, tile, dim, q_BQHD.element_size()) if pdl else 0,
        num_warps=4,
    )
    if splits > 1:
        merge_splits(part, lse, out, splits, shape | {"PDL": pdl})
    return out


def merge_splits(
    part: Tensor, lse: Tensor, out_BQHD: Tensor, splits: int, same: dict[str, int]
) -> None:
    """Write the merged parts of every output; `same`: the arguments of the kernel of the parts."""
    batch, q_len, heads, dim = out_BQHD.shape
    outputs, parts = batch * heads * q_len, triton.next_power_of_2(splits)
    together = combine_rows(outputs, parts * same["PADDED"])
    combine_kernel[(triton.cdiv(outputs, together),)](
        *(part, lse, out_BQHD, splits, outputs),
        **same | {"Q": q_len, "D": dim, "X": parts, "ROWS": together},
        num_warps=4,
        launch_pdl=same["PDL"],
    )


def _check(q_len: int, k_strides: tuple[int, ...], v_strides: tuple[int, ...]) -> None:
    """Raise `ValueError` for a step or caches the kernel does not read."""
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(f"plain_attend takes 1..{MAX_Q_LEN} new tokens a request, got {q_len}")
    if k_strides != v_strides or k_strides[3] != 1:
        raise ValueError(f"caches must have equal strides, channels last, got {k_strides}")


def plain_attend_reference(
    q_BQHD: Tensor,
    k_cache_SGTD: Tensor,
    v_cache_SGTD: Tensor,
    slots_B: Tensor,
    start_B: Tensor,
    num_new_B: Tensor,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
) -> Tensor:
    """The twin: float64, one request at a time; rows beyond a count see the last token."""
    out = torch.empty_like(q_BQHD)
    rep = q_BQHD.shape[2] // k_cache_SGTD.shape[1]
    for row in range(q_BQHD.shape[0]):
        slot, start = int(slots_B[row]), int(start_B[row])
        end = start + int(num_new_B[row])
        k = k_cache_SGTD[slot, :, :end].double().repeat_interleave(rep, dim=0)
        v = v_cache_SGTD[slot, :, :end].double().repeat_interleave(rep, dim=0)
        q = q_BQHD[row].transpose(0, 1).double()
        position = (start + torch.arange(q.shape[1], device=q.device)).clamp(max=end - 1)
        ahead = torch.arange(end, device=q.device) - position[:, None]
        x = q @ k.transpose(1, 2) * scale
        if alibi_slopes_H is not None:
            x = x + alibi_slopes_H.double()[:, None, None] * ahead
        x = x.masked_fill(ahead > 0, float("-inf"))
        out[row] = (x.softmax(dim=-1) @ v).transpose(0, 1).to(out.dtype)
    return out
