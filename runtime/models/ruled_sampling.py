"""Choosing tokens where requests have rules: penalties, biases, guides; and noting logprobs.

Logits change in this order: repetition, frequency and presence penalties, logit_bias, then what is
forbidden (ends before `min_tokens`, bad runs, what a guide does not allow). Then the row is sampled
as any other. What a row gets depends on its own request only, and on tokens by their place, so a
step that is done again (a request that was set aside and recomputed) gives the same.

Without a guide or logprobs nothing waits for the device: the tokens so far stay on it. A guide
waits for the last token only, which is there before the step that builds on it has ended: what may
come next is found while the device computes, and goes to it as bits.

Legend: B rows, V vocabulary, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from llmpq.runtime.models.sampling import sample, sampler_of
from llmpq.runtime.requests.request import StepMessage
from llmpq.runtime.requests.token_rules import (
    NO_RULES,
    LogitsConstraints,
    LogprobOutput,
    TokenScore,
    TokenScores,
)
from llmpq.runtime.steps.device_copies import HostCopy, arrived, to_host_async, upload

_POSITIONS_AT_ONCE = 64
"""Positions of a prompt whose logits are made together: a few float copies of them live at once."""


class TokenAutomaton(Protocol):
    """What a guide allows next."""

    failure: str | None
    """Why the guide could not be followed to its end, once that is so."""

    def allowed_of(
        self,
        answers: Sequence[tuple[Self, Sequence[int]]],
        vocab: int,
        *,
        pinned: bool = False,
        meanwhile: bool = False,
    ) -> Callable[[], Tensor]:
        """Find which tokens may follow each of several answers so far, by their automata.

        What the call returned returns is on the host, a row each, token t as bit t % 8 of byte
        t // 8; beyond V may be more bits. `pinned`: in memory from which a GPU copies on its own.
        `meanwhile`: by other threads, from now on.
        """
        ...


@dataclass
class _Coming:
    """A step's tokens [B], on their way to the host."""

    tokens_B: Tensor | HostCopy

    @cached_property
    def known(self) -> list[int]:
        """The tokens; waits for them."""
        return [int(token) for token in arrived(self.tokens_B).tolist()]


@dataclass
class _Ruled:
    """A request's rules and what is known of it so far."""

    rules: LogitsConstraints
    automaton: TokenAutomaton | None
    chosen: Tensor = field(init=False)
    """The answer's tokens by place, with room for more; on the device of the logits."""
    noted: LogprobOutput = field(default_factory=LogprobOutput)
    num_fetched: int = 0
    """Scores of the answer that were fetched."""
    num_scored: int = 0
    """Tokens of the prompt whose follower was scored."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Tensors made of the rules once."""
    known: list[int] = field(init=False)
    """Of a guided answer: its tokens that the host knows."""
    coming: tuple[int, _Coming, int] | None = None
    """Of a guided answer: the newest token's place, the step's tokens and its row among them."""

    def __post_init__(self) -> None:
        """Go on from the tokens that the answer has, whose scores were fetched elsewhere."""
        self.chosen = torch.tensor(self.rules.answer, dtype=torch.long)
        self.known = list(self.rules.answer)

    @property
    def counts_tokens(self) -> bool:
        """Whether logits depend on the answer's tokens as the device has them."""
        rules = self.rules
        penal = rules.frequency_penalty or rules.presence_penalty or rules.bad_tokens
        penal = penal or (rules.thinking is not None and rules.thinking.tokens is not None)
        return bool(penal) or rules.repetition_penalty != 1.0

    def answer(self, step: int) -> list[int]:
        """Return a guided answer before a place, waiting for the token before it."""
        if self.coming is not None:
            place, step_tokens, row = self.coming
            self.known[place:] = [step_tokens.known[row]]
            self.coming = None
        return self.known[:step]

    def before(self, step: int, device: torch.device) -> Tensor:
        """Return the tokens of the answer [N] before a place."""
        if self.chosen.device != device or len(self.chosen) <= step:
            room = torch.zeros(max(64, 2 * step), dtype=torch.long, device=device)
            room[: min(step, len(self.chosen))] = self.chosen[:step].to(device)
            self.chosen = room
        return self.chosen[:step]

    def once(self, name: str, values: Sequence[float], like: Tensor) -> Tensor:
        """Return values as a tensor on a device."""
        found = self.kept.get(name)
        if found is None or found.device != like.device:
            found = self.kept[name] = torch.tensor(values, dtype=like.dtype, device=like.device)
        return found

    def unscored(self, start: int, count: int) -> tuple[int, int] | None:
        """Return the first and last + 1 place of a step whose follower is to be scored yet."""
        if self.rules.prompt_logprobs is None:
            return None
        first, end = max(start, self.num_scored), min(start + count, len(self.rules.prompt) - 1)
        return (first, end) if first < end else None


