"""A router's choice as one launch: scores of all experts in, weights and numbers of k of them out.

    p = softmax(x) or sigmoid(x) of a token's logits [E], in float32      a program: one token
    wish = p + correction; of G groups only the best stay, by their largest wish or largest two
    k times: the largest wish, the first of equals; its p is the weight
    weights / (their sum), times a scale

Bytes: E logits read, k weights and numbers written a token; torch takes eight launches for it.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps


@triton.jit
def _largest_two(x_GP):
    """Sum of the two largest of each row, the largest counted twice where it stands twice."""
    best = tl.max(x_GP, 1)
    first = tl.argmax(x_GP, 1)
    column = tl.arange(0, x_GP.shape[1])
    rest = tl.where(column[None, :] == first[:, None], float("-inf"), x_GP)
    return best + tl.max(rest, 1)


@triton.jit(do_not_specialize=["scale", "least"])
def route_kernel(
    logits, correction, weights, numbers, scale, least,
    E: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, TOP_PADDED: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TWO: tl.constexpr, NORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's experts."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    x = tl.load(logits + token * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        chance = 1.0 / (1.0 + tl.exp(-x))
    else:
        share = tl.exp(x - tl.max(x, 0))
        chance = share / tl.sum(share, 0)
    wish = chance
    if CORRECTED:
        wish += tl.load(correction + e, mask=e < E, other=0.0)
    wish = tl.where(e < E, wish, float("-inf"))
    if GROUPS > 1:  # E is a power of two then
        by_group = tl.reshape(wish, (GROUPS, PADDED // GROUPS))
        score = _largest_two(by_group) if TWO else tl.max(by_group, 1)
        group = tl.arange(0, GROUPS)
        kept = tl.zeros([GROUPS], tl.int32)
        for _ in tl.static_range(KEPT):
            best = tl.argmax(score, 0)
            kept = tl.where(group == best, 1, kept)
            score = tl.where(group == best, float("-inf"), score)
        by_group = tl.where(kept[:, None] == 1, by_group, float("-inf"))
        wish = tl.reshape(by_group, (PADDED,))
    j = tl.arange(0, TOP_PADDED)
    chosen = tl.zeros([TOP_PADDED], tl.int32)
    weight = tl.zeros([TOP_PADDED], tl.float32)
    for i in tl.static_range(TOP):
        best = tl.argmax(wish, 0)
        chosen = tl.where(j == i, best, chosen)
        weight = tl.where(j == i, tl.sum(tl.where(e == best, chance, 0.0), 0), weight)
        wish = tl.where(e == best, float("-inf"), wish)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + least)
    at = token * TOP + j
    tl.store(weights + at, (weight * scale).to(weights.dtype.element_ty), mask=j < TOP)
    tl.store(numbers + at, chosen.to(tl.int64), mask=j < TOP)


def fits(experts: int, groups: int) -> bool:
    """Whether the kernel takes so many experts in so many groups."""
    powers = experts & (experts - 1) == 0 and groups & (groups - 1) == 0
    return experts <= 1024 and (groups == 1 or powers)


def route(
    logits_TE: Tensor,
    per_token: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    correction_E: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_score: Literal["max", "top2"] = "max",
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return weights, in the logits' dtype, and numbers [T, k] of each token's experts."""
    tokens, experts = logits_TE.shape
    weights = logits_TE.new_empty(tokens, per_token)
    numbers = torch.empty(tokens, per_token, dtype=torch.long, device=logits_TE.device)
    pdl, padded = overlaps(logits_TE.device), max(2, triton.next_power_of_2(experts))
    route_kernel[(tokens,)](
        logits_TE.contiguous(),
        weights if correction_E is None else correction_E,
        *(weights, numbers, float(scale), 1e-20 if score == "sigmoid" else 0.0),
        E=experts,
        PADDED=padded,
        TOP=per_token,
        TOP_PADDED=max(2, triton.next_power_of_2(per_token)),
        SIGMOID=score == "sigmoid",
        CORRECTED=correction_E is not None,
        GROUPS=groups,
        KEPT=groups_kept,
        TWO=group_score == "top2",
        NORMALISE=normalise,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return weights, numbers
