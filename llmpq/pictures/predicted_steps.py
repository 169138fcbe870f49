"""The pipeline as a plan predicts it: when each stage computes which micro-batch.

Every step takes its stage's mean time (`prefill_s`, `decode_s` of plan.json) and every message its
link's; a stage and a link serve one micro-batch at a time, in order. So the bars end close to the
planner's own times, which follow the length of the cache from token to token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmpq.pictures.stage_links import link_loads

if TYPE_CHECKING:
    from llmpq.plans.plan import Plan

MOST_STEPS = 3000
"""Bars of a picture; later steps of a longer job are left out, and it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """One micro-batch on one stage."""

    stage: int
    kind: str
    batch: int
    """Number of the micro-batch; of prompts in chunks, of the chunk."""
    token: int
    """Which token of its requests it computes; 0 in prefill."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class PredictedSteps:
    """Bars in the order of time, and how many tokens of all they show."""

    steps: tuple[PipelineStep, ...]
    tokens_shown: int
    tokens: int


def predicted_steps(plan: Plan, *, most: int = MOST_STEPS) -> PredictedSteps:
    """Return the bars of a job; none where the plan predicts no times."""
    prefill_s = [stage.prefill_s for stage in plan.stages]
    decode_s = [stage.decode_s for stage in plan.stages]
    work = plan.workload
    if None in prefill_s or None in decode_s:
        return PredictedSteps(steps=(), tokens_shown=0, tokens=work.gen_len)
    loads, none = link_loads(plan), [(0.0, 0.0)] * len(plan.stages)
    hops = {
        "prefill": [(load.prefill_busy_s, load.prefill_s) for load in loads] or none,
        "decode": [(load.decode_busy_s, load.decode_s) for load in loads] or none,
    }
    busy = {"prefill": [s or 0.0 for s in prefill_s], "decode": [s or 0.0 for s in decode_s]}
    steps: list[PipelineStep] = []

    def walk(kind: str, batch: int, token: int, now: float, free: list[float]) -> float:
        for stage, (took, hop) in enumerate(zip(busy[kind], hops[kind], strict=True)):
            begin = max(now, free[2 * stage])
            now = free[2 * stage] = begin + took
            steps.append(
                PipelineStep(
                    stage=stage, kind=kind, batch=batch, token=token, start_s=begin, end_s=now
                )
            )
            sent = max(now, free[2 * stage + 1])
            free[2 * stage + 1] = sent + hop[0]
            now = sent + hop[1]
        return now

    count = len(plan.stages)
    prompts = -(-work.batch // plan.prefill_microbatch) * len(plan.chunks)
    free = [0.0] * (2 * count)
    done = 0.0
    for batch in range(min(prompts, max(1, most // count))):
        done = max(done, walk("prefill", batch, 0, 0.0, free))
    batches = -(-work.batch // plan.decode_microbatch)
    left = most - len(steps)
    shown = min(work.gen_len - 1, left // (batches * count)) if len(steps) < most else 0
    ready, free = [done] * batches, [done] * (2 * count)
    for token in range(1, shown + 1):
        for batch in range(batches):
            ready[batch] = walk("decode", batch, token, ready[batch], free)
    return PredictedSteps(steps=tuple(steps), tokens_shown=shown + 1, tokens=work.gen_len)


def busy_share(steps: Sequence[PipelineStep], stage: int) -> float:
    """Return which share of the picture a stage computes."""
    end_s = max((step.end_s for step in steps), default=0.0)
    own_s = sum(step.end_s - step.start_s for step in steps if step.stage == stage)
    return own_s / end_s if end_s else 0.0
