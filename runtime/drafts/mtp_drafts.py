"""Drafts of the model's own head that predicts a further token (MTP), on the last stage.

The head reads what the model reads: hidden state i of a request with token i + 1, at position i of
a cache of its own, whose blocks are the pool's. Behind a prompt's chunk it is given all but the
last hidden state, whose token is yet to come. A step that is to draft gives it what is new and
certain (of a verify the accepted tokens), takes its prediction, and has it go on from that for
every further draft; what these leave in its cache is overwritten. Drafts travel back with the
step's tokens.

While no request asks for drafts, hidden states wait here, so that plain steps cost nothing; a
request with more of them waiting than `MOST_WAITING` drafts no more. Positions of a found prefix
are those of the request that computed it: one of them, or all if that had no drafts, may hold
another token's values, which makes drafts worse and changes no token.

Legend: T tokens of a step, N hidden states that wait, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.drafts.acceptance import DraftProbs, draft_tokens
from llmpq.runtime.models.mtp_head import MtpHead
from llmpq.runtime.requests.request import StepMessage
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.steps.step import RaggedStep
from llmpq.sizes.step_padding import cpu_padded

MOST_WAITING = 64
"""Hidden states of a request that wait for the head at most: as many as one step takes well."""


@dataclass
class _Waiting:
    """What the head has yet to be given of a request."""

    start: int
    """Position of the first hidden state."""
    hidden_Nh: Tensor
    tokens: list[int]
    """Those behind the hidden states, as far as they are known."""

    @property
    def end(self) -> int:
        return self.start + len(self.hidden_Nh)


@dataclass
class _Row:
    """A row that is to draft."""

    row: int
    wanted: int
    position: int
    """Of the newest token, which the drafts follow."""
    sample_step: int
    """Index of the first draft among the request's new tokens."""
    drafts: list[int]


class MtpDrafts:
    """What the head knows of the requests of a pool."""

    def __init__(self, head: MtpHead, kv: PagedKV, probs: DraftProbs) -> None:
        """`probs`: where the distributions that drafts are drawn from are noted."""
        self.head = head
        self.kv = kv
        self._probs = probs
        self._waiting: dict[int, _Waiting] = {}

    def draft(
        self, message: StepMessage, hidden_1Th: Tensor, new: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return the drafts behind each row's new tokens; none where none are wanted.

        `new`: what each row's logits brought, as `StageRunner.run` returns it.
        """
        self.kv.take_rows(message.rows_with_news, message.starts_with_news)
        rows, fed, first = [], [], 0
        counts, slots = message.num_new_B.tolist(), message.slots_B.tolist()
        for row, count in enumerate(counts):
            took = self._take(message, row, hidden_1Th[0, first : first + count], new[row])
            first += count
            if took is None:
                continue
            paged = message.row(row)
            if paged.drafts_wanted > 0 or count > len(paged.drafts) + 1:
                fed.append(row)
                if paged.drafts_wanted > 0 and paged.samples:
                    step = int(message.sample_steps_B[row]) + len(new[row])
                    rows.append(_Row(row, paged.drafts_wanted, took.end, step, []))
            elif len(took.hidden_Nh) > MOST_WAITING:
                del self._waiting[slots[row]]
        self._feed(message, fed, rows)
        drafts: list[list[int]] = [[] for _ in counts]
        for each in rows:
            drafts[each.row] = each.drafts
        return drafts

    def _take(
        self, message: StepMessage, row: int, hidden_Qh: Tensor, new: Sequence[int]
    ) -> _Waiting | None:
        """Add a row's hidden states and tokens to what waits; None if the head missed some."""
        paged, slot, start = message.row(row), int(message.slots_B[row]), int(message.starts_B[row])
        if paged.drafts_wanted < 0:  # a step of such rows alone has no tokens
            self._waiting.pop(slot, None)
            return None
        tokens, valid = message.tokens_of(row), len(hidden_Qh)
        behind = list(tokens[1:])
        if paged.samples:
            valid -= len(paged.drafts) + 1 - len(new)
            behind = [*tokens[1:valid], max(0, new[-1])]  # one that could not be chosen is none
        if start == 0 or paged.resumes:
            self._waiting[slot] = _Waiting(start, hidden_Qh[:0], [])
        took = self._waiting.get(slot)
        if took is None or took.end != start:
            self._waiting.pop(slot, None)
            return None
        if len(took.tokens) < len(took.hidden_Nh):
            took.tokens.append(tokens[0])
        took.hidden_Nh = torch.cat((took.hidden_Nh, hidden_Qh[:valid]))
        took.tokens += behind
        return took

    def _feed(self, message: StepMessage, fed: Sequence[int], rows: Sequence[_Row]) -> None:
        """Give the head what waits of rows, and draft for some of them."""
        took = [(row, self._waiting[int(message.slots_B[row])]) for row in fed]
        took = [(row, waiting) for row, waiting in took if waiting.tokens]
        if not took:
            return
        counts = [len(waiting.tokens) for _, waiting in took]
        tokens = [token for _, waiting in took for token in waiting.tokens]
        hidden = torch.cat([w.hidden_Nh[: len(w.tokens)] for _, w in took])
        out_Th = self._run(
            [int(message.slots_B[row]) for row, _ in took],
            [waiting.start for _, waiting in took],
            counts,
            tokens,
            self.head.first(hidden[None])[0],
        )
        last = {}
        at = 0
        for (row, waiting), count in zip(took, counts, strict=True):
            at += count
            last[row] = at - 1
            waiting.start += count
            waiting.hidden_Nh, waiting.tokens = waiting.hidden_Nh[count:].clone(), []
        if rows:
            self._go_on(message, rows, out_Th[[last[each.row] for each in rows]])

    def _go_on(self, message: StepMessage, rows: Sequence[_Row], out_Rh: Tensor) -> None:
        """Draft token by token for rows whose newest token the head was given."""
        while True:
            params: list[SamplerConfig] = [message.sampling[each.row] for each in rows]
            done = len(rows[0].drafts)
            steps = [each.sample_step + done for each in rows]
            tokens_R, probs = draft_tokens(self.head.logits(out_Rh), params, steps)
            slots = [int(message.slots_B[each.row]) for each in rows]
            self._probs.note(slots, [each.position + done for each in rows], probs)
            for each, token in zip(rows, tokens_R.tolist(), strict=True):
                each.drafts.append(token)
            more = [place for place, each in enumerate(rows) if each.wanted > done + 1]
            if not more:
                return
            rows = [rows[place] for place in more]
            out_Rh = self._run(
                [int(message.slots_B[each.row]) for each in rows],
                [each.position + done for each in rows],
                [1] * len(rows),
                [each.drafts[-1] for each in rows],
                self.head.goes_on(out_Rh[more]),
            )

    def _run(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[int],
        hidden_Th: Tensor,
    ) -> Tensor:
        """Return the head's output [T, h] of rows, one behind the other."""
        total = sum(counts)
        width = cpu_padded(total)
        step = RaggedStep.of_rows(slots, starts, counts, wanted=[0] * len(slots), width=width)
        padded = torch.nn.functional.pad(hidden_Th, (0, 0, 0, width - total))
        tokens_1T = torch.tensor([[*tokens, *[0] * (width - total)]])
        out: Tensor = self.head(tokens_1T, padded[None], step, self.kv)
        return out[0, :total]