@dataclass(frozen=True)
class _Masks:
    """What guided answers of a step may go on with, and whose rules count in it."""

    ruled: dict[int, _Ruled]
    """By row. Those that end meanwhile are forgotten, but may have one row more."""
    bits_GB: Callable[[], Tensor]

    @classmethod
    def of(
        cls, ruled: dict[int, _Ruled], steps: Sequence[int], logits: Tensor, *, meanwhile: bool
    ) -> Self:
        """Begin to find them; some row must have a guide."""
        answers = [
            (known.automaton, known.answer(steps[row]))
            for row, known in ruled.items()
            if known.automaton is not None
        ]
        first, _ = answers[0]
        how = {"pinned": logits.is_cuda, "meanwhile": meanwhile}
        return cls(ruled, first.allowed_of(answers, logits.shape[-1], **how))


class ConstrainedSampler:
    """The sampler of a last stage: requests that have rules are known to it by number."""

    def __init__(self) -> None:
        self._known: dict[int, _Ruled] = {}
        self._masks: _Masks | None = None
        """Of the step that is drawn next, if they were begun."""

    def take_rules(
        self, number: int, rules: LogitsConstraints, automaton: TokenAutomaton | None = None
    ) -> None:
        """Learn the rules of a request that has not begun; may be called from any thread.

        `automaton`: of its guide, if it has one.
        """
        assert (automaton is None) == (rules.guide is None)
        self._known[number] = _Ruled(rules, automaton)

    def forget(self, number: int) -> None:
        """Drop a request that has ended."""
        self._known.pop(number, None)

    def noted(self, number: int) -> LogprobOutput:
        """Return the scores of a request that were not fetched before."""
        ruled = self._known.get(number)
        if ruled is None:
            return LogprobOutput()
        failure = None if ruled.automaton is None else ruled.automaton.failure
        scored = ruled.noted
        new = LogprobOutput(
            output=scored.output[ruled.num_fetched :], prompt=scored.prompt, failure=failure
        )
        ruled.num_fetched += len(new.output)
        ruled.noted.prompt = []
        return new

    def knows(self, message: StepMessage) -> bool:
        """Whether a row of a step has rules."""
        rules_B = message.rules_B
        if not len(rules_B):
            return False
        return any(number in self._known for number in rules_B[rules_B != NO_RULES].tolist())

    def scores_prompts(self, message: StepMessage) -> bool:
        """Whether other positions of a step than the last ones are asked for."""
        starts_B, counts_B = message.starts_B, message.num_new_B
        return any(
            ruled.unscored(int(starts_B[row]), int(counts_B[row])) is not None
            for row, ruled in self._ruled(message).items()
        )

    def look_ahead(self, message: StepMessage, logits: Tensor) -> bool:
        """Have other threads find masks of guides for `pick` of these rows; whether there are any.

        Waits for the tokens before. `logits`: of their vocabulary, and where they will be.
        """
        ruled = self._ruled(message)
        if all(known.automaton is None for known in ruled.values()):
            return False
        self._masks = _Masks.of(ruled, message.sample_steps_B.tolist(), logits, meanwhile=True)
        return True

    def pick(self, logits_BV: Tensor, message: StepMessage) -> Tensor:
        """Return tokens [B] of a step's rows, and note what their rules ask."""
        params, steps = message.sampling, message.sample_steps_B.tolist()
        masks, self._masks = self._masks, None
        ruled = self._ruled(message) if masks is None else masks.ruled
        changed = [row for row, known in ruled.items() if known.rules.changes_logits]
        if len(changed) == message.num_rows:
            draw = sampler_of(params, steps, like=logits_BV)  # before masks are waited for
            tokens_B = draw(ruled_logits(ruled.values(), steps, logits_BV, masks))
        else:
            tokens_B = sample(logits_BV, params, steps)
        if 0 < len(changed) < message.num_rows:
            where, own = upload(changed, torch.long, logits_BV.device), [steps[r] for r in changed]
            some = [ruled[row] for row in changed]
            logits_RV = logits_BV[where]
            draw = sampler_of([params[row] for row in changed], own, like=logits_RV)
            tokens_B.index_copy_(0, where, draw(ruled_logits(some, own, logits_RV, masks)))
        self._keep_tokens(ruled, steps, tokens_B, logits_BV)
        return tokens_B

    def _ruled(self, message: StepMessage) -> dict[int, _Ruled]:
        """Return the rules of a step's rows, by row."""
        rules_B = message.rules_B
        if not len(rules_B):
            return {}
        rows = np.flatnonzero(rules_B != NO_RULES)
        numbers = zip(rows.tolist(), rules_B[rows].tolist(), strict=True)
        found = ((row, self._known.get(number)) for row, number in numbers)
        return {row: known for row, known in found if known is not None}

    def _keep_tokens(
        self, ruled: Mapping[int, _Ruled], steps: Sequence[int], tokens_B: Tensor, logits_BV: Tensor
    ) -> None:
        """Remember tokens of rows with rules, those of guides on their way to the host."""
        coming = None
        for row, known in ruled.items():
            if known.counts_tokens or known.rules.logprobs is not None:
                _keep(known, steps[row], tokens_B[row], logits_BV[row])
            if known.automaton is not None:
                coming = _Coming(to_host_async(tokens_B)) if coming is None else coming
                known.coming = (steps[row], coming, row)

    def score_prompts(
        self, head: Callable[[Tensor], Tensor], hidden_BQh: Tensor, message: StepMessage
    ) -> None:
        """Note the scores of prompts' tokens that follow a step's positions."""
        for row, known in self._ruled(message).items():
            start = int(message.starts_B[row])
            part = known.unscored(start, int(message.num_new_B[row]))
            if part is None:
                continue
            first, end = part
            prompt = known.once(
                "prompt", known.rules.prompt, hidden_BQh.new_empty(0, dtype=torch.long)
            )
            most = known.rules.prompt_logprobs or 0
            for at in range(first, end, _POSITIONS_AT_ONCE):
                until = min(end, at + _POSITIONS_AT_ONCE)
                logits_NV = head(hidden_BQh[row, at - start : until - start])
                known.noted.prompt += scores(logits_NV, prompt[at + 1 : until + 1], most)
            known.num_scored = end


