"""One engine in predicted time: the runtime's scheduler, and stages that take as long as predicted.

The loop is that of the first stage (engine/stage_loop.py): it takes what has come, issues steps
while more may be under way, then waits for the oldest one's tokens. A CPU stage computes in that
loop, a GPU beside it. Stages and links are resources, each of which serves steps in order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from llmpq.runtime.engine.pool_limits import PoolLimits, max_ahead, max_in_flight
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import MicroBatch, Request
from llmpq.runtime.simulate.counted_scheduler import CountedBatch, CountedScheduler
from llmpq.runtime.simulate.rounds import Clock, SteadySteps, pass_rounds
from llmpq.runtime.simulate.step_scheduler import StepScheduler
from llmpq.runtime.simulate.step_times import StepRows, TimedStage
from llmpq.service_measures import ServedRequest, ServiceLimits

TOKEN = 5
"""Stands for any token of an answer."""


def scheduler_of(limits: PoolLimits) -> StepScheduler:
    """Return what decides an engine's steps: from counts where these are enough, four times as
    quick, else with the tables that stages would get."""
    return CountedScheduler(limits) if CountedScheduler.suffice(limits) else Scheduler(limits)


class SimulatedEngine:
    """The scheduler of one engine, and the clock of its first stage."""

    def __init__(
        self,
        limits: PoolLimits,
        stages: Sequence[TimedStage],
        *,
        host_s: float = 0.0,
        ended: Callable[[ServedRequest], None] | None = None,
        within: ServiceLimits | None = None,
        missed: Callable[[int], None] | None = None,
    ) -> None:
        """`host_s`: what the host needs for each step beside the stages.

        `ended`: called with each request as it ends; `missed`: with the number of each that is
        under way when it can no longer be `within` limits. What they raise ends the simulation.
        """
        self._scheduler = scheduler_of(limits)
        self._stages = stages
        self._host_s = host_s
        self._ended, self._missed = ended, missed
        self._within = ServiceLimits() if missed is None or within is None else within
        self._due: list[tuple[float, int, float, int]] = []
        """(when it is late, its number, since when, tokens for which it has had time) of requests:
        that lack the first token (0 tokens), or others behind it."""
        ahead = limits.tokens_ahead > 1
        self._most = max_ahead(len(stages)) if ahead else max_in_flight(len(stages))
        self._free = [0.0] * (2 * len(stages))
        self._under_way: deque[tuple[MicroBatch, float]] = deque()
        self._inbox: deque[tuple[float, Request]] = deque()
        self._at: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self.now = 0.0
        self.served: list[ServedRequest] = []
        self.num_steps = 0
        self._steady = SteadySteps()

    def submit(self, at_s: float, request: Request) -> None:
        """Queue a request that comes at a time, not before those submitted so far."""
        self._inbox.append((at_s, request))

    def advance(self, until_s: float = math.inf, *, late: Callable[[], bool] | None = None) -> None:
        """Go on until the clock is there, or nothing is left to do.

        `late`: whether to give up, asked before every step; `TimeoutError` where it is.
        """
        while self.now < until_s:
            if late is not None and late():
                raise TimeoutError("the simulation did not end in time")
            if not self._under_way and self._scheduler.idle:
                if not self._inbox or self._inbox[0][0] >= until_s:
                    return
                self.now = max(self.now, self._inbox[0][0])
            self._pass_rounds(min(until_s, self._inbox[0][0] if self._inbox else math.inf))
            self._take()
            if self._due and self._due[0][0] < self.now:
                self._note_missed()
            issued = []
            while len(self._under_way) < self._most:
                micro_batch = self._scheduler.next_micro_batch()
                if micro_batch is None:
                    break
                self._issue(micro_batch)
                issued.append(micro_batch)
            assert self._under_way, "requests wait that no step takes"
            oldest, _ = self._under_way[0]
            ended = self._finish_oldest()
            self._steady.note(issued, ended=oldest, goes_on=not ended)

    def _take(self) -> None:
        while self._inbox and self._inbox[0][0] <= self.now:
            at_s, request = self._inbox.popleft()
            self._at[request.id] = at_s
            if self._within.ttft_s is not None:
                heappush(self._due, (at_s + self._within.ttft_s, request.id, at_s, 0))
            self._scheduler.submit(request)
            self._steady.clear()

    def _note_missed(self) -> None:
        """Tell of the requests that are late by now, whatever comes."""
        assert self._missed is not None
        while self._due and self._due[0][0] < self.now:
            _, number, since_s, tokens = heappop(self._due)
            if number not in self._at or (not tokens and number in self._first):
                continue
            each_s = (self.now - since_s) / max(1, tokens)
            limit_s = self._within.tpot_s if tokens else self._within.ttft_s
            if limit_s is not None and each_s > limit_s:
                self._missed(number)

    def _pass_rounds(self, until_s: float) -> None:
        """Pass steps in which the same rows decode and nothing else happens, if there are some."""
        clock, steps = pass_rounds(
            self._scheduler,
            self._stages,
            self._steady,
            self._under_way,
            Clock(self.now, self._free, deque()),
            host_s=self._host_s,
            until_s=until_s,
            token=TOKEN,
        )
        self.now, self._free, self.num_steps = clock.now, clock.free, self.num_steps + steps

    def _issue(self, micro_batch: MicroBatch) -> None:
        self.now += self._host_s
        rows, free = step_rows(micro_batch), self._free
        arrives, self.num_steps = self.now, self.num_steps + 1
        for place, stage in enumerate(self._stages):
            begin = max(arrives, free[2 * place])
            arrives = begin + stage.seconds(rows)
            free[2 * place] = arrives + stage.host_s(rows)
            if place == 0 and stage.is_cpu:
                self.now = free[0]
            occupied, total = stage.hop(rows)
            begin = max(arrives, free[2 * place + 1])
            free[2 * place + 1] = begin + occupied
            arrives = begin + total
        self._under_way.append((micro_batch, arrives))

    def _finish_oldest(self) -> bool:
        """Take the oldest step's tokens; whether requests ended with them."""
        micro_batch, done_s = self._under_way.popleft()
        self.now = max(self.now, done_s)
        tokens = np.full((len(micro_batch.requests), 1), TOKEN)
        ended = self._scheduler.update_from_output(micro_batch, tokens)
        for row in micro_batch.not_only_decoding:
            request, news = micro_batch.requests[row], micro_batch.news.get(row)
            samples = news is None or news.samples
            if samples and request.id in self._at and request.id not in self._first:
                self._first[request.id] = self.now
                others = request.max_new - 1
                if others and self._within.tpot_s is not None:
                    due_s = self.now + others * self._within.tpot_s
                    heappush(self._due, (due_s, request.id, self.now, others))
        for request in ended:
            served = ServedRequest(
                number=request.id,
                at_s=self._at.pop(request.id),
                first_token_s=self._first.pop(request.id),
                end_s=self.now,
                prompt_tokens=len(request.prompt),
                output_tokens=len(request.output),
                preemptions=request.num_preemptions,
            )
            self.served.append(served)
            if self._ended is not None:
                self._ended(served)
        return bool(ended)


def step_rows(micro_batch: MicroBatch) -> StepRows:
    """Return the rows of a step: those of one token behind others decode."""
    if isinstance(micro_batch, CountedBatch):
        return micro_batch.rows
    starts_B, first = micro_batch.starts_B, micro_batch.num_decoding
    caches: list[int] = (starts_B[:first] + 1).tolist()
    chunks: list[tuple[int, int]] = []
    samples = len(starts_B)
    if samples > first:
        counts = micro_batch.num_new_B[first:].tolist()
        for start, count in zip(starts_B[first:].tolist(), counts, strict=True):
            if count == 1 and start > 0:
                caches.append(start + 1)
            else:
                chunks.append((start, count))
    for row in micro_batch.news.values():
        samples -= not row.samples
    return StepRows(chunks, caches, samples)
