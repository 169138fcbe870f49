"""Attention on a GPU with what some families do to scores: windows, caps, sinks, latents (MLA).

One kernel (kernels/kv/ruled_attend.py) for decode steps and prompts, over the slots of a 16-bit
cache. Latents meet it absorbed in prompts too, three times the sums of keys and values made anew.

Legend: B rows, Q new tokens, h hidden, H query heads, G key/value heads, D head_dim, S slots.
"""

from __future__ import annotations

from torch import Tensor

from llmpq.kernels.fused import rope_append as fused_rope
from llmpq.kernels.kv import ruled_attend
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.latent_attention import LatentAttention
from llmpq.runtime.step import Step


def counts(rule: ScoreRule, step: Step) -> bool:
    """Whether a rule changes what a step computes: a window that no row has filled does not."""
    return rule.is_explicit or 0 < rule.window < step.max_end


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


def attend_latents(
    part: LatentAttention, x_BQh: Tensor, index: int, step: Step, kv: KVCache
) -> Tensor:
    """Append a step's latents, return attention [B, Q, H * V] before the output product."""
    plain = kv.plain
    if plain is None:
        raise ValueError("a GPU's KV cache of 8, 4 or 2 bits holds no latents (MLA) yet")
    plain.check_room(step)
    k_SGTD, v_SGTD = plain.k[index], plain.v[index]
    new_BQ1D = part.cached(x_BQh, step)
    rows = (step.slots_B, step.start_B, step.num_new_B)
    fused_rope.rope_append(new_BQ1D, new_BQ1D, new_BQ1D, k_SGTD, v_SGTD, *rows, None)
    q_BQHD, rank = part.queries(x_BQh, step), part.latent.kv_rank
    summed = attend(q_BQHD, k_SGTD, v_SGTD, step, part.scale, EVERYTHING, rank)
    return part.values(summed)
