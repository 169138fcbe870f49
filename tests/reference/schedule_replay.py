"""Replays the scheduler's decisions in simulated time: what a pipeline of given costs would do.

The first stage issues as in stage_loop.FirstStage, stages serve micro-batches in order. No device,
no tokens: every request generates `max_new` tokens. Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmpq.runtime.engine.pool_limits import max_in_flight
from llmpq.runtime.engine.slot_scheduler import SlotScheduler
from llmpq.runtime.request import MicroBatch, Request, StepKind

StageCost = Callable[[MicroBatch], float]
"""Seconds one stage needs for a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What happened, in simulated seconds."""

    makespan_s: float
    busy_s: tuple[float, ...]
    """Per stage."""
    tokens: int
    finished_s: dict[int, float]
    """Request id -> when it ended."""

    @property
    def busy_share(self) -> float:
        """Mean share of the time the stages were at work."""
        return sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


def replay(
    scheduler: SlotScheduler, requests: Sequence[Request], stage_costs: Sequence[StageCost]
) -> Replay:
    """Serve all requests, present from the start, on stages of the given costs."""
    for request in requests:
        scheduler.submit(request)
    free_s = [0.0] * len(stage_costs)
    busy_s = [0.0] * len(stage_costs)
    in_flight: deque[tuple[MicroBatch, float]] = deque()
    finished_s: dict[int, float] = {}
    while True:
        while len(in_flight) < max_in_flight(len(stage_costs)):
            micro_batch = scheduler.next_micro_batch()
            if micro_batch is None:
                break
            arrives_s = free_s[0]
            for stage, cost in enumerate(stage_costs):
                seconds = cost(micro_batch)
                arrives_s = max(arrives_s, free_s[stage]) + seconds
                free_s[stage] = arrives_s
                busy_s[stage] += seconds
            in_flight.append((micro_batch, arrives_s))
        if not in_flight:
            break
        micro_batch, done_s = in_flight.popleft()
        free_s[0] = max(free_s[0], done_s)
        for request in scheduler.update_from_output(micro_batch, _tokens(micro_batch)):
            finished_s[request.id] = done_s
    return Replay(
        makespan_s=max(free_s),
        busy_s=tuple(busy_s),
        tokens=scheduler.generated_tokens,
        finished_s=finished_s,
    )


def _tokens(micro_batch: MicroBatch) -> list[list[int]]:
    """Return one token a row; a verify accepts all of its drafts."""
    if micro_batch.kind is StepKind.VERIFY:
        return [[0] * len(tokens) for tokens in micro_batch.tokens]
    return [[0]] * len(micro_batch.requests)
