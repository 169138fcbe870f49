"""A stage on a GPU: steps of any rows through graphs, answers that come late.

    steps       runtime/backends/gpu/paged_graphs.py
    results     of a whole model on one device: copied behind the step, and a request's next token
                may be asked for as -1, "the one this slot produced last"
    several     hidden states and tokens stay on the device where links take them from there, and
    stages      steps may be issued ahead of their tokens; else they go through the hosts

Legend: B rows, T tokens, h hidden, R rows that sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmpq.kernels.compile_missing import compiling_missing
from llmpq.plans.speculation import MAX_GAMMA, MeasuredTimes, SpeculationMode
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.gpu.cuda_graphs import StepOutput, rounded_rows
from llmpq.runtime.backends.gpu.device_times import DeviceTimes
from llmpq.runtime.backends.gpu.late_tokens import LateTokens
from llmpq.runtime.backends.gpu.mtp_graphs import CudaMtpDrafts
from llmpq.runtime.backends.gpu.paged_graphs import PagedGraphs, rungs
from llmpq.runtime.backends.gpu.paged_rounds import PagedRoundGraphs
from llmpq.runtime.backends.stage_runner import StageRunner, result_table
from llmpq.runtime.cache.gpu_forwarding_kv import GpuDraftedKV
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.models.mtp_head import MtpHead
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import (
    NOT_FINITE_TOKEN,
    PENDING_TOKEN,
    PagedRow,
    StepKind,
    StepMessage,
)
from llmpq.runtime.steps.device_copies import HostCopy, to_host_async, upload
from llmpq.runtime.steps.step import message_of_rows, speculates
from llmpq.runtime.steps.trace import KindTotals
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.sizes.pool_size import PoolSize
from llmpq.sizes.step_padding import CAPTURED_TOKENS


class CudaStageRunner(StageRunner):
    """One stage on a GPU, ready to run the steps of a `Scheduler`."""

    kv: GpuPagedKVBase
    mtp: CudaMtpDrafts | None
    _with_copy = GpuDraftedKV

    def __init__(
        self,
        model: StageModel,
        kv: GpuPagedKVBase,
        device: torch.device,
        dtype: torch.dtype,
        *,
        size: PoolSize,
        step_tokens: int,
        graphs: bool = True,
    ) -> None:
        """`step_tokens`: of a step at most; `graphs`: capture steps."""
        super().__init__(model, kv, device, dtype)
        self._whole = model.embedding is not None and model.head is not None
        self._times, self._columns = DeviceTimes(device), kv.columns
        self._size = size
        self._graph_options: dict[str, Any] = dict(
            num_slots=size.slots,
            most_tokens=max(step_tokens, size.slots * (MAX_GAMMA + 1)) + 1,
            max_len=size.max_len,
            dtype=dtype,
            device=device,
            capture=graphs,
            # Even, so that devices of a shared stage sum it as it is (`_share_tokens`).
            last_token_S=torch.zeros(size.slots + 2 & ~1, dtype=torch.long, device=device),
        )
        self._hidden_stay = self._tokens_stay = False
        self._late: LateTokens | None = None
        """The last step's tokens, if they are still to be drawn."""
        self._sees_all = False
        """Whether hidden states of all places are wanted of the last stage, to draft by."""
        self._make_graphs()

    def _make_graphs(self) -> None:
        """Make the sets of steps anew; each step is captured when it first comes."""
        make = partial(PagedGraphs, self.model, self.kv, **self._graph_options)
        self._decode = make(chunks=False, keeps_hidden=self._sees_all)
        self._mixed = make(chunks=True)
        self._verify = make(chunks=True, verifies=True)
        self._drafts: PagedGraphs | None = None
        if self.draft is not None:
            assert isinstance(self.draft.kv, GpuPagedKVBase)
            own = (self.draft.model, self.draft.kv)
            self._drafts = PagedGraphs(*own, chunks=False, drafts=True, **self._graph_options)
            self._drafts.share(self._decode)
        for others in (self._mixed, self._verify):
            others.share(self._decode)
        if self.mtp is not None:
            self.mtp.share(self._decode)
        self._rounds: dict[int, PagedRoundGraphs] = {}
        """Number of drafts -> rounds of so many."""

    def enable_speculation(
        self,
        mode: SpeculationMode,
        size: PoolSize,
        *,
        layers: Sequence[int],
        kv: KVPrecision = KVPrecision.KV16,
        head: MtpHead | None = None,
    ) -> int:
        """As `StageRunner.enable_speculation`; steps are captured anew."""
        extra = super().enable_speculation(mode, size, layers=layers, kv=kv, head=head)
        self._sees_all = mode == "mtp" and self.model.is_last
        self._make_graphs()
        return extra

    def _mtp_drafts(self, head: MtpHead, kv: PagedKV) -> CudaMtpDrafts:
        assert isinstance(kv, GpuPagedKVBase)
        options = {k: v for k, v in self._graph_options.items() if k != "last_token_S"}
        return CudaMtpDrafts(head, kv, self._draft_probs, self.model, **options)

    def end_speculation(self) -> None:
        """As `StageRunner.end_speculation`; graphs are captured anew."""
        super().end_speculation()
        self._sees_all = False
        self._make_graphs()

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may name tokens by -1 that the step before has yet to produce."""
        return self._whole and self.mtp is None

    @property
    def fused_rounds(self) -> bool:
        """Whether a round of drafts and its verify can be one step."""
        return self._whole and self.draft is not None and self.model.reduce is None

    def step_times(self, rows: int) -> MeasuredTimes:
        """Time drafts, verifies and plain steps of up to so many rows, to choose draft lengths by.

        Of a whole model, before it serves.
        """
        # Imported here: it runs the steps of this class.
        from llmpq.runtime.backends.gpu.cuda_step_times import contexts_of, measure

        longest = min(self._size.max_len, self._size.num_blocks * BLOCK_TOKENS)
        return measure(
            self,
            sorted({1, max(1, rows // 4), rows}),
            contexts_of(longest),
            num_blocks=self._size.num_blocks,
        )

    @property
    def drafts(self) -> Callable[[StepMessage], object] | None:
        """Runs a draft step, if the model drafts; for `step_times`."""
        if self.mtp is not None:
            return self.mtp.further
        return None if self._drafts is None else partial(self._drafts.run, hidden_BQh=None)

    def plain(self, message: StepMessage) -> object:
        """Run a decode step; for `step_times`."""
        return self._decode.run(message, None)

    def verify(self, message: StepMessage) -> object:
        """Run a verify, its head included; for `step_times`."""
        hidden_BQh = self._verify.run(message, None).hidden_BQh
        assert self.model.head is not None and hidden_BQh is not None
        return self.model.head(hidden_BQh[0, : message.num_tokens])

    @property
    def captured(self) -> tuple[list[int], list[int]]:
        """Numbers of rows that decode from a graph, and of places of steps with chunks."""
        return self._decode.captured_rows, self._mixed.captured_rows

    def device_totals(self) -> dict[str, KindTotals]:
        """Return the steps so far by kind, timed by the device, and forget them."""
        return self._times.totals()

    def leave_on_device(self, *, tokens: bool = False) -> None:
        """As of `StageRunner`."""
        self._hidden_stay, self._tokens_stay = True, tokens

    @torch.inference_mode()
    def take_tokens(self, slots: Sequence[int], tokens_B1: Tensor) -> None:
        """Note tokens of slots, sampled elsewhere, for steps that name them by -1."""
        slots_B = upload(slots, torch.long, self._device)
        # One that could not be chosen (NOT_FINITE_TOKEN) is none to be embedded.
        self._decode.remember(slots_B, tokens_B1[:, 0].to(self._device).clamp(min=0))

    @torch.inference_mode()
    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | HostCopy:
        """Return hidden states [1, T, h] on the host, or the token of each row [B, 1].

        What a row gets that samples nothing means nothing.
        """
        self.kv.take_rows(message.rows_with_news, message.starts_with_news)
        states = self.kv.states
        if states is not None:
            states.load(message.rows_with_news)
        if message.kind is StepKind.ROUND:
            round_ = partial(self._round, message)
            return self._times.of(message.kind, message.num_rows, round_)
        graphs = self._staged(message)
        if self._late is not None:
            self._late.draw()  # in front of this step, which may build on its tokens
        self._share_tokens(message)
        run = partial(self._run, graphs, message, hidden_BQH)
        out = self._times.of(message.kind, message.num_rows, run)
        if states is not None:
            states.save(message.rows_with_news)
        return out

    @torch.inference_mode()
    def repeatable(
        self, message: StepMessage, hidden_BQH: Tensor | None
    ) -> Callable[[], Tensor | HostCopy]:
        """Return a step as a call to repeat: its rows are staged once, the rest is as in `run`."""
        self.kv.take_rows(message.rows_with_news, message.starts_with_news)
        return partial(self._run, self._staged(message), message, hidden_BQH)

    def _share_tokens(self, message: StepMessage) -> None:
        """Give the devices of a stage the tokens that a step names by -1: the first drew them."""
        reduce = self.model.reduce
        if reduce is None or not (message.tokens_T == PENDING_TOKEN).any():
            return
        table_S = self._decode.last_token_S
        if self.model.head is None:
            table_S.zero_()
        reduce(table_S)

    def _staged(self, message: StepMessage) -> PagedGraphs:
        """Send a step's rows to the device; return what runs such steps."""
        graphs = self._graphs_of(message)
        assert isinstance(graphs, PagedGraphs)
        graphs.stage(message)
        return graphs

    def _graphs_of(self, message: StepMessage) -> PagedGraphs | PagedRoundGraphs:
        """Return what runs such steps."""
        if message.kind is StepKind.ROUND:
            return self._round_graphs(message.q_len - 1)
        if message.kind is StepKind.DRAFT:
            assert self._drafts is not None, "drafts need enable_speculation"
            return self._drafts
        chunks = message.q_len > 1
        drafted = any(row.drafts for row in message.rows_with_news)
        if self.model.is_last and (drafted or (self._sees_all and chunks)):
            return self._verify
        return self._mixed if chunks else self._decode

    def _run(
        self, graphs: PagedGraphs, message: StepMessage, hidden_BQH: Tensor | None
    ) -> Tensor | HostCopy:
        scored = self.wants_every_place(message)
        every = scored and graphs is not self._verify
        out = (graphs.run_every_place if every else graphs.run_staged)(message, hidden_BQH)
        if self.model.head is None:
            assert out.hidden_BQh is not None
            hidden_BQh = out.hidden_BQh[:, : message.num_tokens]
            return hidden_BQh.clone() if self._hidden_stay else hidden_BQh.cpu()
        if graphs is self._drafts:
            return self._answer(self._drafted_B1(out, message))
        if scored:
            self._score_places(out.hidden_BQh, message)
        plain = self._tokens_stay and not speculates(message.news)
        if graphs is self._verify or (self.mtp is not None and not plain):
            table = self._verified(out, message)
            return table.to(self._device) if plain else table
        if self._whole and self._looks_ahead(out, message):
            self._late = LateTokens(
                self._device, message.num_rows, partial(self._draw, out, message)
            )
            return self._late.result
        return self._answer(self._tokens_B(out, message)[:, None])

    def _round(self, message: StepMessage) -> Tensor | HostCopy:
        """Return the counts and new tokens of a round's rows."""
        table_BK = self._round_graphs(message.q_len - 1).run(message, None).table_BK
        assert table_BK is not None
        return self._answer(table_BK[: message.num_rows])

    def _round_graphs(self, gamma: int) -> PagedRoundGraphs:
        if gamma not in self._rounds:
            assert self.draft is not None
            own = (self.model, self.kv, self.draft, gamma)
            self._rounds[gamma] = PagedRoundGraphs(*own, **self._graph_options)
            self._rounds[gamma].share(self._decode)
        return self._rounds[gamma]

    def _answer(self, tokens_B1: Tensor) -> Tensor | HostCopy:
        if self._tokens_stay:
            return tokens_B1.clone()
        return to_host_async(tokens_B1) if self._whole else tokens_B1.cpu()

    def _drafted_B1(self, out: StepOutput, message: StepMessage) -> Tensor:
        """Return the tokens of a draft step, the most likely ones or drawn."""
        assert out.tokens_B is not None and out.logits_BV is not None
        num_rows = message.num_rows
        if message.sampling.greedy:
            return out.tokens_B[:num_rows, None].clamp(min=0)
        return self._drafted(out.logits_BV[:num_rows].clone(), message)[:, None]

    def _verified(self, out: StepOutput, message: StepMessage) -> Tensor:
        """Return the rows' new tokens where some have drafts, or are drafted for, on the host."""
        greedy = message.sampling.greedy
        if self.mtp is not None and greedy and not self.sampler.knows(message):
            assert out.hidden_BQh is not None
            made = self.mtp.round(message, out.hidden_BQh[:, : message.num_tokens])
            if made is not None:
                return result_table(message, *made)
        rows = self._new_tokens(self._wanted_logits(out, message), message)
        drafts = None
        if self.mtp is not None:
            assert out.hidden_BQh is not None
            drafts = self.mtp.draft(message, out.hidden_BQh[:, : message.num_tokens], rows)
        return result_table(message, rows, drafts)

    def _wanted_logits(self, out: StepOutput, message: StepMessage) -> Tensor | None:
        """Return the logits that rows want, one row's behind the other's; None where none does."""
        wanted = zip(np.cumsum(message.num_new_B).tolist(), message.wanted_B.tolist(), strict=True)
        places = [place for end, count in wanted for place in range(end - count, end)]
        if not places:
            return None
        places_N = upload(places, torch.long, self._device)
        if out.logits_BV is not None:  # each row's newest token is its only one
            return out.logits_BV[places_N]
        assert self.model.head is not None and out.hidden_BQh is not None
        logits_NV: Tensor = self.model.head(out.hidden_BQh[0, places_N])
        return logits_NV

    def _looks_ahead(self, out: StepOutput, message: StepMessage) -> bool:
        """Have others find what guided rows may go on with, if there are any; return whether."""
        if not self.sampler.knows(message):
            return False
        rows = np.flatnonzero(message.samples_B).tolist()
        assert out.logits_BV is not None
        return bool(rows) and self.sampler.look_ahead(message.of_rows(rows), out.logits_BV)

    def _draw(self, out: StepOutput, message: StepMessage) -> Tensor:
        """Return the tokens [B, 1] of a step that was left to be drawn."""
        self._late = None
        tokens_B = self._chosen_B(out, message)
        self._times.goes_on()
        return tokens_B[:, None]

    def _tokens_B(self, out: StepOutput, message: StepMessage) -> Tensor:
        """Return the rows' tokens: the most likely ones, or drawn and ruled where that is asked."""
        assert out.tokens_B is not None and out.logits_BV is not None
        known = self.sampler.knows(message)
        if message.sampling.greedy and not known:
            return out.tokens_B[: message.num_rows]
        rows = np.flatnonzero(message.samples_B).tolist()
        if all(message.sampling[row].greedy for row in rows) and not known or not rows:
            return out.tokens_B[: message.num_rows]
        return self._chosen_B(out, message)

    def _chosen_B(self, out: StepOutput, message: StepMessage) -> Tensor:
        """Return the rows' tokens, those that are sampled drawn and ruled."""
        assert out.tokens_B is not None and out.logits_BV is not None
        rows = np.flatnonzero(message.samples_B).tolist()
        slots = message.slots_B[rows].tolist()
        rows_R, slots_R = upload([rows, slots], torch.long, self._device)
        alike = rows == list(range(len(rows)))
        logits_RV = out.logits_BV[: len(rows)] if alike else out.logits_BV[rows_R]
        drawn_R = self.sampler.pick(logits_RV, message.of_rows(rows))
        self._decode.remember(slots_R, drawn_R)
        likeliest_B = out.tokens_B[: message.num_rows]
        whole = len(rows) == message.num_rows
        drawn_B = drawn_R if whole else likeliest_B.index_copy(0, rows_R, drawn_R)
        return torch.where(likeliest_B == NOT_FINITE_TOKEN, likeliest_B, drawn_B)

    def _score_places(self, hidden_BQh: Tensor | None, message: StepMessage) -> None:
        """Note scores of prompts' tokens, of one row after the other."""
        assert self.model.head is not None and hidden_BQh is not None
        first = 0
        for row, count in enumerate(message.num_new_B.tolist()):
            own = hidden_BQh[:, first : first + count]
            self.sampler.score_prompts(self.model.head, own, message.of_rows([row]))
            first += count

    def warm_up(self, rows: int, step_tokens: int, *, gamma: int = 0, capture: bool = True) -> None:
        """Capture steps of chunks and decode steps of up to so many rows, the largest first.

        None is left to be captured while requests wait, but without `capture`: then each is when it
        first comes. Their kernels, and those of longer steps, are compiled before, side by side. No
        request owns what they leave in the cache.
        """
        captured = [*self._captured_steps(rows, step_tokens, gamma)]
        began_s = time.perf_counter()
        with compiling_missing():
            for step in (*self._long_steps(step_tokens), *captured):
                message, hidden = self._zeros(*step)
                self.kv.take_rows(message.rows_with_news, message.starts_with_news)
                self._graphs_of(message).run_through(message, hidden)
        self.compiled_s = time.perf_counter() - began_s
        for step in captured if capture else ():
            self.run(*self._zeros(*step))
        if capture and self.mtp is not None:
            for counts in self._head_steps(self.mtp, rows, gamma):
                self.mtp.further(self._zeros(StepKind.DECODE, counts, ())[0])
            for count in self.mtp.single.sizes(rows) if gamma else ():
                if self.mtp.rounds(count, gamma):
                    each = [gamma + 1] * count
                    self.mtp.further_round(self._zeros(StepKind.MIXED, each, (0,) * gamma)[0])
        self._times.forget()

    def _head_steps(self, head: CudaMtpDrafts, rows: int, gamma: int) -> Iterator[list[int]]:
        """Yield the new tokens of rows of the steps that the model's own head takes often."""
        each = max(1, gamma) + 1
        for places in rungs(rows * each):
            yield self._shared_out(places, rows, each)
        for count in head.single.sizes(rows):
            yield [1] * count

    def _captured_steps(
        self, rows: int, step_tokens: int, gamma: int
    ) -> Iterator[tuple[StepKind, list[int], Sequence[int]]]:
        """Yield the steps that are captured: kind, tokens of each row, drafts of each."""
        longest = self._columns * BLOCK_TOKENS
        for places in rungs(max(step_tokens, rows + 1)):
            yield StepKind.PREFILL, [min(places, longest)], ()
        for count in self._decode.sizes(rows):
            yield StepKind.DECODE, [1] * count, ()
        for count in self._drafts.sizes(rows) if self._drafts is not None else ():
            yield StepKind.DRAFT, [1] * count, ()
        drafts = (0,) * gamma
        if gamma and self.fused_rounds:
            for count in sorted({rounded_rows(n, rows) for n in range(1, rows + 1)}, reverse=True):
                yield StepKind.ROUND, [gamma + 1] * count, drafts
        elif gamma and self.model.is_last:
            for places in rungs(max(step_tokens, rows * (gamma + 1))):
                yield StepKind.MIXED, self._shared_out(places, rows, gamma + 1), drafts

    def _shared_out(self, places: int, rows: int, each: int) -> list[int]:
        """Return the tokens of rows of a step of so many places: `each`, and the rest."""
        counts = [each] * max(1, min(rows, places // each))
        counts[0] = min(self._columns * BLOCK_TOKENS, places - sum(counts[1:]))
        return counts

    def _long_steps(self, step_tokens: int) -> Iterator[tuple[StepKind, list[int], Sequence[int]]]:
        """Yield prompts' steps that are not captured: the longest, half of it and so on."""
        longest = self._columns * BLOCK_TOKENS
        tokens = min(step_tokens, self._size.slots * longest)
        while tokens > CAPTURED_TOKENS:
            whole, rest = divmod(tokens, longest)
            yield StepKind.PREFILL, [longest] * whole + [rest] * (rest > 0), ()
            tokens //= 2

    def _zeros(
        self, kind: StepKind, counts: list[int], drafts: Sequence[int]
    ) -> tuple[StepMessage, Tensor | None]:
        """Return a step of rows of zeros that all stand at the start of slot 0, in block 0."""
        count = len(counts)
        blocks = (0,) * -(-max(counts) // BLOCK_TOKENS)
        row = PagedRow(slot=0, new_blocks=blocks, drafts=tuple(drafts))
        message = message_of_rows(kind, [0] * count, [0] * count, counts, rows=[row] * count)
        hidden = None
        if self.model.embedding is None:
            hidden = torch.zeros((1, sum(counts), self.model.spec.hop_features), dtype=self._dtype)
        return message, hidden
