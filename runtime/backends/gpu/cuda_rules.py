"""Attention on a GPU with what some families do to scores: windows, caps, sinks, latents (MLA).

Legend: B rows, Q new tokens, h hidden, H query heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.latent_attention import LatentAttention
from llmpq.runtime.models.layers import Attention
from llmpq.runtime.step import Step


def rule_of(rule: ScoreRule | None, step: Step) -> ScoreRule:
    """Return what of a rule changes what a step computes: a window that no row fills does not."""
    if rule is None or not (rule.is_explicit or 0 < rule.window < step.max_end):
        return EVERYTHING
    return rule


def attend_fresh(
    kv: KVCache, part: Attention, index: int, qkv: tuple[Tensor, Tensor, Tensor], step: Step
) -> Tensor:
    """Return attention [B, Q, H, D] of windows that no cache keeps."""
    rule = rule_of(part.rule, step)
    options: dict[str, Any] = {} if rule.is_plain else {"rule": rule}
    return kv.attend(
        *(index, *qkv, step), scale=part.scale, alibi_slopes_H=part.alibi_slopes_H, **options
    )


def attend_latents(
    part: LatentAttention, x_BQh: Tensor, index: int, step: Step, kv: KVCache
) -> Tensor:
    """Append a step's latents, return attention [B, Q, H * V] before the output product."""
    new_BQ1D = part.cached(x_BQh, step)
    given = (index, part.queries(x_BQh, step), new_BQ1D, new_BQ1D, step)
    if kv.pages is not None:
        return part.values(kv.pages.attend(*given, scale=part.scale))
    return part.values(kv.attend(*given, scale=part.scale)[..., : part.latent.kv_rank])
