"""Choosing the next token: greedy, or seeded temperature / top-k / top-p / min-p sampling.

A row's random number depends on its request's seed and on how many tokens the request has
generated, on nothing else: not on its batch-mates, its slot or the number of stages. One uniform
number picks a token by inverting the row's cumulative distribution.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmpq.runtime.requests.request import NOT_FINITE_TOKEN, RowSampling
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.steps.device_copies import upload

__all__ = [
    "SamplerConfig",
    "draw",
    "finite_choices",
    "likeliest",
    "probabilities",
    "sample",
    "sample_with_torch",
    "sampler_of",
    "uniform",
]

_MASK = (1 << 64) - 1
_ELEMENTS_AT_ONCE = 1 << 20
"""Logits sampled together: about ten float copies of them live at once, which no plan counts."""
_LIKELY = 128
"""Tokens looked at before all are sorted (8 x 4096: 0.2 ms against 1.6; 8 x 128,000: 1 / 75)."""


def sample(logits_BV: Tensor, params: Sequence[SamplerConfig], steps: Sequence[int]) -> Tensor:
    """Return tokens [B]; `steps` counts the tokens each row's request has generated so far."""
    return sampler_of(params, steps, like=logits_BV)(logits_BV)


def sampler_of(
    params: Sequence[SamplerConfig], steps: Sequence[int], *, like: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return what samples logits [B, V], on a GPU with its parameters already there.

    `like`: logits of the same shape.

    `steps` counts the tokens each row's request has generated so far.
    """
    if not len(params) == len(steps) == like.shape[0]:
        raise ValueError(
            f"{like.shape[0]} rows of logits, {len(params)} params, {len(steps)} steps"
        )
    if like.is_cuda and not row_sampling(params).has_min_p:
        # Triton is not imported where there is no GPU.
        from llmpq.kernels.fused.draw_tokens import sample_rows

        rows = sampling_rows(params, steps, vocab=like.shape[-1])
        return partial(sample_rows, how_4B=upload(rows, torch.float64, like.device))
    return partial(sample_with_torch, params=params, steps=steps)


def sample_with_torch(
    logits_BV: Tensor, params: Sequence[SamplerConfig], steps: Sequence[int]
) -> Tensor:
    """As `sample`, on any device; logits may be -inf, not all of a row's."""
    tokens_B = likeliest(logits_BV)
    rows = [row for row, p in enumerate(params) if not p.greedy]
    at_once = max(1, _ELEMENTS_AT_ONCE // logits_BV.shape[-1])
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        places = upload(some, torch.long, logits_BV.device)
        probs = probabilities(logits_BV[places], [params[row] for row in some])
        values = [uniform(params[row].seed, steps[row]) for row in some]
        tokens_B[places] = draw(probs, upload(values, torch.float64, probs.device))
    return tokens_B


def likeliest(logits: Tensor) -> Tensor:
    """Return the first of the largest logits [..., V] as torch.argmax does.

    Of bfloat16 on CPUs that is a loop over single values: 8 x 128,256 on one core of a Xeon take
    2.4 ms of a step's 55, by `max` 0.3.
    """
    return logits.max(dim=-1).indices if logits.device.type == "cpu" else logits.argmax(dim=-1)


def finite_choices(tokens: Tensor, logits: Tensor, *, likeliest: bool = False) -> Tensor:
    """Return tokens [...] chosen by logits [..., V], `NOT_FINITE_TOKEN` where these are not finite.

    That is where a NaN is among them, or infinity is the largest. `likeliest`: the tokens are those
    of the largest logits, so that only these need be looked at.
    """
    top = logits.gather(-1, tokens[..., None])[..., 0] if likeliest else logits.amax(dim=-1)
    return tokens.masked_fill(~top.isfinite(), NOT_FINITE_TOKEN)


def row_sampling(params: Sequence[SamplerConfig]) -> RowSampling:
    """Return what rows ask, with what was collected of it before."""
    return params if isinstance(params, RowSampling) else RowSampling(params)


def sampling_rows(
    params: Sequence[SamplerConfig], steps: Sequence[int], *, vocab: int
) -> NDArray[np.float64]:
    """Return the kernel's parameters [4, B]: temperatures, k, p and random values.

    Of greedy rows k is 1: the most likely token is all there is.
    """
    rows = row_sampling(params)
    table = np.empty((4, len(rows)))
    table[:3] = rows.choices_3B
    table[1] = np.minimum(np.where(table[1] == 0, vocab, table[1]), vocab)
    table[3] = uniforms(rows.seeds_B, steps)
    return table


def probabilities(logits_BV: Tensor, params: Sequence[SamplerConfig]) -> Tensor:
    """Return the distributions [B, V] the rows are drawn from, in float32; greedy is one-hot."""
    device, vocab = logits_BV.device, logits_BV.shape[-1]
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    temperature_B = upload(temperatures, torch.float32, device)
    # No temperature is too small: the largest logit is 0 whatever it is divided by.
    temperature_B.clamp_(min=torch.finfo(torch.float32).tiny)
    logits_BV = logits_BV.float()
    scaled_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature_B[:, None]
    probs = torch.softmax(scaled_BV, dim=-1)
    ks = [1 if p.greedy else min(p.top_k or vocab, vocab) for p in params]
    cut = [row for row, p in enumerate(params) if ks[row] < vocab or p.top_p < 1.0]
    if not cut:
        return _without_unlikely(probs, params)
    # Most rows are decided by their most likely tokens; the others need them all in order. Which
    # a row takes is its own affair: its result must not depend on its batch-mates.
    # Logits say the order: a high temperature makes probabilities equal that they tell apart.
    likely = logits_BV[cut].topk(min(_LIKELY, vocab), dim=-1).indices
    likely_probs = probs[cut].gather(1, likely)
    mass = likely_probs.sum(dim=-1).tolist()
    decided = [
        ks[row] <= _LIKELY or (ks[row] == vocab and params[row].top_p <= mass[index])
        for index, row in enumerate(cut)
    ]
    for enough in (True, False):
        chosen = [index for index, yes in enumerate(decided) if yes == enough]
        if not chosen:
            continue
        rows = [cut[index] for index in chosen]
        if enough:
            values, order = likely_probs[chosen], likely[chosen]
        else:
            order = logits_BV[rows].argsort(dim=-1, descending=True)
            values = probs[rows].gather(1, order)
        k_of = [None if ks[row] == vocab else ks[row] for row in rows]
        kept = _truncate(values, k_of, [params[row].top_p for row in rows])
        probs[rows] = torch.zeros_like(probs[rows]).scatter_(1, order, kept)
    return _without_unlikely(probs, params)


def _without_unlikely(probs_BV: Tensor, params: Sequence[SamplerConfig]) -> Tensor:
    """Zero what min-p cuts off: less than this share of the most likely token's; renormalise."""
    rows = [row for row, p in enumerate(params) if p.min_p and not p.greedy]
    if rows:
        least_R = upload([params[row].min_p for row in rows], probs_BV.dtype, probs_BV.device)
        some = probs_BV[rows]
        some *= some >= least_R[:, None] * some.amax(dim=-1, keepdim=True)
        probs_BV[rows] = some / some.sum(dim=-1, keepdim=True)
    return probs_BV


def _truncate(sorted_BN: Tensor, ks: Sequence[int | None], top_ps: Sequence[float]) -> Tensor:
    """Zero what top-k, then top-p cut off rows sorted from likely to unlikely; renormalise."""
    device, length = sorted_BN.device, sorted_BN.shape[-1]
    k_B1 = torch.tensor([length if k is None else k for k in ks]).to(device)[:, None]
    top_p_B1 = torch.tensor(top_ps, dtype=torch.float32).to(device)[:, None]
    kept = sorted_BN * (torch.arange(length, device=device) < k_B1)
    # The share that top-p means: of the top k, or of all tokens, whose mass is 1.
    whole_B1 = torch.tensor([k is None for k in ks]).to(device)[:, None]
    mass_B1 = torch.where(whole_B1, 1.0, kept.sum(dim=-1, keepdim=True))
    before = (kept.cumsum(dim=-1) - kept) / mass_B1
    first = torch.arange(length, device=device) == 0
    kept = kept * ((before < top_p_B1) | (top_p_B1 >= 1.0) | first)
    return kept / kept.sum(dim=-1, keepdim=True)


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

    `stream` tells apart several values of one step (a draft's and its acceptance).
    """
    state = _mix(_mix(_mix(seed & _MASK) ^ (stream & _MASK)) ^ (step & _MASK))
    return (state >> 11) * 2.0**-53


def uniforms(seeds_B: NDArray[np.uint64], steps: Sequence[int]) -> NDArray[np.float64]:
    """Return `uniform` of each row's seed and step."""
    steps_B = np.asarray(steps, dtype=np.uint64)
    state_B = _mix_rows(_mix_rows(_mix_rows(seeds_B)) ^ steps_B)
    return (state_B >> np.uint64(11)).astype(np.float64) * 2.0**-53


_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of SplitMix64."""


def _mix(value: int) -> int:
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix_rows(values_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `_mix` of each; arrays of 64 bits wrap by themselves."""
    values_B = values_B + np.uint64(_STEP)
    values_B = (values_B ^ (values_B >> np.uint64(30))) * np.uint64(_FIRST)
    values_B = (values_B ^ (values_B >> np.uint64(27))) * np.uint64(_SECOND)
    return values_B ^ (values_B >> np.uint64(31))
