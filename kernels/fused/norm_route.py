"""Norm, router and choice of experts as two launches.

    n = x rsqrt(mean(x^2) + eps) g        float32 inside, one rounding; written for others
    logits = n W^T + b                    a program: 16 tokens x 16 experts x CHUNK columns
    weights, ids                         route.py, which adds up the chunks' shares first

Every program reads all columns of its tokens for their means, a few KiB of the L2, and W before the
kernel ahead has ended. Shares of logits are float32 and are added in their order: results do not
depend on the timing. (With the choice made by the last program to arrive, a launch less, one
program does it for 16 tokens: 17 us of 128 experts on an H200.)

T tokens, h columns, E experts.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.fused.route import RouterRule, fits, route_shares
from llmpq.kernels.overlap import overlaps

TOKENS, EXPERTS, CHUNK = 16, 16, 512
MOST_LOGITS = 16384
"""Of all tokens: beyond, a product of its own, which reads W less often, is faster (H200)."""
MOST_COLUMNS = 8192
"""A program's loop over its tokens' columns is unrolled."""


@triton.jit(do_not_specialize=["T", "eps"])
def norm_logits_kernel(
    x_ptr,
    norm_weight,
    router,
    normed,
    shares,
    T,
    columns,
    eps,
    E: tl.constexpr,
    CHUNKS: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (CHUNKS * blocks of experts, blocks of tokens)."""
    chunk, tile = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    e, k = tile * BE + tl.arange(0, BE), chunk * BK + tl.arange(0, BK)
    w = tl.load(
        router + e[:, None] * columns + k[None, :],
        mask=(e < E)[:, None] & (k < columns)[None, :],
        other=0.0,
    )
    g = tl.load(norm_weight + k, mask=k < columns, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    row = x_ptr + t.to(tl.int64)[:, None] * columns
    squares = tl.zeros([BT, BK], tl.float32)  # warps exchange sums once, behind the last chunk
    for i in tl.static_range(CHUNKS):
        c = i * BK + tl.arange(0, BK)
        some = tl.load(row + c[None, :], mask=(t < T)[:, None] & (c < columns)[None, :], other=0.0)
        squares += some.to(tl.float32) * some.to(tl.float32)
    mean = tl.sum(squares, 1) / columns
    live = (t < T)[:, None] & (k < columns)[None, :]
    x = tl.load(row + k[None, :], mask=live, other=0.0).to(tl.float32)
    n = x * tl.rsqrt(mean + eps)[:, None] * g[None, :]
    n = n.to(normed.dtype.element_ty)
    if tile == 0:
        tl.store(normed + t.to(tl.int64)[:, None] * columns + k[None, :], n, mask=live)
    if INTERPRET:
        share = tl.dot(n.to(tl.float32), tl.trans(w).to(tl.float32))
    else:
        share = tl.dot(n, tl.trans(w), input_precision="ieee")
    at = (chunk * T + t)[:, None] * E
    tl.store(shares + at + e[None, :], share, mask=(t < T)[:, None] & (e < E)[None, :])


def takes(x_Th: Tensor, experts: int, groups: int) -> bool:
    """Whether the kernels take so many rows and columns and experts."""
    tokens, columns = x_Th.shape
    few = tokens * experts <= MOST_LOGITS and columns <= MOST_COLUMNS
    return few and fits(experts, groups)


def norm_route(
    x_Th: Tensor,
    norm_weight: Tensor,
    eps: float,
    router_Eh: Tensor,
    rule: RouterRule,
    *,
    bias_E: Tensor | None = None,
    correction_E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, h] normed, and weights and ids [T, k] of each row's experts."""
    (tokens, columns), experts = x_Th.shape, router_Eh.shape[0]
    chunks, pdl = triton.cdiv(columns, CHUNK), overlaps(x_Th.device)
    normed = torch.empty_like(x_Th)
    shares = x_Th.new_empty(chunks, tokens, experts, dtype=torch.float32)
    grid = (chunks * triton.cdiv(experts, EXPERTS), triton.cdiv(tokens, TOKENS))
    norm_logits_kernel[grid](
        x_Th.contiguous(),
        norm_weight,
        router_Eh.contiguous(),
        normed,
        shares,
        tokens,
        columns,
        float(eps),
        E=experts,
        CHUNKS=chunks,
        BT=TOKENS,
        BE=EXPERTS,
        BK=CHUNK,
        PDL=pdl,
        INTERPRET=bool(knobs.runtime.interpret),
        num_warps=4,
        launch_pdl=pdl,
    )
    return normed, *route_shares(shares, rule, x_Th.dtype, bias_E, correction_E)
