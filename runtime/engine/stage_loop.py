"""The loops that stages run: receive, forward, send.

The first stage also holds the scheduler: it issues micro-batches while it may have more in flight,
then waits for the oldest one's tokens. Knows nothing of Ray or processes; the links are a
`Transport`, so the same loops run as actors and as threads of one process.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from torch import Tensor

from llmpq.runtime.engine.pool_limits import max_ahead, max_in_flight
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.links.transport import Transport
from llmpq.runtime.requests.request import (
    NOT_FINITE,
    PENDING_TOKEN,
    STOP,
    Abort,
    Finished,
    Halt,
    Ints,
    Mailbox,
    MicroBatch,
    PagedRow,
    Progress,
    Request,
    ResetPrefixCache,
    StepKind,
    StepMessage,
)
from llmpq.runtime.steps.device_copies import HostCopy, arrived
from llmpq.runtime.steps.step import result_drafts, result_width, speculates
from llmpq.runtime.steps.trace import Recorder


class Compute(Protocol):
    """The arithmetic of one stage."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may name tokens by -1 that the step before has yet to produce."""
        ...

    @property
    def fused_rounds(self) -> bool:
        """Whether a round of drafts and its verify can be one step, fused on the device."""
        ...

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | HostCopy:
        """Return hidden states, or on the last stage the result table of sampled tokens."""
        ...

    def take_tokens(self, slots: Sequence[int], tokens_B1: Tensor) -> None:
        """Note tokens of slots, sampled elsewhere, for steps that name them by -1."""
        ...

    def end_speculation(self) -> None:
        """Go on without drafts, and free what they take."""
        ...


_WITH_PROMPTS = (StepKind.PREFILL, StepKind.MIXED)


def result_tokens(
    kind: StepKind, result_BK: Tensor, news: Mapping[int, PagedRow]
) -> Ints | list[list[int]]:
    """Return the new tokens of each row: an array [B, 1] where each has one."""
    if kind is StepKind.ROUND or any(row.drafts for row in news.values()):
        table: list[list[int]] = result_BK.tolist()
        return [line[1 : 1 + line[0]] for line in table]
    tokens_B1: Ints = result_BK.numpy()[:, :1]
    return tokens_B1.tolist() if kind is StepKind.DRAFT else tokens_B1


def run_following_stage(
    compute: Compute, transport: Transport, recorder: Recorder, *, last: bool
) -> None:
    """Serve every stage but the first until STOP passes through."""
    while True:
        message, hidden_BQH = transport.receive_step()
        if message.kind is StepKind.STOP:
            break
        with recorder.step(message.kind, message.seq, message.num_rows, message.q_len):
            output = arrived(compute.run(message, hidden_BQH))
        if last:
            transport.send_tokens(output)
        else:
            with recorder.waiting(message.kind):  # for a slower stage behind this one
                transport.send_step(message, output)
    if not last:
        transport.send_step(STOP, None)
    transport.close()


@dataclass(frozen=True)
class _Flight:
    """A micro-batch under way; its result is None while it travels through other stages."""

    micro_batch: MicroBatch
    result: Tensor | HostCopy | None
    slots: Sequence[int] = ()
    """The rows' slots when it was issued."""


