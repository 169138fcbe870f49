"""A router's choice as one launch: scores of all experts in, weights and ids of k of them out.

    p = softmax(x) or sigmoid(x) of a token's logits [E], in float32      a program: one token
    rank_by = p + correction; of G groups only the best stay, by their largest value or largest two
    k times: the largest rank_by, the first of equals; its p is the weight
    weights / (their sum), times a scale

Bytes: E logits read, k weights and ids written a token; torch takes eight launches for it.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

LEAST = tl.constexpr(-(2**31))
"""Below every number."""


@triton.jit
def _largest_two(x_GP):
    """Sum of the two largest of each row, the largest counted twice where it stands twice."""
    best = tl.max(x_GP, 1)
    first = tl.argmax(x_GP, 1)
    column = tl.arange(0, x_GP.shape[1])
    rest = tl.where(column[None, :] == first[:, None], float("-inf"), x_GP)
    return best + tl.max(rest, 1)


@triton.jit
def _in_order(x):
    """Integers that stand in the order of the numbers: what a warp compares in one instruction."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["T", "scale", "least"])
def route_kernel(
    logits,
    bias,
    correction,
    weights,
    ids,
    T,
    scale,
    least,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TWO: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One of T tokens' experts; its logits are the sum of SHARES and a bias."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    x = tl.load(logits + token * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    for i in tl.static_range(1, SHARES):
        x += tl.load(logits + (i * T + token) * E + e, mask=e < E, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)
    if SIGMOID:
        chance = 1.0 / (1.0 + tl.exp(-x))
    else:
        share = tl.exp(x - tl.max(x, 0))
        chance = share / tl.sum(share, 0)
    rank_by = chance
    if CORRECTED:
        rank_by += tl.load(correction + e, mask=e < E, other=0.0)
    rank_by = tl.where(e < E, rank_by, float("-inf"))
    if GROUPS > 1:  # E is a power of two then
        by_group = tl.reshape(rank_by, (GROUPS, PADDED // GROUPS))
        score = _largest_two(by_group) if TWO else tl.max(by_group, 1)
        group = tl.arange(0, GROUPS)
        kept = tl.zeros([GROUPS], tl.int32)
        for _ in tl.static_range(KEPT):
            best = tl.argmax(score, 0)
            kept = tl.where(group == best, 1, kept)
            score = tl.where(group == best, float("-inf"), score)
        by_group = tl.where(kept[:, None] == 1, by_group, float("-inf"))
        rank_by = tl.reshape(by_group, (PADDED,))
    j = tl.arange(0, TOP_PADDED)
    chosen = tl.zeros([TOP_PADDED], tl.int32)
    weight = tl.zeros([TOP_PADDED], tl.int32)
    rank = _in_order(rank_by)
    own = chance.to(tl.int32, bitcast=True)  # above zero: in order as they are
    for i in tl.static_range(TOP):
        best = tl.min(tl.where(rank == tl.max(rank, 0), e, PADDED), 0)
        chosen = tl.where(j == i, best, chosen)
        weight = tl.where(j == i, tl.max(tl.where(e == best, own, 0), 0), weight)
        rank = tl.where(e == best, LEAST, rank)
    weight = weight.to(tl.float32, bitcast=True)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + least)
    at = token * TOP + j
    tl.store(weights + at, (weight * scale).to(weights.dtype.element_ty), mask=j < TOP)
    tl.store(ids + at, chosen.to(tl.int64), mask=j < TOP)


def fits(experts: int, groups: int) -> bool:
    """Whether the kernel takes so many experts in so many groups."""
    powers = experts & (experts - 1) == 0 and groups & (groups - 1) == 0
    return experts <= 1024 and (groups == 1 or powers)


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How a token's experts are chosen and weighed."""

    per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    normalise: bool = True
    scale: float = 1.0

    @property
    def least(self) -> float:
        """What is added to the sum that weights are divided by."""
        return 1e-20 if self.score == "sigmoid" else 0.0

    def constants(self, experts: int, *, corrected: bool) -> dict[str, int | bool]:
        """Return what `choose` is compiled for."""
        return {
            "E": experts,
            "PADDED": max(2, triton.next_power_of_2(experts)),
            "TOP": self.per_token,
            "TOP_PADDED": max(2, triton.next_power_of_2(self.per_token)),
            "SIGMOID": self.score == "sigmoid",
            "CORRECTED": corrected,
            "GROUPS": self.groups,
            "KEPT": self.groups_kept,
            "TWO": self.group_score == "top2",
            "NORMALISE": self.normalise,
        }


def route(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights, in the logits' dtype, and ids [T, k] of each token's experts."""
    return route_shares(logits_TE.contiguous()[None], rule, logits_TE.dtype, None, correction_E)


def route_shares(
    logits_STE: Tensor,
    rule: RouterRule,
    dtype: torch.dtype,
    bias_E: Tensor | None,
    correction_E: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Route by logits that are the sum of S partial sums and a bias, as `route` does."""
    shares, tokens, experts = logits_STE.shape
    weights = logits_STE.new_empty(tokens, rule.per_token, dtype=dtype)
    ids = torch.empty(weights.shape, dtype=torch.long, device=weights.device)
    pdl = overlaps(weights.device)
    route_kernel[(tokens,)](
        logits_STE,
        *(weights if given is None else given for given in (bias_E, correction_E)),
        weights,
        ids,
        tokens,
        float(rule.scale),
        rule.least,
        **rule.constants(experts, corrected=correction_E is not None),
        HAS_BIAS=bias_E is not None,
        SHARES=shares,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return weights, ids
