"""Which drafted tokens the verifier keeps, and the one it adds.

Greedy rows keep the longest prefix of drafts that are the verifier's own choices, then take its
next choice. So do sampled rows whose drafts were not drawn (n-grams): the verifier's choice at a
place is what it draws there without drafts, so that answers are the same with drafts and without,
wherever rounds begin; x is kept with probability p(x), the most there is for such drafts.

Drafts that were drawn follow Leviathan et al. 2023 (arXiv 2211.17192): draft x, drawn from q, is
kept with probability min(1, p(x) / q(x)); the first one refused is replaced by a draw from
max(p - q, 0), renormalised; after all of them comes a draw from p. The result is distributed
exactly as p, but which token it is depends on where the round began. Each decision has a random
number of its own, from the request's seed and the token's index, so a row does not depend on its
batch-mates.

Legend: B rows, R sampled rows, Q = drafts + 1 positions, G drafts, V vocabulary, p verifier,
q drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.runtime.models.sampling import (
    draw,
    finite_choices,
    likeliest,
    probabilities,
    uniform,
)
from llmpq.runtime.requests.request import NOT_FINITE_TOKEN
from llmpq.runtime.requests.sampling_params import SamplerConfig

_ELEMENTS_AT_ONCE, _ELEMENTS_ON_GPU = 1 << 20, 1 << 25
"""Logits decided together: some float copies of them live at once, which no plan counts."""
DRAFT_STREAM, ACCEPT_STREAM, REPLACE_STREAM = 1, 2, 3
"""Streams of random numbers beside plain sampling's 0."""


