"""Choosing the next token: greedy, or seeded temperature / top-k / top-p sampling.

A row's random number depends on its request's seed and on how many tokens the request has
generated, on nothing else: not on its batch-mates, its slot or the number of stages. One uniform
number picks a token by inverting the row's cumulative distribution.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.runtime.sampling_params import SamplingParams

__all__ = ["SamplingParams", "draw", "probabilities", "sample", "uniform"]

_MASK = (1 << 64) - 1
_ELEMENTS_AT_ONCE = 1 << 20
"""Logits sampled together: about ten float copies of them live at once, which no plan counts."""


def sample(logits_BV: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> Tensor:
    """Return tokens [B]; `steps` counts the tokens each row's request has generated so far."""
    if not len(params) == len(steps) == logits_BV.shape[0]:
        raise ValueError(
            f"{logits_BV.shape[0]} rows of logits, {len(params)} params, {len(steps)} steps"
        )
    tokens_B = logits_BV.argmax(dim=-1)
    rows = [row for row, p in enumerate(params) if not p.greedy]
    at_once = max(1, _ELEMENTS_AT_ONCE // logits_BV.shape[-1])
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        probs = probabilities(logits_BV[some], [params[row] for row in some])
        numbers = [uniform(params[row].seed, steps[row]) for row in some]
        tokens_B[some] = draw(probs, torch.tensor(numbers, dtype=torch.float64).to(probs.device))
    return tokens_B


def probabilities(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the distributions [B, V] the rows are drawn from, in float32; greedy is one-hot."""
    device, vocab = logits_BV.device, logits_BV.shape[-1]
    safe = [1.0 if p.greedy else p.temperature for p in params]
    temperature_B = torch.tensor(safe, dtype=torch.float32).to(device)
    ks = [1 if p.greedy else min(p.top_k or vocab, vocab) for p in params]
    probs = torch.softmax(logits_BV.float() / temperature_B[:, None], dim=-1)
    if max(ks) == min(ks) == vocab and all(p.top_p == 1.0 for p in params):
        return probs
    sorted_BV, order_BV = probs.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=device)
    keep = rank_V < torch.tensor(ks).to(device)[:, None]
    sorted_BV = sorted_BV * keep
    sorted_BV /= sorted_BV.sum(dim=-1, keepdim=True)
    top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float32).to(device)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    sorted_BV = sorted_BV * ((before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1.0))
    sorted_BV /= sorted_BV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, order_BV, sorted_BV)


def draw(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return tokens [B]: the first whose cumulative probability exceeds the row's number."""
    cumulative = probs_BV.double().cumsum(dim=-1)
    threshold = uniforms_B.double()[:, None] * cumulative[:, -1:]
    tokens_B = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # Rounding may leave the number at the very end: the last token with a probability is meant.
    vocab = torch.arange(probs_BV.shape[-1], device=probs_BV.device)
    last_B = torch.where(probs_BV > 0, vocab, 0).amax(dim=-1)
    return torch.minimum(tokens_B, last_B)


def uniform(seed: int, step: int, stream: int = 0) -> float:
    """Return a number in [0, 1) of a request's step: SplitMix64 of (seed, stream, step).

    `stream` tells apart several numbers of one step (a draft's and its acceptance).
    """
    state = _mix(_mix(_mix(seed & _MASK) ^ (stream & _MASK)) ^ (step & _MASK))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
