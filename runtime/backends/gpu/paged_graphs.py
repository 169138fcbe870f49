"""Steps over a pool as CUDA graphs: any rows, described by tables that are read on the device.

Two sets: steps in which every row has one token, a graph for every number of rows; and steps with
chunks, a graph for every rung of a ladder of places. Places beyond the tokens are padding. A longer
step keeps the GPU busy as it comes.

A token of -1 stands for the one its slot produced last: it is read from a table on the device, so
the host may issue a step before it knows the tokens of the one before.

Legend: T places, R rows, h hidden, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.fused.argmax import argmax
from llmpq.kernels.kv.prompt_attend import prompt_runs
from llmpq.kernels.recurrent.notes import FIELDS, noted_table
from llmpq.runtime.backends.gpu.cuda_graphs import StepGraphs, StepOutput, rounded_rows
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase, Numbers
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import NOT_FINITE_TOKEN, StepMessage
from llmpq.runtime.steps.paged_step import PagedStep
from llmpq.runtime.steps.step import Span
from llmpq.sizes.step_padding import CAPTURED_TOKENS, gpu_padded


def rungs(most: int) -> list[int]:
    """Return the captured numbers of places of steps of up to `most` tokens, largest first."""
    found = {gpu_padded(tokens) for tokens in range(2, min(most, CAPTURED_TOKENS) + 1)}
    return sorted(found, reverse=True)


def paged_step(
    pages: GpuPagedKVBase,
    rows_FR: Tensor,
    work_split: Tensor,
    num_places: int,
    *,
    padding_slot: int,
    max_end: int,
    chunks: bool,
    noted: Tensor,
    notes: bool,
    prompts: tuple[tuple[int, int], ...] = (),
) -> PagedStep:
    """Return the step of rows whose table is on the device; `padding_slot`: the slot of padding.

    `noted`: what `NotedRows` made of them, if anything. `notes`: whether drafts may be among them.
    """
    where, windowed = pages.places(rows_FR, num_places, padding_slot=padding_slot)
    return PagedStep(
        slots_B=where.slots_R,
        start_B=rows_FR[1],
        num_new_B=rows_FR[2],
        q_len=num_places,
        max_end=max_end,
        fresh=False,
        rows_FR=rows_FR,
        work_split=work_split,
        where=where,
        where_windowed=windowed,
        chunks=chunks,
        noted_FR=noted.view(FIELDS, -1) if len(noted) else None,
        notes=notes and len(noted) > 0,
        prompts=prompts,
    )


class NotedRows:
    """How a step's rows go on from drafts that were refused, where a stage has recurrent layers."""

    def __init__(self, pages: GpuPagedKVBase) -> None:
        states = pages.states
        self._states = states if states is not None and states.has_notes else None

    def num_values(self, num_rows: int) -> int:
        """Return how many numbers a step of so many rows, with padding, is sent."""
        return 0 if self._states is None else FIELDS * num_rows

    def of(self, message: StepMessage, *, num_rows: int) -> list[int]:
        """Return what `values` does of a step's rows."""
        if self._states is None:
            return []
        rows = (message.slots_B, message.starts_B, message.num_new_B, message.revocable_B)
        slots, starts, counts, revocable = (of_rows.tolist() for of_rows in rows)
        return self.values(slots, starts, counts, revocable, num_rows=num_rows)

    def values(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        revocable: Sequence[int],
        *,
        num_rows: int,
    ) -> list[int]:
        """Return those numbers, and note which tokens of the rows may be taken back."""
        if self._states is None:
            return []
        given = zip(slots, starts, counts, revocable, strict=True)
        rows = [
            self._states.goes_on(Span(slot, start, count, 0, revocable))
            for slot, start, count, revocable in given
        ]
        return [value for field in noted_table(rows, num_rows) for value in field]


