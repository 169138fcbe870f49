"""Rotary positions and the write into a pool of blocks as one pass over a step's q, k and v.

    q, k, v [B, Q, N, D] (strided: slices of one qkv)      a program: one token, BLOCK heads
      |  q: rotated          -> q_out [B, Q, H, D]
      |  k: rotated          -> pool [blocks, G, PAGE, D], or k_out [B, Q, G, D]
      |  v: as it is         -> pool [blocks, G, PAGE, D], or nowhere
    rotation of halves: (a, b) -> factor (a cos - b sin, b cos + a sin), angle = pos * inv_freq
    of the first 2 * len(inv_freq) channels of a head, the others stay (GLM-4); yarn has a factor,
    rows have frequencies of their own where their lengths decide (BY_ROW: dynamic rope)

Bytes: each of q, k, v read once and written once. Angles are computed from the position in float32
and never stored. Tokens without a place (padding) are not written to the pool.

B requests, Q new tokens, T tokens of a step, H query heads, G key/value heads, D head_dim.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

HEADS_PER_PROGRAM = 8
"""A 32-row decode step of 48 heads makes 192 programs: more than an H200 has SMs."""


@triton.jit
def _rotated(pointer, d, live, angle, factor, ROTARY: tl.constexpr, HALF: tl.constexpr):
    """Load the halves of some heads [BLOCK, HALF], and rotate them in float32."""
    low = tl.load(pointer + d, mask=live, other=0.0)
    high = tl.load(pointer + HALF + d, mask=live, other=0.0)
    if ROTARY:
        cos, sin = (tl.cos(angle) * factor)[None, :], (tl.sin(angle) * factor)[None, :]
        a, b = low.to(tl.float32), high.to(tl.float32)
        low, high = (a * cos - b * sin).to(low.dtype), (b * cos + a * sin).to(high.dtype)
    return low, high


@triton.jit
def _copy_rest(source, target, D: tl.constexpr, head, most, HALF: tl.constexpr, REST: tl.constexpr):
    """Copy the channels behind the rotated ones of some heads."""
    d = 2 * HALF + tl.arange(0, REST)
    live = (head < most)[:, None] & (d < D)[None, :]
    tl.store(target + d[None, :], tl.load(source + d[None, :], mask=live, other=0.0), mask=live)


@triton.jit(do_not_specialize=["factor"])
def rope_append_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out,
    k_out,
    v_out,
    places,
    starts,
    inv_freq,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    head_stride,
    token_stride,
    Q,
    factor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    KEEP: tl.constexpr,
    BY_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's block of heads; `*_stride` in elements between tokens of an input.

    With a PAGE each token has a place of its own, in `places`: token place % PAGE of a block of a
    pool, or nowhere if that is negative. KEEP: rotated keys also stay where they came from.
    """
    Q_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    G_BLOCKS: tl.constexpr = (G + BLOCK - 1) // BLOCK
    # Q is no constexpr: every length of prompt would be a kernel of its own to compile.
    b, i = tl.program_id(0) // Q, tl.program_id(0) % Q
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    d = tl.arange(0, PADDED)
    inside = d < HALF
    # What no kernel writes is asked for before the kernel in front has ended.
    if ROTARY and not BY_ROW:
        frequency = tl.load(inv_freq + d, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(starts + b) + i
    if BY_ROW:
        frequency = tl.load(inv_freq + b.to(tl.int64) * HALF + d, mask=inside, other=0.0)
    angle = position.to(tl.float32)
    if ROTARY:
        angle = angle * frequency
    place = b.to(tl.int64)
    if PAGE > 0:
        at_token = tl.load(places + b).to(tl.int64)
        written = tl.where(at_token < 0, 0, G)
        place = at_token // PAGE
        i = at_token % PAGE
    else:
        written = G
    out_at = place * block_stride + i * token_stride
    if block < Q_BLOCKS:
        head = block * BLOCK + tl.arange(0, BLOCK)
        live = (head < H)[:, None] & inside[None, :]
        at = head[:, None] * D + d[None, :]
        low, high = _rotated(q_ptr + token * q_stride, at, live, angle, factor, ROTARY, HALF)
        out = q_out + token * (H * D) + at
        tl.store(out, low, mask=live)
        tl.store(out + HALF, high, mask=live)
        if REST > 0:
            heads = (head * D)[:, None]
            source, target = q_ptr + token * q_stride + heads, q_out + token * (H * D) + heads
            _copy_rest(source, target, D, head, H, HALF, REST)
    elif block < Q_BLOCKS + G_BLOCKS:
        head = (block - Q_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        live = (head < written)[:, None] & inside[None, :]
        at = head[:, None] * D + d[None, :]
        low, high = _rotated(k_ptr + token * k_stride, at, live, angle, factor, ROTARY, HALF)
        out = k_out + out_at + head[:, None] * head_stride + d[None, :]
        tl.store(out, low, mask=live)
        tl.store(out + HALF, high, mask=live)
        if KEEP:
            tl.store(k_ptr + token * k_stride + at, low, mask=live)
            tl.store(k_ptr + token * k_stride + at + HALF, high, mask=live)
        if REST > 0:
            source = k_ptr + token * k_stride + (head * D)[:, None]
            target = k_out + out_at + head[:, None] * head_stride
            _copy_rest(source, target, D, head, written, HALF, REST)
    else:
        head = (block - Q_BLOCKS - G_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        live = (head < written)[:, None] & inside[None, :]
        at = head[:, None] * D + d[None, :]
        low, high = _rotated(v_ptr + token * v_stride, at, live, angle, factor, False, HALF)
        out = v_out + out_at + head[:, None] * head_stride + d[None, :]
        tl.store(out, low, mask=live)
        tl.store(out + HALF, high, mask=live)
        if REST > 0:
            source = v_ptr + token * v_stride + (head * D)[:, None]
            target = v_out + out_at + head[:, None] * head_stride
            _copy_rest(source, target, D, head, written, HALF, REST)


def rope_append_pages(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    places_T: Tensor,
    positions_T: Tensor,
    inv_freq: Tensor | None,
    factor: float = 1.0,
    *,
    keep: bool = False,
) -> Tensor:
    """Write rotated keys and values into pools [blocks, G, PAGE, D]; return the rotated queries.

    A token of place p goes to token p % PAGE of block p // PAGE, one of place -1 nowhere.
    `keep`: keys of tokens that have a place are rotated in `k_TGD`, too.
    """
    if keep and (k_TGD.stride(2) != 1 or k_TGD.stride(1) != k_TGD.shape[2]):
        raise ValueError(f"keys to rotate in place need dense heads, got strides {k_TGD.stride()}")
    if not k_pool.is_contiguous() or not v_pool.is_contiguous() or k_pool.shape != v_pool.shape:
        raise ValueError(f"pools must be alike and dense, got {k_pool.shape} and {v_pool.shape}")
    q_out = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    _launch(
        (q_TND[None], k_TGD[None], v_TGD[None]),
        (q_out, k_pool, v_pool),
        (places_T, positions_T),
        (inv_freq, factor),
        k_pool.stride()[:3],
        blocks=2,
        page=k_pool.shape[2],
        keep=keep and inv_freq is not None,
    )
    return q_out


def rope(
    q_BQHD: Tensor, k_BQGD: Tensor, start_B: Tensor, inv_freq: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_BQHD, k_BQGD))
    _, q_len, groups, dim = k_BQGD.shape
    _launch(
        (q_BQHD, k_BQGD, k_BQGD),
        (q_out, k_out, k_out),
        (start_B, start_B),
        (inv_freq, factor),
        (q_len * groups * dim, dim, groups * dim),
        blocks=1,
    )
    return q_out, k_out


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    rotation: tuple[Tensor | None, float],
    strides: tuple[int, ...],
    *,
    blocks: int,
    page: int = 0,
    keep: bool = False,
) -> None:
    """`blocks`: 2 writes keys and values to a pool, 1 keys only to a tensor like the input.

    `rows`: places and positions. `page`: tokens of a pool's block; then every token is a row of its
    own. `keep`: as KEEP.
    """
    batch, q_len, heads, dim = inputs[0].shape
    groups, (inv_freq, factor) = inputs[1].shape[2], rotation
    inputs_2 = tuple(tokens_of(x) for x in inputs)
    half = dim // 2 if inv_freq is None else inv_freq.shape[-1]
    rest = triton.next_power_of_2(dim - 2 * half) if dim > 2 * half else 0
    block, pdl = HEADS_PER_PROGRAM, overlaps(inputs[0].device)
    grid = (batch * q_len, triton.cdiv(heads, block) + blocks * triton.cdiv(groups, block))
    rope_append_kernel[grid](
        *(x for x, _ in inputs_2),
        *outputs,
        *rows,
        inv_freq if inv_freq is not None else rows[0],
        *(stride for _, stride in inputs_2),
        *strides,
        *(1 if page else q_len, factor),
        H=heads,
        G=groups,
        D=dim,
        HALF=half,
        PADDED=triton.next_power_of_2(half),
        REST=rest,
        BLOCK=block,
        ROTARY=inv_freq is not None,
        PAGE=page,
        KEEP=keep,
        BY_ROW=inv_freq is not None and inv_freq.dim() > 1,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )


def tokens_of(x_BQND: Tensor) -> tuple[Tensor, int]:
    """Return a tensor whose heads lie one after the other, and its stride between tokens."""
    batch, q_len, _, dim = x_BQND.shape
    if (s := x_BQND.stride())[2:] != (dim, 1) or (batch > 1 and s[0] != s[1] * q_len):
        x_BQND = x_BQND.contiguous()
        s = x_BQND.stride()
    return x_BQND, s[1] if q_len > 1 else s[0]
