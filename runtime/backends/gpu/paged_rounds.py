"""Rounds of drafts by the model over a pool, greedy, of a whole model: one graph a round.

    draft.model, R rows   token 0 -> 1 -> ... -> gamma, each step of one token a row
    model, R * (gamma+1)  the verify, a step with chunks
    per row               its longest prefix of drafts that are the verifier's choices, and one more

The scheduler knows where each row starts, so every step's rows are known before the round begins:
their tables are sent together, and the device needs the host once a round. Rows are sorted by their
number of drafts, so that each draft step has the first of them.

Legend: R rows, Q = gamma + 1 positions, T = R * Q places of the verify.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.fused.argmax import argmax
from llmpq.runtime.backends.gpu.cuda_graphs import StepGraphs, StepOutput, rounded_rows
from llmpq.runtime.backends.gpu.paged_graphs import NotedRows, paged_step
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase, Numbers
from llmpq.runtime.drafts.acceptance import agreeing_prefix
from llmpq.runtime.drafts.draft_model import DraftModel
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import NOT_FINITE_TOKEN, StepMessage


class PagedRoundGraphs(StepGraphs):
    """Rounds of at most `gamma` drafts: a graph for each number of rows."""

    def __init__(
        self,
        model: StageModel,
        kv: GpuPagedKVBase,
        draft: DraftModel,
        gamma: int,
        *,
        num_slots: int,
        most_tokens: int,
        **options: Any,
    ) -> None:
        """`options`: as of `PagedGraphs`, whose `most_tokens` says nothing here."""
        assert isinstance(draft.kv, GpuPagedKVBase), "drafts over a pool read a pool"
        self._pages, self._draft, self._draft_pages = kv, draft, draft.kv
        self._gamma, self._padding_slot = gamma, num_slots
        self._noted = NotedRows(kv)
        super().__init__(model, kv, num_slots=num_slots, max_rows=num_slots, **options)

    def sizes(self, most_rows: int) -> list[int]:
        """Return the numbers of rows that are captured, largest first; without captures one."""
        least = 1 if self._captures(most_rows) else most_rows
        found = {rounded_rows(rows, self._max_rows) for rows in range(least, most_rows + 1)}
        return sorted(found, reverse=True)

    @property
    def _most_values(self) -> int:
        return sum(self._parts(self._max_rows))

    def _parts(self, num_rows: int) -> list[int]:
        """Return how many values are sent of a round: of its draft steps, its verify, its rows."""
        positions = self._gamma + 1
        pages, drafted = self._pages, self._draft_pages
        noted = self._noted.num_values(num_rows)
        draft = [drafted.num_work_split, drafted.num_fields * num_rows, noted] * self._gamma
        noted = self._noted.num_values(num_rows + 1)
        verify = [pages.num_work_split, pages.num_fields * (num_rows + 1), noted]
        return [*draft, *verify, num_rows, num_rows, *[num_rows * positions] * 2]

    def _values(self, message: StepMessage, num_rows: int) -> list[Numbers]:
        positions, given = self._gamma + 1, range(message.num_rows)
        num_new: list[int] = message.num_new_B.tolist()
        order = sorted(given, key=lambda row: -num_new[row])
        slots, starts, counts = (
            of_rows[order].tolist()
            for of_rows in (message.slots_B, message.starts_B, message.num_new_B)
        )
        values: list[Numbers] = []
        for place in range(self._gamma):
            drafting = sum(count > 1 + place for count in counts)
            one_each = [1] * drafting
            rows = slots[:drafting], [start + place for start in starts[:drafting]], one_each
            table = self._draft_pages.table(*rows, num_rows=num_rows, num_places=num_rows)
            values += [self._draft_pages.work_split(table), table.ravel()]
            values.append(self._noted.values(*rows, one_each, num_rows=num_rows))
        num_places, lasts = num_rows * positions, [count - 1 for count in num_new]
        table = self._pages.table(
            slots, starts, counts, num_rows=num_rows + 1, num_places=num_places
        )
        values += [self._pages.work_split(table), table.ravel()]
        drafts = [count - 1 for count in counts]
        values.append(self._noted.values(slots, starts, counts, drafts, num_rows=num_rows + 1))
        padding = [0] * (num_rows - len(order))
        newest = [message.tokens_of(row)[0] for row in order]
        values += [newest, padding, lasts, padding]
        source = [at * positions + q for at, count in enumerate(counts) for q in range(count)]
        firsts = {row: sum(counts[:at]) for at, row in enumerate(order)}
        back = [firsts[row] + min(q, num_new[row] - 1) for row in given for q in range(positions)]
        for index in (source, back):
            values += [index, [0] * (num_places - len(index))]
        return values

    def _forward(self, num_rows: int, hidden_BQh: Tensor | None) -> StepOutput:
        """Draft, verify, accept: the table has each row's number of new tokens, then the tokens."""
        parts = self._parts(num_rows)
        *steps, newest_R, drafts_R, source_T, back_T = self._rows[: sum(parts)].split(parts)
        draft, tokens = self._draft, [newest_R.long()]
        for place in range(self._gamma):
            work_split, rows, noted = steps[3 * place : 3 * place + 3]
            step = paged_step(
                self._draft_pages,
                rows.view(self._draft_pages.num_fields, num_rows),
                work_split,
                num_rows,
                padding_slot=self._padding_slot,
                max_end=self.max_end,
                chunks=False,
                noted=noted,
                notes=True,
            )
            hidden = draft.model(tokens[-1][None], step, draft.kv)
            tokens.append(argmax(draft.model.logits(hidden, step)))
        tokens_T = torch.stack(tokens, dim=1).flatten()[source_T.long()]
        work_split, rows, noted = steps[3 * self._gamma :]
        step = paged_step(
            self._pages,
            rows.view(self._pages.num_fields, num_rows + 1),
            work_split,
            len(tokens_T),
            padding_slot=self._padding_slot,
            max_end=self.max_end,
            chunks=True,
            noted=noted,
            notes=True,
        )
        y = self._model(tokens_T[None], step, self._kv)
        assert self._model.head is not None, "rounds in one step are a whole model's"
        logits_TV, back = self._model.head(y[0]), back_T.long()
        choices_T = argmax(logits_TV, not_finite=NOT_FINITE_TOKEN)
        shape = num_rows, self._gamma + 1
        choices_RQ, tokens_RQ = choices_T[back].view(shape), tokens_T[back].view(shape)
        kept_R = agreeing_prefix(tokens_RQ[:, 1:], choices_RQ, drafts_R)
        return StepOutput(table_BK=torch.cat((kept_R[:, None] + 1, choices_RQ), dim=1))