class PagedGraphs(StepGraphs):
    """Runs steps of a stage over its pool; `size` of a step is its number of places."""

    def __init__(
        self,
        model: StageModel,
        kv: GpuPagedKVBase,
        *,
        chunks: bool,
        most_tokens: int,
        num_slots: int,
        verifies: bool = False,
        drafts: bool = False,
        keeps_hidden: bool = False,
        **options: Any,
    ) -> None:
        """`chunks`: rows may have several tokens; `most_tokens`: of a step.

        `verifies`: hidden states of every place are the outcome, since verifies read several a row.
        `drafts`: steps are the draft model's, all of whose tokens may be taken back.
        `keeps_hidden`: hidden states are an outcome of the last stage, too.
        """
        self._noted, self._drafts = NotedRows(kv), drafts
        self._keeps_hidden = keeps_hidden
        self._chunks, self._padding_slot, self._verifies = chunks, num_slots, verifies
        self._places = gpu_padded(most_tokens) if chunks else rounded_rows(num_slots, num_slots)
        self._pages = kv
        self._prompts: tuple[tuple[int, int], ...] = ()
        rows = num_slots + 1 if chunks else num_slots
        super().__init__(model, kv, num_slots=num_slots, max_rows=rows, **options)

    def sizes(self, most_rows: int) -> list[int]:
        """Return the sizes of steps of up to so many rows that are captured, largest first.

        Without captures the largest alone.
        """
        least = 1 if self._captures(most_rows) else most_rows
        found = {rounded_rows(rows, self._places) for rows in range(least, most_rows + 1)}
        return sorted(found, reverse=True)

    def run_every_place(self, message: StepMessage, hidden_BQh: Tensor | None) -> StepOutput:
        """As `run_staged`, with hidden states of all places behind the last layer."""
        size = self._size(message)
        if hidden_BQh is not None:
            hidden_BQh = self._widened(hidden_BQh.to(self._device), size)
        return self._forward(size, hidden_BQh, every_place=True)

    @property
    def _most_values(self) -> int:
        noted = self._noted.num_values(self._num_rows(self._places))
        return self._pages.num_work_split + self._places + self._num_fields(self._places) + noted

    def _num_rows(self, size: int) -> int:
        """Return the rows of a step's table; with chunks one more, which is padding."""
        return self._padding_slot + 1 if self._chunks else size

    def _num_fields(self, size: int) -> int:
        """Return the numbers of a step's table."""
        return self._pages.num_fields * self._num_rows(size)

    def _size(self, message: StepMessage) -> int:
        if self._chunks:
            return gpu_padded(message.num_tokens)
        return rounded_rows(message.num_rows, self._places)

    def _captures(self, size: int) -> bool:
        return super()._captures(size) and (not self._chunks or size <= CAPTURED_TOKENS)

    def _widened(self, hidden_BQh: Tensor, size: int) -> Tensor:
        return functional.pad(hidden_BQh, (0, 0, 0, size - hidden_BQh.shape[1]))

    def _values(self, message: StepMessage, size: int) -> list[Numbers]:
        # What a graph does must not hang on the rows.
        captured = self._captures(size)
        rows = message.slots_B, message.starts_B, message.num_new_B
        self._prompts = () if captured else prompt_runs(rows[1].tolist(), rows[2].tolist())
        num_rows, tokens_T = self._num_rows(size), message.tokens_T
        table = self._pages.table(*rows, num_rows=num_rows, num_places=size)
        noted = self._noted.of(message, num_rows=num_rows)
        padding = [0] * (size - len(tokens_T))
        return [self._pages.work_split(table), table.ravel(), tokens_T, padding, noted]

    def _step(self, size: int) -> tuple[PagedStep, Tensor]:
        """Return the step that was sent last, and its tokens."""
        num_rows = self._num_rows(size)
        parts = [self._pages.num_work_split, self._num_fields(size), size]
        parts.append(self._noted.num_values(num_rows))
        work_split, table, tokens_T, noted = self._rows[: sum(parts)].split(parts)
        rows_FR = table.view(self._pages.num_fields, num_rows)
        step = paged_step(
            *(self._pages, rows_FR, work_split, size),
            padding_slot=self._padding_slot,
            max_end=self.max_end,
            chunks=self._chunks,
            noted=noted,
            notes=self._chunks or self._drafts,
            prompts=self._prompts if self._chunks else (),
        )
        return step, tokens_T

    def _forward(
        self, size: int, hidden_BQh: Tensor | None, *, every_place: bool = False
    ) -> StepOutput:
        """Run the stage on the static buffers; what a graph records."""
        step, tokens_T = self._step(size)
        x = hidden_BQh
        if x is None:
            last_T = self.last_token_S[step.where.slots_T]
            x = torch.where(tokens_T < 0, last_T, tokens_T)[None]
        every_place = every_place or self._verifies
        last_only = self._chunks and self._model.is_last and not every_place
        y = self._model(x, step, self._kv, last_only=last_only)
        logits_RV = None if self._verifies else self._model.logits_together(y, step)
        if self._model.head is None or self._verifies:
            return StepOutput(hidden_BQh=y)
        if logits_RV is None:
            logits_RV = self._model.logits(y, step)
        tokens_R = argmax(
            logits_RV,
            slots_B=step.slots_B,
            table_S=self.last_token_S,
            not_finite=NOT_FINITE_TOKEN,
        )
        hidden = y if every_place or self._keeps_hidden else None
        return StepOutput(hidden_BQh=hidden, logits_BV=self._shared(logits_RV), tokens_B=tokens_R)