def ruled_logits(
    rows: Iterable[_Ruled],
    steps: Sequence[int],
    logits_RV: Tensor,
    masks: _Masks | None = None,
) -> Tensor:
    """Return the logits of rows with rules, each at its place; those given stay as they are.

    `masks`: of all that have guides, if they were begun.
    """
    several = list(rows)
    if any(known.rules.weighs_tokens for known in several):
        logits_RV = logits_RV.to(torch.float32, copy=True)
        for row, (known, step) in enumerate(zip(several, steps, strict=True)):
            if known.rules.weighs_tokens:
                apply_rules(known, logits_RV[row], step)
    return _follow_guides(several, steps, logits_RV, masks)


def apply_rules(known: _Ruled, logits_V: Tensor, step: int) -> None:
    """Change the logits of the answer's token at a place, in place."""
    rules, answer_N = known.rules, known.before(step, logits_V.device)
    if rules.repetition_penalty != 1.0:
        seen_N = torch.cat((known.once("prompt", rules.prompt, answer_N), answer_N))
        seen = logits_V[seen_N]
        penalty = rules.repetition_penalty
        logits_V[seen_N] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if (rules.frequency_penalty or rules.presence_penalty) and step:
        counts_V = torch.zeros_like(logits_V).scatter_add_(
            0, answer_N, torch.ones_like(answer_N, dtype=logits_V.dtype)
        )
        logits_V -= rules.frequency_penalty * counts_V
        logits_V -= rules.presence_penalty * (counts_V > 0)
    if rules.logit_bias:
        tokens = known.once("biased", tuple(rules.logit_bias), answer_N)
        logits_V[tokens] += known.once("bias", tuple(rules.logit_bias.values()), logits_V)
    if step < rules.min_tokens and rules.end_ids:
        logits_V[known.once("ends", rules.end_ids, answer_N)] = -math.inf
    if rules.allowed_tokens:
        allowed = known.once("allowed", rules.allowed_tokens, answer_N)
        chosen = logits_V[allowed]
        logits_V.fill_(-math.inf)[allowed] = chosen
    for index, run in enumerate(rules.bad_tokens):
        if len(run) - 1 <= step:
            run_N = known.once(f"bad {index}", run, answer_N)
            completes = (answer_N[step - len(run) + 1 :] == run_N[:-1]).all()
            logits_V[run[-1]] = torch.where(completes, -math.inf, logits_V[run[-1]])
    budget = rules.thinking
    if budget is not None and budget.tokens is not None and step >= budget.tokens:
        opened = budget.is_open or (answer_N == budget.begin).any()
        open_still = opened & ~(answer_N == budget.end).any()
        closing = torch.full_like(logits_V, -math.inf)
        closing[budget.end] = 0.0
        logits_V.copy_(torch.where(open_still, closing, logits_V))