def draft_tokens(
    logits_BV: Tensor, params: Sequence[SamplerConfig], steps: Sequence[int]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return drafted tokens [B] and each sampled row's distribution q [V], None for greedy rows."""
    tokens_B = likeliest(logits_BV)
    kept: list[Tensor | None] = [None] * len(params)
    rows = [row for row, p in enumerate(params) if not p.greedy]
    if rows:
        q = probabilities(logits_BV[rows], [params[row] for row in rows])
        numbers = [uniform(params[row].seed, steps[row], DRAFT_STREAM) for row in rows]
        tokens_B[rows] = draw(q, torch.tensor(numbers, dtype=torch.float64, device=q.device))
        for row, q_V in zip(rows, q, strict=True):
            kept[row] = q_V
    return tokens_B, kept


def agreeing_prefix(drafts_BG: Tensor, choices_BQ: Tensor, drafted_B: Tensor) -> Tensor:
    """Return the length of each row's longest prefix of drafts that are the verifier's choices.

    Greedy, on a device; `drafted_B`: how many drafts each row has.
    """
    same_BG = (drafts_BG == choices_BQ[:, :-1]).to(torch.long)
    return torch.minimum(same_BG.cumprod(dim=1).sum(dim=1), drafted_B)


class DraftProbs:
    """The distributions q that unverified drafts were drawn from, by slot and position."""

    def __init__(self) -> None:
        self._by_slot: dict[int, dict[int, Tensor]] = {}

    def note(
        self, slots: Sequence[int], positions: Sequence[int], probs: Sequence[Tensor | None]
    ) -> None:
        """Take those of a draft step; what was drafted before at a position is void."""
        for slot, position, q_V in zip(slots, positions, probs, strict=True):
            if q_V is not None:
                self._by_slot.setdefault(slot, {})[position] = q_V

    def take(self, slot: int, start: int, count: int) -> list[Tensor] | None:
        """Return those of `count` drafts behind position `start`; None of drafts not drawn."""
        own = self._by_slot.pop(slot, {})
        found = [own[position] for position in range(start, start + count) if position in own]
        return found if len(found) == count else None


def accept(
    logits_BQV: Tensor,
    drafts: Sequence[Sequence[int]],
    draft_probs: Sequence[Sequence[Tensor] | None],
    params: Sequence[SamplerConfig],
    steps: Sequence[int],
) -> list[list[int]]:
    """Return the new tokens of each row: its kept drafts and one token of the verifier's.

    They end with `NOT_FINITE_TOKEN` at a position whose logits are not finite.

    `draft_probs` are the distributions the drafts were drawn from; None where they were not drawn
    (n-gram drafts). `steps` is the index of each row's first new token.
    """
    likeliest_BQ = likeliest(logits_BQV)
    choices: list[list[int]] = finite_choices(likeliest_BQ, logits_BQV, likeliest=True).tolist()
    results = [_accept_greedy(choices[row], list(drafts[row])) for row in range(len(params))]
    sampled = [row for row, sampling in enumerate(params) if not sampling.greedy]
    elements = _ELEMENTS_ON_GPU if logits_BQV.is_cuda else _ELEMENTS_AT_ONCE
    at_once = max(1, elements // logits_BQV[0].numel())
    for drawn in (False, True):
        alike = [row for row in sampled if (draft_probs[row] is not None) == drawn]
        for start in range(0, len(alike), at_once):
            rows = alike[start : start + at_once]
            how = [params[row] for row in rows], [steps[row] for row in rows]
            own = [drafts[row] for row in rows]
            if drawn:
                probs = [draft_probs[row] or () for row in rows]
                chosen = _accept_drawn(logits_BQV[rows], own, probs, *how)
            else:
                picked = _draws(logits_BQV[rows], *how)
                chosen = [_accept_greedy(*pair) for pair in zip(picked, own, strict=True)]
            for row, tokens in zip(rows, chosen, strict=True):
                results[row] = _while_finite(tokens, choices[row])
    return results


def _draws(
    logits_RQV: Tensor, params: Sequence[SamplerConfig], steps: Sequence[int]
) -> list[list[int]]:
    """Return the token that each row draws at each place without drafts."""
    width = logits_RQV.shape[1]
    repeated = [sampling for sampling in params for _ in range(width)]
    numbers_RQ = _uniforms(params, steps, width, 0).to(logits_RQV.device)
    p_NV = probabilities(logits_RQV.flatten(0, 1), repeated)
    found: list[list[int]] = draw(p_NV, numbers_RQ.flatten()).view(-1, width).tolist()
    return found


def _accept_greedy(choices: Sequence[int], drafted: Sequence[int]) -> list[int]:
    kept = 0
    while kept < len(drafted) and drafted[kept] == choices[kept]:
        kept += 1
    return list(choices[: kept + 1])


def _while_finite(tokens: list[int], choices: Sequence[int]) -> list[int]:
    """Return tokens up to the first position where none could be chosen."""
    if NOT_FINITE_TOKEN not in choices:
        return tokens
    return [*tokens[: choices.index(NOT_FINITE_TOKEN)], NOT_FINITE_TOKEN][: len(tokens)]


def _accept_drawn(
    logits_RQV: Tensor,
    drafts: Sequence[Sequence[int]],
    draft_probs: Sequence[Sequence[Tensor]],
    params: Sequence[SamplerConfig],
    steps: Sequence[int],
) -> list[list[int]]:
    """Decide rows on the device of their logits; it is asked once, for the result."""
    counts = [len(row) for row in drafts]
    width, device = max(counts), logits_RQV.device
    logits_RQV = logits_RQV[:, : width + 1]
    repeated = [sampling for sampling in params for _ in range(width + 1)]
    p_RQV = probabilities(logits_RQV.flatten(0, 1), repeated).view(logits_RQV.shape)
    count_R = torch.tensor(counts).to(device)
    padded = [[*row, *[0] * (width - len(row))] for row in drafts]
    tokens_RG = torch.tensor(padded, dtype=torch.long).view(len(drafts), width).to(device)
    q_RQV = _drafters(p_RQV, draft_probs)
    stop_R = _first_refused(p_RQV, q_RQV, tokens_RG, count_R, params, steps)
    rows_R = torch.arange(len(drafts), device=device)
    p_RV, q_RV = p_RQV[rows_R, stop_R], q_RQV[rows_R, stop_R]
    # Behind the last draft the verifier draws by itself.
    done_R = stop_R == count_R
    weights_RV = torch.where(done_R[:, None], p_RV, leftover(p_RV, q_RV))
    plain_RQ, replace_RQ = (
        _uniforms(params, steps, width + 1, stream).to(device) for stream in (0, REPLACE_STREAM)
    )
    numbers_RQ = torch.where(done_R[:, None], plain_RQ, replace_RQ)
    last_R = draw(weights_RV, numbers_RQ[rows_R, stop_R])
    kept, last = torch.stack((stop_R, last_R)).tolist()
    return [[*row[:k], token] for row, k, token in zip(drafts, kept, last, strict=True)]


def leftover(p_RV: Tensor, q_RV: Tensor) -> Tensor:
    """Return what a refused draft is replaced from, max(p - q, 0), not normalised."""
    rest_RV = (p_RV - q_RV).clamp_(min=0)
    # p = q up to rounding leaves nothing to draw from; then p itself is right.
    return torch.where(rest_RV.sum(dim=1, keepdim=True) > 0, rest_RV, p_RV)


def _first_refused(
    p_RQV: Tensor,
    q_RQV: Tensor,
    tokens_RG: Tensor,
    count_R: Tensor,
    params: Sequence[SamplerConfig],
    steps: Sequence[int],
) -> Tensor:
    """Return the place of each row's first refused draft; its number of drafts if all are kept."""
    width = tokens_RG.shape[1]
    places = torch.arange(width + 1, device=count_R.device)
    ends_RQ = places >= count_R[:, None]
    if width:
        numbers_RG = _uniforms(params, steps, width, ACCEPT_STREAM).to(count_R.device)
        at = tokens_RG[:, :, None]
        p_RG = p_RQV[:, :width].gather(2, at)[:, :, 0].double()
        q_RG = q_RQV[:, :width].gather(2, at)[:, :, 0].double()
        ends_RQ[:, :width] |= numbers_RG * q_RG >= p_RG
    return ends_RQ.to(torch.long).argmax(dim=1)


def _drafters(p_RQV: Tensor, draft_probs: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the distributions the drafts come from."""
    q_RQV = torch.zeros_like(p_RQV)
    for row, probs in enumerate(draft_probs):
        if probs:
            q_RQV[row, : len(probs)] = torch.stack(list(probs))
    return q_RQV


def _uniforms(
    params: Sequence[SamplerConfig], steps: Sequence[int], count: int, stream: int
) -> Tensor:
    """Return the random numbers of each row's next tokens [R, count]."""
    return torch.tensor(
        [
            [uniform(sampling.seed, step + place, stream) for place in range(count)]
            for sampling, step in zip(params, steps, strict=True)
        ],
        dtype=torch.float64,
    )
