"""Norm, router and choice of a few tokens' experts as one launch, their pairs sorted by expert.

    n = x rsqrt(mean(x^2) + eps) g        float32 inside, one rounding; written for the experts
    logits = n W^T + b                    a program: 16 tokens x 16 experts x CHUNK columns
    weights, numbers                      the last program of 16 tokens: route.choose
    order, starts, ends                   the same one, where there are no more than 16 tokens

Every program reads all columns of its tokens for their means, a few KiB of the L2, and W before the
kernel ahead has ended. Shares of logits are float32 and are added in their order: results do not
depend on the timing. Launched one after the other the same takes five kernels.

T tokens, h columns, E experts, k experts of a token, C = T k pairs; a pair's number is t k + j.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.fused.route import RouterRule, choose, fits
from llmpq.kernels.overlap import overlaps

TOKENS, EXPERTS, CHUNK = 16, 16, 512
MOST_TOKENS = 256
"""Rows beyond which a product of its own reads W less often."""
MOST_EXPERTS = 256
MOST_COLUMNS = 8192
"""A program's loop over its tokens' columns is unrolled."""


@triton.jit
def _sort(chosen, t, T, order, starts, ends, E: tl.constexpr, PADDED: tl.constexpr,
          TOP: tl.constexpr, TOP_PADDED: tl.constexpr):  # fmt: skip
    """Order of the pairs by expert, each expert's by number; all are in `chosen` [TOKENS, k]."""
    j = tl.arange(0, TOP_PADDED)[None, :]
    real = (t < T)[:, None] & (j < TOP)
    SIZE: tl.constexpr = chosen.shape[0] * TOP_PADDED
    key = tl.reshape(tl.where(real, chosen, 2 * PADDED), (SIZE,))
    pair = tl.reshape(t[:, None] * TOP + j, (SIZE,))
    f = tl.arange(0, SIZE)
    # Sums over axis 0 stay in a thread's registers; over axis 1 each is five shuffles.
    same = (key[:, None] == key[None, :]) & (f[:, None] < f[None, :])
    place = tl.sum(((key[:, None] < key[None, :]) | same).to(tl.int32), 0)
    tl.store(order + place, pair, mask=key < PADDED)
    e = tl.arange(0, PADDED)
    tl.store(starts + e, tl.sum((key[:, None] < e[None, :]).to(tl.int32), 0), mask=e < E)
    tl.store(ends + e, tl.sum((key[:, None] <= e[None, :]).to(tl.int32), 0), mask=e < E)


