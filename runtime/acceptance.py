"""Which drafted tokens the verifier keeps, and the one it adds.

Greedy rows keep the longest prefix of drafts that are the verifier's own choices, then take its
next choice. Sampled rows follow Leviathan et al. 2023 (arXiv 2211.17192): draft x, drawn from q, is
kept with probability min(1, p(x) / q(x)); the first one refused is replaced by a draw from
max(p - q, 0), renormalised; after all of them comes a draw from p. The result is distributed
exactly as p. Each decision has a random number of its own, from the request's seed and the token's
index, so a row does not depend on its batch-mates.

Legend: B rows, Q = drafts + 1 positions, V vocabulary, p verifier, q drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.runtime.sampling import draw, probabilities, uniform
from llmpq.runtime.sampling_params import SamplingParams

DRAFT_STREAM, ACCEPT_STREAM, REPLACE_STREAM = 1, 2, 3
"""Streams of random numbers beside plain sampling's 0."""


def draft_tokens(
    logits_BV: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return drafted tokens [B] and each sampled row's distribution q [V], None for greedy rows."""
    tokens_B = logits_BV.argmax(dim=-1)
    kept: list[Tensor | None] = [None] * len(params)
    rows = [row for row, p in enumerate(params) if not p.greedy]
    if rows:
        q = probabilities(logits_BV[rows], [params[row] for row in rows])
        numbers = [uniform(params[row].seed, steps[row], DRAFT_STREAM) for row in rows]
        tokens_B[rows] = draw(q, torch.tensor(numbers, dtype=torch.float64, device=q.device))
        for row, q_V in zip(rows, q, strict=True):
            kept[row] = q_V
    return tokens_B, kept


def accept(
    logits_BQV: Tensor,
    drafts: Sequence[Sequence[int]],
    draft_probs: Sequence[Sequence[Tensor] | None],
    params: Sequence[SamplingParams],
    steps: Sequence[int],
) -> list[list[int]]:
    """Return the new tokens of each row: its kept drafts and one token of the verifier's.

    `draft_probs` are the distributions the drafts were drawn from; None where they were not drawn
    (n-gram drafts), which counts as certainty. `steps` is the index of each row's first new token.
    """
    choices: list[list[int]] = logits_BQV.argmax(dim=-1).tolist()
    results = []
    for row, sampling in enumerate(params):
        drafted = list(drafts[row])
        if sampling.greedy:
            results.append(_accept_greedy(choices[row], drafted))
            continue
        p_QV = probabilities(logits_BQV[row, : len(drafted) + 1], [sampling] * (len(drafted) + 1))
        results.append(_accept_sampled(p_QV, drafted, draft_probs[row], sampling.seed, steps[row]))
    return results


def _accept_greedy(choices: Sequence[int], drafted: Sequence[int]) -> list[int]:
    kept = 0
    while kept < len(drafted) and drafted[kept] == choices[kept]:
        kept += 1
    return list(choices[: kept + 1])


def _accept_sampled(
    p_QV: Tensor, drafted: list[int], q: Sequence[Tensor] | None, seed: int, step: int
) -> list[int]:
    for place, token in enumerate(drafted):
        p_V = p_QV[place]
        q_V = _certain(token, p_V) if q is None else q[place]
        number = uniform(seed, step + place, ACCEPT_STREAM)
        if number * float(q_V[token]) >= float(p_V[token]):
            rest_V = (p_V - q_V).clamp_(min=0)
            # p = q up to rounding leaves nothing to draw from; then p itself is right.
            rest_V = rest_V if float(rest_V.sum()) > 0 else p_V
            replacement = _draw(rest_V, uniform(seed, step + place, REPLACE_STREAM))
            return [*drafted[:place], replacement]
    last = len(drafted)
    return [*drafted, _draw(p_QV[last], uniform(seed, step + last))]


def _certain(token: int, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_fill_(0, torch.tensor([token], device=like.device), 1.0)


def _draw(weights_V: Tensor, number: float) -> int:
    return int(draw(weights_V[None], torch.tensor([number], dtype=torch.float64)))
