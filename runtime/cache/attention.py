"""Causal attention of the tokens of padded rows, and what pools on CPUs share with it.

Legend: B rows, Q new tokens, T keys, H query heads, G key/value heads, R = H / G, D head_dim.
ALiBi adds slope[h] * (key position - query position) to the scores (BLOOM; Press et al. 2022);
softmax ignores the constant by which that differs from slope * key position. A `ScoreRule` adds
what other families do to scores: windows, soft caps, sinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.families.common.spec_values import QueryGrowth
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule, Scoring, attend_chosen
from llmpq.runtime.steps.step import Step

NEG_INF = float("-inf")


def attend_padded(
    q_BQHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    step: Step,
    scoring: Scoring,
) -> Tensor:
    """Return o [B, Q, H, D] over the keys of each row's request, from its first on: [B, T, G, D].

    Rows are padded on the right, so no valid query sees padding.
    """
    scale, alibi_slopes_H, rule = scoring.scale, scoring.alibi_slopes_H, scoring.rule
    if rule.chosen is not None:
        return _chosen(q_BQHD, [k_TGD[:, 0] for k_TGD in k_BTGD], step, scale, rule)
    if rule.is_explicit:
        k, v = k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2)
        return _explicit(q_BQHD, k, v, step, scale, rule)
    bias = None
    window = rule.window if 0 < rule.window < step.max_end else 0
    if alibi_slopes_H is not None or window or not step.fresh:
        bias = step.once(
            f"bias{window} 1",
            lambda: score_bias(
                step, alibi_slopes_H, 1, q_BQHD.dtype, rule if window else EVERYTHING
            ),
        )
    o_BHQD = functional.scaled_dot_product_attention(
        q_BQHD.transpose(1, 2),
        k_BTGD.transpose(1, 2),
        v_BTGD.transpose(1, 2),
        attn_mask=bias,
        is_causal=bias is None,
        scale=scale,
        enable_gqa=q_BQHD.shape[2] != k_BTGD.shape[2],
    )
    return o_BHQD.transpose(1, 2)


def _chosen(
    q_BQHD: Tensor, keys: Sequence[Tensor], step: Step, scale: float, rule: ScoreRule
) -> Tensor:
    """Return o [B, Q, H, D] over the keys [T, D] of every row that an indexer chooses."""
    assert rule.chosen is not None
    found = []
    positions_BQ = step.positions_BQ.expand(step.batch, -1)
    for q_QHD, k_TD, positions_Q in zip(q_BQHD, keys, positions_BQ, strict=True):
        k_TD = k_TD[: step.max_end]
        seen_QT = torch.arange(len(k_TD), device=k_TD.device) <= positions_Q[:, None]
        found.append(attend_chosen(q_QHD, k_TD, seen_QT, rule.chosen, scale=scale))
    return torch.stack(found)


def _explicit(
    q_BQHD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, step: Step, scale: float, rule: ScoreRule
) -> Tensor:
    """Return o [B, Q, H, D] with the scores as values, [B, G, R * Q, T] in float32."""
    (batch, q_len, heads, dim), groups = q_BQHD.shape, k_BGTD.shape[1]
    rep = heads // groups
    window = rule.window if 0 < rule.window < step.max_end else 0
    bias = step.once(
        f"whole bias{window} {rep}",
        lambda: score_bias(step, None, rep, torch.float32, rule if window else EVERYTHING),
    )
    q_BGRQD = q_BQHD.view(batch, q_len, groups, rep, dim).permute(0, 2, 3, 1, 4)
    q = q_BGRQD.reshape(batch, groups, rep * q_len, dim)
    sinks = sinks_of(rule, groups, q_len)
    o = with_scores(q, k_BGTD, v_BGTD, bias, sinks, scale=scale, cap=rule.cap)
    o_BGRQD = o.view(batch, groups, rep, q_len, dim)
    return o_BGRQD.permute(0, 3, 1, 2, 4).reshape(batch, q_len, heads, dim)


def sinks_of(rule: ScoreRule, groups: int, q_len: int) -> Tensor | None:
    """Return the sinks of R * Q query rows of every key/value head, [1, G, R * Q, 1] float32."""
    if rule.sinks_H is None:
        return None
    by_group = rule.sinks_H.float().view(1, groups, -1, 1)
    return by_group.repeat_interleave(q_len, dim=2)


def with_scores(
    q_BGMD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    bias: Tensor,
    sinks_1GM1: Tensor | None,
    *,
    scale: float,
    cap: float,
) -> Tensor:
    """Return [B, G, M, D] of M query rows of every key/value head, with caps and sinks.

    `bias`: -inf at unseen keys, float32, whatever gives [B, G, M, T].
    """
    scores = torch.matmul(q_BGMD, k_BGTD.transpose(-1, -2)).float().mul_(scale)
    if cap:
        scores.div_(cap).tanh_().mul_(cap)
    scores += bias
    if sinks_1GM1 is not None:
        scores = torch.cat((scores, sinks_1GM1.expand(scores.shape[0], -1, -1, -1)), dim=-1)
    share = scores.softmax(dim=-1)[..., : k_BGTD.shape[2]].to(v_BGTD.dtype)
    return torch.matmul(share, v_BGTD)


def score_bias(
    step: Step,
    alibi_slopes_H: Tensor | None,
    rep: int,
    dtype: torch.dtype,
    rule: ScoreRule = EVERYTHING,
) -> Tensor:
    """Return what is added to the scores: -inf at unseen keys, plus ALiBi's slopes.

    Shape [B, 1, R * Q, T], or [B, H, Q, T] with slopes; B is 1 when all rows are alike.
    """
    keys_T = torch.arange(step.max_end, device=step.start_B.device)
    positions_BQ1 = step.positions_BQ[:, :, None]
    future = keys_T > positions_BQ1
    if rule.window:
        future |= keys_T <= positions_BQ1 - rule.away(positions_BQ1)
    if alibi_slopes_H is None:
        bias = torch.zeros(future.shape, dtype=dtype, device=keys_T.device)
        return bias.masked_fill_(future, NEG_INF)[:, None].repeat(1, 1, rep, 1)
    ahead_BQT = keys_T - positions_BQ1
    bias = (alibi_slopes_H[:, None, None] * ahead_BQT[:, None]).to(dtype)
    return bias.masked_fill_(future[:, None], NEG_INF)


def query_factors(step: Step, growth: QueryGrowth, dtype: torch.dtype) -> Tensor:
    """Return what the queries of a step are multiplied by, [B or 1, Q, 1, 1]."""

    def made() -> Tensor:
        ahead_BQ = torch.floor((step.positions_BQ + growth.ahead).float() / growth.length)
        return (torch.log1p(ahead_BQ) * growth.beta + 1.0).to(dtype)[:, :, None, None]

    found: Tensor = step.once("query factors", made)
    return found


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slope of each head: 2^(-8 i / n), odd ones of 2n between for other counts."""
    power = 1 << (heads.bit_length() - 1)
    base = 2.0 ** (-8.0 / power)
    slopes = [base**i for i in range(1, power + 1)]
    extra = 2.0 ** (-4.0 / power)
    slopes += [extra**i for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32)