class FirstStage:
    """The loop of the first stage; with one stage it is the whole engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        compute: Compute,
        transport: Transport | None,
        mailbox: Mailbox,
        recorder: Recorder,
        *,
        num_stages: int,
    ) -> None:
        assert (transport is None) == (num_stages == 1)
        self._scheduler, self._compute, self._transport = scheduler, compute, transport
        self._mailbox, self._recorder = mailbox, recorder
        self._num_stages = num_stages
        scheduler.fused_rounds = compute.fused_rounds
        self._runs_ahead = compute.runs_ahead if transport is None else transport.tokens_on_device
        ahead = self._runs_ahead or compute.fused_rounds
        self._max_in_flight = max_ahead(num_stages) if ahead else max_in_flight(num_stages)
        self._in_flight: deque[_Flight] = deque()
        self._num_brought = 0
        """Flights, from the oldest on, whose tokens were brought to the device's table."""
        self._closed = self._halted = False
        self._open: dict[int, Request] = {}
        """Requests that have not ended, by id."""
        self._submitted_s: dict[int, float] = {}
        self._begun_s: dict[int, float] = {}
        self._deadlines: list[tuple[float, int]] = []
        """When requests are to be ended that have not, soonest first."""
        self._first_token_s: dict[int, float] = {}
        self._num_finished = self._prompt_tokens = 0
        mailbox.progress = Progress(gauges=scheduler.gauges())
        mailbox.wake()  # the pool's size is known before the first request

    def run(self) -> None:
        """Serve requests until the mailbox is closed and all of them have ended, or it halts."""
        while True:
            self._take_submissions(wait=self._scheduler.idle and not self._in_flight)
            self._end_late()
            while (
                not self._halted
                and len(self._in_flight) < self._max_in_flight
                and not self._drafts_are_ending()
            ):
                micro_batch = self._scheduler.next_micro_batch()
                if micro_batch is None:
                    break
                self._issue(micro_batch)
            if self._in_flight:
                self._finish_oldest()
            elif self._halted or (self._closed and self._scheduler.idle):
                break
        if self._transport is not None:
            self._transport.send_step(STOP, None)
            self._transport.close()

    def _drafts_are_ending(self) -> bool:
        """End drafts that pay nowhere, for good; whether rounds under way have to end before.

        With one stage only: others would need a message.
        """
        if self._transport is not None or not self._scheduler.drafts_in_vain:
            return False
        if self._in_flight:
            return True
        self._compute.end_speculation()
        self._runs_ahead = self._compute.runs_ahead
        self._scheduler.end_drafts(runs_ahead=self._runs_ahead)
        return False

    def _take_submissions(self, *, wait: bool) -> None:
        """Move submitted requests to the scheduler, waiting for one if there is nothing to do."""
        while wait or not self._mailbox.requests.empty():
            try:
                request = self._mailbox.requests.get(block=wait and not self._closed)
            except queue.Empty:
                return
            wait = False
            if request is None:
                self._closed = True
            elif isinstance(request, Abort):
                self._abort(request.id)
            elif isinstance(request, Halt):
                self._halted = True
                return
            elif isinstance(request, ResetPrefixCache):
                self._scheduler.tables.forget_prefixes()
            else:
                now_s = self._submitted_s[request.id] = time.perf_counter()
                if request.timeout_s is not None:
                    heappush(self._deadlines, (now_s + request.timeout_s, request.id))
                self._open[request.id] = request
                self._scheduler.submit(request)

    def _end_late(self) -> None:
        """End requests whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            _, request_id = heappop(self._deadlines)
            if request_id in self._open:
                self._abort(request_id)

    def _abort(self, request_id: int | None) -> None:
        """End a request, or all, as soon as may be; one that has ended stays as it is."""
        known = [r for r in self._open.values() if request_id in (None, r.id)]
        ended = [request for request in known if self._scheduler.abort(request)]
        if ended:
            self._publish(StepKind.DECODE, ended, time.perf_counter())

    def _issue(self, micro_batch: MicroBatch) -> None:
        if self._transport is not None and self._runs_ahead:
            self._bring_tokens(micro_batch, self._transport)
        if len(self._begun_s) < len(self._open):
            now_s = time.perf_counter()
            for row in micro_batch.not_only_decoding:
                self._begun_s.setdefault(micro_batch.of.numbers[row], now_s)
        kind, num_rows = micro_batch.kind, micro_batch.num_rows
        self._recorder.count_tokens(micro_batch.num_tokens)
        with self._recorder.step(
            kind, micro_batch.seq, num_rows, micro_batch.q_len, micro_batch.of.numbers
        ):
            output = self._compute.run(micro_batch, None)
        if self._transport is None:
            self._in_flight.append(_Flight(micro_batch, output))
        else:
            with self._recorder.waiting(kind):
                self._transport.send_step(micro_batch, arrived(output))
            self._in_flight.append(_Flight(micro_batch, None, micro_batch.slots_B.tolist()))

    def _bring_tokens(self, micro_batch: MicroBatch, transport: Transport) -> None:
        """Have the device wait for tokens that this step builds on and the host does not know.

        In order, since slots change hands: a later flight's tokens must overwrite an earlier one's.
        """
        count = micro_batch.num_decoding  # whose tokens are the first ones
        pending_D = micro_batch.tokens_T[:count] == PENDING_TOKEN
        unknown = micro_batch.arrivals_B[:count][pending_D]
        needed = 0
        for place, flight in enumerate(self._in_flight):
            if np.isin(unknown, flight.micro_batch.arrivals_B).any():
                needed = place + 1
        for place in range(self._num_brought, needed):
            slots = self._in_flight[place].slots
            if speculates(self._in_flight[place].micro_batch.news):
                continue  # no step builds on such tokens before the host knows them
            self._compute.take_tokens(slots, transport.bring_tokens(place, len(slots)))
        self._num_brought = max(self._num_brought, needed)

    def _finish_oldest(self) -> None:
        flight = self._in_flight.popleft()
        self._num_brought = max(0, self._num_brought - 1)
        micro_batch, result = flight.micro_batch, flight.result
        kind = micro_batch.kind
        if result is None:
            assert self._transport is not None
            width = result_width(micro_batch.news)
            result = self._transport.receive_tokens(len(micro_batch.requests), width)
        # Devices work on their own: what one of them never finishes shows here.
        late = isinstance(result, HostCopy)
        with self._recorder.waiting(kind, self._num_stages) if late else nullcontext():
            table = arrived(result)
            tokens = result_tokens(kind, table, micro_batch.news)
        finished = self._scheduler.update_from_output(micro_batch, tokens)
        drafts = result_drafts(table, micro_batch.news)
        if drafts:
            self._scheduler.take_drafts(micro_batch, drafts)
        now_s = time.perf_counter()
        if kind in _WITH_PROMPTS:
            self._prompt_tokens += micro_batch.num_prompt_tokens
        if len(self._first_token_s) < len(self._open):
            for row in micro_batch.not_only_decoding:
                request = micro_batch.requests[row]
                if request.output and request.id in self._open:
                    self._first_token_s.setdefault(request.id, now_s)
        self._publish(kind, finished, now_s)

    def _publish(self, kind: StepKind, finished: Sequence[Request], now_s: float) -> None:
        """Publish what a step, or an abort, brought."""
        (tokens, awaited), done = self._scheduler.take_new_tokens(), []
        for request in finished:
            del self._open[request.id]
            submitted_s = self._submitted_s.pop(request.id)
            done.append(
                Finished(
                    id=request.id,
                    tokens=request.output,
                    finish_reason=request.finish_reason or "length",
                    failure=NOT_FINITE if request.finish_reason == "error" else None,
                    first_token_s=self._first_token_s.pop(request.id, now_s) - submitted_s,
                    total_s=now_s - submitted_s,
                    queue_s=self._begun_s.pop(request.id, now_s) - submitted_s,
                    num_prefix_hits=request.num_prefix_hits,
                    num_preemptions=request.num_preemptions,
                )
            )
        self._num_finished += len(done)
        with self._mailbox.changed:
            self._mailbox.progress = Progress(
                waiting=self._scheduler.num_waiting,
                running=self._scheduler.num_running,
                finished=self._num_finished,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._scheduler.generated_tokens,
                phase=kind.name.lower(),
                gauges=self._scheduler.gauges(),
            )
            self._mailbox.tokens += tokens
            self._mailbox.finished.extend(done)
            if done or awaited:
                self._mailbox.awaited = True
                self._mailbox.changed.notify_all()
