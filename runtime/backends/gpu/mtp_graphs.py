"""Steps of the model's own head that drafts (MTP) on a GPU, captured as the model's are.

Two sets: what is new of requests, several tokens a row; and a further token of each row behind what
was drafted last. Where the head knows all that is behind greedy rows, as after each verify, a whole
round of drafts is one graph (mtp_rounds.py).

Legend: T places, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from llmpq.runtime.backends.gpu.cuda_graphs import StepOutput, rounded_rows
from llmpq.runtime.backends.gpu.mtp_rounds import MtpRoundGraphs, drafting_order
from llmpq.runtime.backends.gpu.paged_graphs import PagedGraphs
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
from llmpq.runtime.drafts.acceptance import DraftProbs
from llmpq.runtime.drafts.mtp_drafts import MOST_WAITING, MtpDrafts
from llmpq.runtime.models.mtp_head import MtpHead
from llmpq.runtime.models.sampling import likeliest
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import StepKind, StepMessage
from llmpq.runtime.steps.step import message_of_rows

MOST_LOGITS_BYTES = 32 << 20
"""Of all places of a round: its graph keeps room for them, which no plan counts."""


class MtpGraphs(PagedGraphs):
    """Runs steps of the head over a pool of its own; it is not cut over a stage's devices."""

    def __init__(
        self, model: StageModel, kv: GpuPagedKVBase, head: MtpHead, **options: Any
    ) -> None:
        """`model`: the stage that the head is behind; `options`: as of `PagedGraphs`."""
        super().__init__(model, kv, **options)
        self._head, self._reduce = head, None

    def _forward(
        self, size: int, hidden_BQh: Tensor | None, *, every_place: bool = False
    ) -> StepOutput:
        """Run the head on the static buffers; what a graph records."""
        step, tokens_T = self._step(size)
        assert hidden_BQh is not None
        return StepOutput(hidden_BQh=self._head(tokens_T[None].long(), hidden_BQh, step, self._kv))


class CudaMtpDrafts(MtpDrafts):
    """What the head knows of the requests of a pool on a GPU."""

    def __init__(
        self,
        head: MtpHead,
        kv: GpuPagedKVBase,
        probs: DraftProbs,
        model: StageModel,
        **options: Any,
    ) -> None:
        """`model`, `options`: as of `MtpGraphs`; the rest as of `MtpDrafts`."""
        super().__init__(head, kv, probs)
        options["most_tokens"] += options["num_slots"] * (MOST_WAITING + 1)
        make = partial(MtpGraphs, model, kv, head, **options)
        self.single, self._several = make(chunks=False), make(chunks=True)
        self._make_round: Callable[[int], MtpRoundGraphs] = partial(
            MtpRoundGraphs, model, kv, head, **options
        )
        self._slots, self._places = options["num_slots"], 0
        """Of a verify that a round may follow."""
        if kv.starts_on_device and kv.states is None and model.reduce is None:
            item = head.hidden_norm.weight.element_size()
            self._places = MOST_LOGITS_BYTES // (model.spec.vocab * item)
        self._rounds: dict[int, MtpRoundGraphs] = {}
        """Number of drafts -> rounds of so many."""

    def share(self, others: PagedGraphs) -> None:
        """Capture where the stage's own steps are."""
        for graphs in (self.single, self._several):
            graphs.share(others)

    def rounds(self, num_rows: int, gamma: int) -> bool:
        """Whether so many rows draft in rounds, if all are greedy."""
        return rounded_rows(num_rows, self._slots) * (gamma + 1) <= self._places

    def round(
        self, message: StepMessage, hidden_1Th: Tensor
    ) -> tuple[list[list[int]], list[list[int]]] | None:
        """Return the new tokens of a verify's greedy rows, and the drafts behind them, in one step.

        None where the head has yet to be given more than this step's hidden states, or a row drafts
        no more: `draft` does those.
        """
        news = message.rows_with_news
        gamma = max((max(row.drafts_wanted, len(row.drafts)) for row in news), default=0)
        steady = (self._is_steady(message, row) for row in range(message.num_rows))
        if not self.rounds(message.num_rows, gamma) or not all(steady):
            return None
        self.kv.take_rows(message.rows_with_news, message.starts_with_news)
        table_BK = self._round_graphs(gamma).run(message, hidden_1Th).table_BK
        assert table_BK is not None
        slots = message.slots_B.tolist()
        new: list[list[int]] = [[] for _ in slots]
        drafts: list[list[int]] = [[] for _ in slots]
        for row, line in zip(drafting_order(message), table_BK.tolist(), strict=False):
            count, wanted = line[0], message.row(row).drafts_wanted
            new[row], drafts[row] = line[1 : 1 + count], line[gamma + 2 :][:wanted]
            self._waiting[slots[row]].start += count
        return new, drafts

    def _is_steady(self, message: StepMessage, row: int) -> bool:
        """Whether the head knows all that stands in front of a row, which samples and drafts."""
        paged, waiting = message.row(row), self._waiting.get(int(message.slots_B[row]))
        if waiting is None or paged.resumes or not paged.samples or paged.drafts_wanted <= 0:
            return False
        start, count = int(message.starts_B[row]), int(message.num_new_B[row])
        goes_on = start > 0 and count == len(paged.drafts) + 1
        return goes_on and waiting.start == waiting.end == start

    def _round_graphs(self, gamma: int) -> MtpRoundGraphs:
        if gamma not in self._rounds:
            self._rounds[gamma] = self._make_round(gamma)
            self._rounds[gamma].share(self.single)
        return self._rounds[gamma]

    def further_round(self, message: StepMessage) -> None:
        """Run a round behind hidden states of zeros; to be captured ahead."""
        norm, tokens = self.head.hidden_norm.weight, message.num_tokens
        self.kv.take_rows(message.rows_with_news, message.starts_with_news)
        hidden = norm.new_zeros(1, tokens, norm.numel())
        self._round_graphs(message.q_len - 1).run(message, hidden)

    def further(self, message: StepMessage) -> Tensor:
        """Return what follows hidden states of zeros; to be timed, or captured ahead."""
        self.kv.take_rows(message.rows_with_news, message.starts_with_news)
        norm, tokens = self.head.hidden_norm.weight, message.num_tokens
        out_BQh = (
            self._graphs_of(message)
            .run(message, norm.new_zeros(1, tokens, norm.numel()))
            .hidden_BQh
        )
        assert out_BQh is not None
        return likeliest(self.head.logits(self.head.goes_on(out_BQh[0, : message.num_rows])))

    def _graphs_of(self, message: StepMessage) -> MtpGraphs:
        return self.single if message.q_len == 1 else self._several

    def _run(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[int],
        hidden_Th: Tensor,
    ) -> Tensor:
        message = message_of_rows(StepKind.DECODE, slots, starts, counts, tokens=tokens)
        out_BQh = self._graphs_of(message).run(message, hidden_Th[None]).hidden_BQh
        assert out_BQh is not None
        return out_BQh[0, : len(tokens)]