@triton.jit(do_not_specialize=["T", "eps", "scale", "least"])
def norm_route_kernel(
    x_ptr, norm_weight, router, bias, correction, normed, partial, arrived, weights, numbers,
    order, starts, ends, T, columns, eps, scale, least,
    E: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, TOP_PADDED: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TWO: tl.constexpr, NORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, SORTS: tl.constexpr,
    CHUNKS: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
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
    squares = tl.zeros([BT], tl.float32)
    for i in tl.static_range(CHUNKS):
        c = i * BK + tl.arange(0, BK)
        some = tl.load(row + c[None, :], mask=(t < T)[:, None] & (c < columns)[None, :], other=0.0)
        squares += tl.sum(some.to(tl.float32) * some.to(tl.float32), 1)
    live = (t < T)[:, None] & (k < columns)[None, :]
    x = tl.load(row + k[None, :], mask=live, other=0.0).to(tl.float32)
    n = x * tl.rsqrt(squares / columns + eps)[:, None] * g[None, :]
    n = n.to(normed.dtype.element_ty)
    if tile == 0:
        tl.store(normed + t.to(tl.int64)[:, None] * columns + k[None, :], n, mask=live)
    if INTERPRET:
        share = tl.dot(n.to(tl.float32), tl.trans(w).to(tl.float32))
    else:
        share = tl.dot(n, tl.trans(w), input_precision="ieee")
    at = (chunk * T + t)[:, None] * E
    tl.store(partial + at + e[None, :], share, mask=(t < T)[:, None] & (e < E)[None, :])
    tl.debug_barrier()  # every thread's share is written before this program counts itself
    before = tl.atomic_add(arrived + tl.program_id(1), 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        every = tl.arange(0, PADDED)
        there = (t < T)[:, None] & (every < E)[None, :]
        logits = tl.zeros([BT, PADDED], tl.float32)
        for i in tl.static_range(CHUNKS):
            of = partial + (i * T + t)[:, None] * E + every[None, :]
            logits += tl.load(of, mask=there, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            logits += tl.load(bias + every, mask=every < E, other=0.0).to(tl.float32)[None, :]
        logits = tl.where((every < E)[None, :], logits, float("-inf"))
        weight, chosen = choose(
            logits, correction, scale, least, E, PADDED, TOP, TOP_PADDED, SIGMOID, CORRECTED,
            GROUPS, KEPT, TWO, NORMALISE,
        )  # fmt: skip
        j = tl.arange(0, TOP_PADDED)[None, :]
        own = (t < T)[:, None] & (j < TOP)
        pair = t[:, None] * TOP + j
        tl.store(weights + pair, weight.to(weights.dtype.element_ty), mask=own)
        tl.store(numbers + pair, chosen.to(tl.int64), mask=own)
        if SORTS:
            _sort(chosen, t, T, order, starts, ends, E, PADDED, TOP, TOP_PADDED)
        tl.store(arrived + tl.program_id(1), 0)


@dataclass(frozen=True)
class Routed:
    """A norm's rows, and where they go."""

    normed_Th: Tensor
    weight_Tk: Tensor
    expert_Tk: Tensor
    sorted_by_expert: tuple[Tensor, Tensor, Tensor] | None
    """Pairs' numbers [C], first places and ends of experts [E]; of few tokens only."""


def takes(x_Th: Tensor, experts: int, groups: int) -> bool:
    """Whether the kernel takes so many rows and columns and experts."""
    tokens, columns = x_Th.shape
    few = tokens <= MOST_TOKENS and columns <= MOST_COLUMNS and experts <= MOST_EXPERTS
    return few and fits(experts, groups)


def norm_route(
    x_Th: Tensor,
    norm_weight: Tensor,
    eps: float,
    router_Eh: Tensor,
    choice: RouterRule,
    *,
    bias_E: Tensor | None = None,
    correction_E: Tensor | None = None,
) -> Routed:
    """Return x [T, h] normed, and the choice of each of its rows."""
    (tokens, columns), experts, device = x_Th.shape, router_Eh.shape[0], x_Th.device
    chunks, blocks = triton.cdiv(columns, CHUNK), triton.cdiv(tokens, TOKENS)
    normed, weights = torch.empty_like(x_Th), x_Th.new_empty(tokens, choice.per_token)
    numbers = torch.empty(weights.shape, dtype=torch.long, device=device)
    partial = x_Th.new_empty(chunks, tokens, experts, dtype=torch.float32)
    order = torch.empty(numbers.numel(), dtype=torch.int32, device=device)
    starts, ends = (torch.empty(experts, dtype=torch.int32, device=device) for _ in range(2))
    sorts, pdl = tokens <= TOKENS, overlaps(device)
    norm_route_kernel[(chunks * triton.cdiv(experts, EXPERTS), blocks)](
        *(x_Th.contiguous(), norm_weight, router_Eh.contiguous()),
        *(weights if given is None else given for given in (bias_E, correction_E)),
        *(normed, partial, arrivals(device, blocks), weights, numbers, order, starts, ends),
        *(tokens, columns, float(eps), float(choice.scale), choice.least),
        **choice.constants(experts, corrected=correction_E is not None),
        HAS_BIAS=bias_E is not None,
        SORTS=sorts,
        CHUNKS=chunks,
        BT=TOKENS,
        BE=EXPERTS,
        BK=CHUNK,
        PDL=pdl,
        INTERPRET=bool(knobs.runtime.interpret),
        num_warps=4,
        launch_pdl=pdl,
    )
    return Routed(normed, weights, numbers, (order, starts, ends) if sorts else None)