def _follow_guides(
    rows: Sequence[_Ruled], steps: Sequence[int], logits_RV: Tensor, masks: _Masks | None
) -> Tensor:
    """Return the logits without what guides do not allow."""
    guided = [row for row, known in enumerate(rows) if known.automaton is not None]
    if not guided:
        return logits_RV
    device = logits_RV.device
    if masks is None:
        masks = _Masks.of(dict(enumerate(rows)), steps, logits_RV, meanwhile=False)
    bits_GB = masks.bits_GB().to(device, non_blocking=True)
    if len(guided) == len(rows):
        return _only_allowed(logits_RV, bits_GB)
    where = upload(guided, torch.long, device)
    return logits_RV.index_copy(0, where, _only_allowed(logits_RV[where], bits_GB))


def _only_allowed(logits_GV: Tensor, bits_GB: Tensor) -> Tensor:
    """Return the logits with -inf for tokens whose bit is not set."""
    if logits_GV.is_cuda:
        # Triton is not imported where there is no GPU.
        from llmpq.kernels.fused.allowed_tokens import only_allowed

        return only_allowed(logits_GV, bits_GB)
    return logits_GV.masked_fill(unpacked(~bits_GB, logits_GV.shape[-1]), -math.inf)


def unpacked(bits_GB: Tensor, vocab: int) -> Tensor:
    """Return bits of bytes as booleans [G, V]."""
    # numpy does in 10 us what takes torch 80.
    bits = np.unpackbits(bits_GB.numpy(), axis=1, count=vocab, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)


def scores(logits_NV: Tensor, tokens_N: Tensor, most: int) -> list[TokenScores]:
    """Return each token's score by its logits, and those of the `most` likeliest."""
    logprobs_NV = logits_NV.float().log_softmax(dim=-1)
    own_N1 = logprobs_NV.gather(1, tokens_N[:, None])
    ranks_N = (logprobs_NV > own_N1).sum(dim=1) + 1
    top = logprobs_NV.topk(min(most, logits_NV.shape[-1]), dim=-1)
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    own = zip(tokens_N.tolist(), own_N1[:, 0].tolist(), ranks_N.tolist(), strict=True)
    return [
        (
            TokenScore(*chosen),
            *(
                TokenScore(token, logprob, rank)
                for rank, (token, logprob) in enumerate(zip(*others, strict=True), start=1)
            ),
        )
        for chosen, others in zip(own, likeliest, strict=True)
    ]


def _keep(known: _Ruled, step: int, token: Tensor, logits_V: Tensor) -> None:
    """Remember a chosen token at its place, and its score if that is asked for."""
    if known.counts_tokens:
        known.before(step, token.device)
        known.chosen[step] = token
    most = known.rules.logprobs
    if most is not None and len(known.rules.answer) + len(known.noted.output) <= step:
        known.noted.output += scores(logits_V[None], token[None], most)
