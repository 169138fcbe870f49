"""Low-bit attention recomputed from the whole 16-bit history: the oracle of cache and kernels.

Uses neither pages nor rings nor packing: each query's keys are quantised anew, from the definition
(llmpq/sizes/kv_format.py). Slow, float64, for tests and `kernel_bench.py check kv`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat, quantize
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.sizes.kv_format import BLOCK_TOKENS, packed_end


def dequantised(fmt: KVFormat, x_TGD: Tensor, *, keys: bool) -> Tensor:
    """Round whole blocks of keys or values [T, G, D] to the format, in float64."""
    if keys and fmt.plain_keys:
        return x_TGD.double()
    blocks = x_TGD.unflatten(0, (-1, BLOCK_TOKENS))
    codes, scale, zero = quantize(
        blocks, fmt.key_bits if keys else fmt.value_bits, -3 if keys else -1
    )
    return (codes.double() * scale.double() + zero.double()).flatten(0, 1)


def attend_from_history(
    fmt: KVFormat,
    q_QHD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    *,
    start: int,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    quantised: bool = True,
    rule: ScoreRule = EVERYTHING,
) -> Tensor:
    """Return what queries at start, start + 1, ... see of one request; [Q, H, D] float64."""
    heads, kv_heads = q_QHD.shape[1], k_TGD.shape[1]
    out = []
    for i, q_HD in enumerate(q_QHD.double()):
        position = start + i
        line = packed_end(position) if quantised else 0
        k, v = k_TGD[: position + 1].double(), v_TGD[: position + 1].double()
        if line:
            k = torch.cat([dequantised(fmt, k_TGD[:line], keys=True), k[line:]])
            v = torch.cat([dequantised(fmt, v_TGD[:line], keys=False), v[line:]])
        q_GCD = q_HD.unflatten(0, (kv_heads, heads // kv_heads))
        scores = torch.einsum("gcd,tgd->gct", q_GCD, k) * scale
        if alibi_slopes_H is not None:
            distance = torch.arange(position + 1, device=k.device) - position
            scores = scores + alibi_slopes_H.double().reshape(kv_heads, -1, 1) * distance
        share = _ruled(scores, rule, position).softmax(-1)[..., : position + 1]
        out.append(torch.einsum("gct,tgd->gcd", share, v).flatten(0, 1))
    return torch.stack(out)


def _ruled(scores_GCT: Tensor, rule: ScoreRule, position: int) -> Tensor:
    """Return the scores under a rule; a sink stands behind the keys."""
    if rule.cap:
        scores_GCT = (scores_GCT / rule.cap).tanh() * rule.cap
    if rule.window:
        scores_GCT[..., : max(0, position - rule.window + 1)] = float("-inf")
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.double().reshape(*scores_GCT.shape[:2], 1)
        scores_GCT = torch.cat((scores_GCT, sinks), dim=-1)
    return scores_GCT


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; infinite if anything is not finite."""
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    return error.item() if math.isfinite(error.item()) else math.inf
