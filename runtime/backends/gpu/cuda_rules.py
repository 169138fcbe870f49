"""Attention on a GPU with what some families do to scores: windows, caps, sinks, latents (MLA).

One kernel (kernels/kv/ruled_attend.py) for decode steps and prompts, over the slots of a 16-bit
cache. Latents meet it absorbed in prompts too, three times the sums of keys and values made anew.
Packed caches have kernels of their own (attend.py, any_size_attend.py); whole prompts
attend to the tokens at hand there as well, whatever is kept of them.

Legend: B rows, Q new tokens, h hidden, H query heads, G key/value heads, D head_dim, S slots.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llmpq.kernels.fused import rope_append as fused_rope
from llmpq.kernels.kv import ruled_attend
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.runtime.cache.dual_kv import DualKV
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.models.latent_attention import LatentAttention
from llmpq.runtime.step import Step

WIDEST_OF_TORCH = 256
"""Channels of a head up to which torch's attention makes no matrix of scores."""


def rule_of(rule: ScoreRule | None, step: Step) -> ScoreRule:
    """Return what of a rule changes what a step computes: a window that no row fills does not."""
    if rule is None or not (rule.is_explicit or 0 < rule.window < step.max_end):
        return EVERYTHING
    return rule


def attend(
    q_BQHD: Tensor,
    k_SGTD: Tensor,
    v_SGTD: Tensor,
    step: Step,
    scale: float,
    rule: ScoreRule,
    value_dim: int | None = None,
) -> Tensor:
    """Return attention [B, Q, H, D] over the rows' slots, the step's own tokens included."""
    return ruled_attend.ruled_attend(
        *(q_BQHD, k_SGTD, v_SGTD, step.slots_B, step.start_B, step.num_new_B),
        max_end=step.max_end,
        scale=scale,
        rule=rule,
        value_dim=value_dim,
    )


def attend_packed(
    kv: KVCache,
    index: int,
    q_BQHD: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    step: Step,
    scale: float,
    rule: ScoreRule,
    alibi_slopes_H: Tensor | None = None,
) -> Tensor:
    """Append to a cache of 8, 4 or 2 bits and return attention [B, Q, H, D] over it."""
    packed = packed_of(kv)
    by_torch = rule.is_plain and q_BQHD.shape[3] <= WIDEST_OF_TORCH
    if by_torch or packed is None or not (step.fresh and packed.cache.exact_prompt):
        options: dict[str, Any] = {"scale": scale, "alibi_slopes_H": alibi_slopes_H}
        if not rule.is_plain:
            options["rule"] = rule
        return kv.attend(index, q_BQHD, k_BQGD, v_BQGD, step, **options)
    if kv.dual is not None:
        kv.dual.copy.append(index, k_BQGD, v_BQGD, step)
    packed.append(index, k_BQGD, v_BQGD, step)
    return ruled_attend.attend_prompts(
        q_BQHD, k_BQGD, v_BQGD, step.num_new_B, scale=scale, rule=rule
    )


def packed_of(kv: KVCache) -> LowBitKV | None:
    """Return a cache's slots of 8, 4 or 2 bits, those of the model beside a copy for drafts."""
    inner = kv.inner if isinstance(kv, DualKV) else kv
    return inner if isinstance(inner, LowBitKV) else None


def attend_latents(
    part: LatentAttention, x_BQh: Tensor, index: int, step: Step, kv: KVCache
) -> Tensor:
    """Append a step's latents, return attention [B, Q, H * V] before the output product."""
    new_BQ1D, rank, plain = part.cached(x_BQh, step), part.latent.kv_rank, kv.plain
    if kv.pages is not None:
        q_BQHD = part.queries(x_BQh, step)
        new = (new_BQ1D, new_BQ1D)
        return part.values(kv.pages.attend(index, q_BQHD, *new, step, scale=part.scale))
    if plain is None:
        q_BQHD = part.queries(x_BQh, step)
        given = (q_BQHD, new_BQ1D, new_BQ1D, step, part.scale, EVERYTHING)
        return part.values(attend_packed(kv, index, *given)[..., :rank])
    plain.check_room(step)
    k_SGTD, v_SGTD = plain.k[index], plain.v[index]
    rows = (step.slots_B, step.start_B, step.num_new_B)
    fused_rope.rope_append(new_BQ1D, new_BQ1D, new_BQ1D, k_SGTD, v_SGTD, *rows, None)
    if kv.dual is not None:
        kv.dual.keep(index, step, lambda copy: copy.append(index, new_BQ1D, new_BQ1D, step))
    q_BQHD = part.queries(x_BQh, step)
    summed = attend(q_BQHD, k_SGTD, v_SGTD, step, part.scale, EVERYTHING, rank)
    return part.values(summed)
