"""What follows a verify whose rows draft by the model's own head (MTP), greedy: one graph.

    choices of the verify's places    its longest prefix of drafts that are these, and one more
    head, all of these places         choice i behind hidden state i; behind the last that counts
                                      stands the first draft
    head, two places a row            the newest draft; and what came before it, once more
      gamma - 1 times                 -> the next draft

The host knows where the verify's places stand, but not where drafts begin: the device moves the
rows' starts on by what was kept. Rows of several tokens (chunks) are attended to from the starts in
their table; rows of one also by what the host made of those, hence two places, of which the first
writes what is there. So the device needs the host once a round, not once a draft.

Legend: R rows, Q = gamma + 1 positions, T = R * Q places of the verify, h hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.fused.argmax import argmax
from llmpq.runtime.backends.gpu.cuda_graphs import StepGraphs, StepOutput
from llmpq.runtime.backends.gpu.paged_graphs import paged_step
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase, Numbers
from llmpq.runtime.drafts.acceptance import agreeing_prefix
from llmpq.runtime.models.mtp_head import MtpHead
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import NOT_FINITE_TOKEN, StepMessage
from llmpq.runtime.steps.paged_step import PagedStep


class MtpRoundGraphs(StepGraphs):
    """Rounds of at most `gamma` drafts: a graph for each number of rows."""

    def __init__(
        self,
        model: StageModel,
        kv: GpuPagedKVBase,
        head: MtpHead,
        gamma: int,
        *,
        num_slots: int,
        most_tokens: int,
        **options: Any,
    ) -> None:
        """`model`: the stage that the head is behind; `options`: as of `StepGraphs`."""
        self._pages, self._head = kv, head
        self._gamma, self._padding_slot = gamma, num_slots
        super().__init__(model, kv, num_slots=num_slots, max_rows=num_slots, **options)
        self._reduce = None

    @property
    def _most_values(self) -> int:
        return sum(self._parts(self._max_rows))

    def _parts(self, num_rows: int) -> list[int]:
        """Return how many values are sent of a round: of the head's steps, and of its rows."""
        step = [self._pages.num_work_split, self._pages.num_fields * (num_rows + 1)]
        return [*step * self._gamma, num_rows * self._gamma, num_rows, num_rows * (self._gamma + 1)]

    def _values(self, message: StepMessage, num_rows: int) -> list[Numbers]:
        positions, gamma = self._gamma + 1, self._gamma
        order, counts_B = drafting_order(message), message.num_new_B
        wanted = [message.row(row).drafts_wanted for row in order]
        rows = message.slots_B, message.starts_B, counts_B
        values = self._table(*rows, num_rows=num_rows, num_places=num_rows * positions)
        for place in range(1, gamma):
            going = order[: sum(own > place for own in wanted)]
            behind = message.starts_B[going] + place - 1
            twice = message.slots_B[going], behind, [2] * len(going)
            values += self._table(*twice, num_rows=num_rows, num_places=2 * num_rows)
        firsts = (counts_B.cumsum() - counts_B)[order].tolist()
        drafted, back = [], []
        for row, first in zip(order, firsts, strict=True):
            drafts = message.row(row).drafts
            drafted += [*drafts, *[-1] * (gamma - len(drafts))]
            back += [first + min(q, len(drafts)) for q in range(positions)]
        padding = num_rows - len(order)
        values += [drafted, [-1] * (gamma * padding)]
        values += [[len(message.row(row).drafts) for row in order], [0] * padding]
        return [*values, back, [0] * (positions * padding)]

    def _table(self, *rows: Any, num_rows: int, num_places: int) -> list[Numbers]:
        table = self._pages.table(*rows, num_rows=num_rows + 1, num_places=num_places)
        return [self._pages.work_split(table), table.ravel()]

    def _widened(self, hidden_BQh: Tensor, num_rows: int) -> Tensor:
        places = num_rows * (self._gamma + 1)
        return functional.pad(hidden_BQh, (0, 0, 0, places - hidden_BQh.shape[1]))

    def _forward(self, num_rows: int, hidden_BQh: Tensor | None) -> StepOutput:
        """Accept, draft: the table has each row's number of new tokens, choices, then drafts."""
        assert hidden_BQh is not None and self._model.head is not None
        gamma, head = self._gamma, self._head
        parts = self._parts(num_rows)
        *steps, drafted, drafts_R, back = self._rows[: sum(parts)].split(parts)
        logits_TV, back_RQ = self._model.head(hidden_BQh[0]), back.long().view(num_rows, -1)
        choices_T = argmax(logits_TV, not_finite=NOT_FINITE_TOKEN)
        choices_RQ = choices_T[back_RQ]
        choices_T = choices_T.clamp(min=0)  # the head takes tokens only
        kept_R = agreeing_prefix(drafted.view(num_rows, gamma), choices_RQ, drafts_R)
        shift_R = functional.pad(kept_R, (0, 1)).int()
        last_R = back_RQ.gather(1, kept_R[:, None])[:, 0]
        given_1Th = head.first(hidden_BQh)
        step = self._step((steps[0], steps[1]), None, len(choices_T))
        out_Rh = head(choices_T[None], given_1Th, step, self._kv)[0, last_R]
        token_R, given_Rh, drafts = choices_T[last_R], given_1Th[0, last_R], []
        for place in range(1, gamma + 1):
            drafts.append(argmax(head.logits(out_Rh)))
            if place == gamma:
                break
            sent = steps[2 * place], steps[2 * place + 1]
            step = self._step(sent, shift_R, 2 * num_rows)
            next_Rh = head.goes_on(out_Rh)
            tokens_T = torch.stack((token_R, drafts[-1]), dim=1).flatten()
            hidden_Th = torch.stack((given_Rh, next_Rh), dim=1).flatten(0, 1)
            out_Th = head(tokens_T[None], hidden_Th[None], step, self._kv)[0]
            out_Rh, token_R, given_Rh = out_Th[1::2].contiguous(), drafts[-1], next_Rh
        table = (kept_R[:, None] + 1, choices_RQ, torch.stack(drafts, dim=1))
        return StepOutput(table_BK=torch.cat(table, dim=1))

    def _step(
        self, sent: tuple[Tensor, Tensor], shift_R: Tensor | None, num_places: int
    ) -> PagedStep:
        """Return a step of the head as it was `sent`: what attention's programs take, and its rows.

        `shift_R`: by how much later its rows start than was sent.
        """
        work_split, rows = sent
        rows_FR = rows.view(self._pages.num_fields, -1)
        if shift_R is not None:
            moved_R = rows_FR[1] + shift_R
            rows_FR = torch.cat((rows_FR[:1], moved_R[None], rows_FR[2:]))
        return paged_step(
            *(self._pages, rows_FR, work_split, num_places),
            padding_slot=self._padding_slot,
            max_end=self.max_end,
            chunks=True,
            noted=rows[:0],
            notes=False,
        )


def drafting_order(message: StepMessage) -> list[int]:
    """Return a message's rows, those that want most drafts first."""
    return sorted(range(message.num_rows), key=lambda row: -message.row(row).drafts_wanted)
