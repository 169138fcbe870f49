"""Causal attention of whole prompts, which see their own tokens alone: torch's (cuDNN on Hopper).

    [T, H, D]  =  rows 0..a of n tokens | rows a..b of m tokens | padding      a call for each run

A pool's own kernel takes keys block by block through its tables, which prompts do not need: 32 of
512 tokens, Llama-3.1-8B on an H200: 303 us a layer beside 183.

T tokens.  B rows.  Q tokens of a row.  H query heads.  G key/value heads.  D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LEAST_TOKENS = 512
"""Tokens of a run from which a call of its own pays."""


WIDEST = 256
"""Channels of a head up to which torch's attention makes no matrix of scores."""


def prompt_runs(starts: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return a step's rows as runs of (rows, tokens of each) if all are prompts from their start.

    None where runs are short.
    """
    if any(starts):
        return ()
    runs: list[tuple[int, int]] = []
    for count in counts:
        if runs and runs[-1][1] == count:
            runs[-1] = (runs[-1][0] + 1, count)
        else:
            runs.append((1, count))
    return tuple(runs) if sum(counts) >= LEAST_TOKENS * len(runs) else ()


def causal_attend(q_BHQD: Tensor, k_BGQD: Tensor, v_BGQD: Tensor, *, scale: float) -> Tensor:
    """Return attention [B, H, Q, D]."""
    # Other backends may round float32 operands to fewer bits.
    exact = q_BHQD.dtype == torch.float32
    with sdpa_kernel(SDPBackend.MATH) if exact else nullcontext():
        return functional.scaled_dot_product_attention(
            q_BHQD,
            k_BGQD,
            v_BGQD,
            is_causal=True,
            scale=scale,
            enable_gqa=q_BHQD.shape[1] != k_BGQD.shape[1],
        )


def prompt_attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    runs: Sequence[tuple[int, int]],
    *,
    scale: float,
) -> Tensor:
    """Return attention [T, H, D] of a step's prompts; zeros for what is behind them."""
    parts, first = [], 0
    for rows, tokens in runs:
        end = first + rows * tokens
        q, k, v = (
            x[first:end].unflatten(0, (rows, tokens)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD)
        )
        parts.append(causal_attend(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
        first = end
    if first < len(q_THD):
        parts.append(q_THD.new_zeros(len(q_THD) - first, *q_THD.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
