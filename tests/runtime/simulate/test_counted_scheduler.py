"""Steps from counts alone are those of the runtime's scheduler: same rows, ends and preemptions."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from llmpq.precision import KVPrecision
from llmpq.runtime.engine.pool_limits import PoolLimits, max_ahead, max_in_flight
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import MicroBatch, Request, StepKind
from llmpq.runtime.simulate.counted_scheduler import CountedScheduler
from llmpq.runtime.simulate.engine import TOKEN, step_rows
from llmpq.runtime.simulate.step_scheduler import StepScheduler

pytestmark = pytest.mark.pure


def _limits(rng: random.Random) -> PoolLimits:
    """Return limits that are often too narrow for what runs."""
    stages = rng.choice([1, 1, 2, 3])
    step = rng.choice([16, 128, 512])
    kv = rng.choice([KVPrecision.KV16, KVPrecision.KV16, KVPrecision.KV8])
    return PoolLimits(
        num_blocks=rng.choice([9, 12, 20, 60]),
        kv=kv,
        max_rows=rng.choice([2, 5, 16]),
        max_len=4096,
        step_tokens=step,
        mixed_tokens=rng.choice([None, step // 2]),
        fill_tokens=rng.choice([0.0, 40.0]),
        prompt_tokens=rng.choice([None, None, 64]),
        decode_rows=rng.choice([1, 3, 16]),
        num_stages=stages,
        prefix_cache=False,
        host_blocks=rng.choice([0, 0, 3, 50]) if kv is KVPrecision.KV16 else 0,
        tokens_ahead=rng.choice([1, 2]),
    )


def _requests(rng: random.Random) -> list[tuple[int, int, int]]:
    """Return (steps ended before it is submitted, tokens of its prompt, of its answer)."""
    prompts, answers = [1, 2, 30, 128, 129, 500, 700], [1, 2, 17, 129, 300]
    at = sorted(rng.randrange(rng.choice([1, 200, 1000])) for _ in range(rng.randrange(1, 20)))
    return [(when, rng.choice(prompts), rng.choice(answers)) for when in at]


def _shown(step: MicroBatch, begun: set[int]) -> tuple[Any, ...]:
    """Return what a step is, and whose first tokens it brings beside those of `begun`."""
    rows, news = step_rows(step), step.news
    brings = {n for n in step.not_only_decoding if n not in news or news[n].samples}
    first = {step.requests[n].id for n in brings} - begun
    begun |= first
    return list(rows.chunks), list(rows.caches), rows.samples, step.kind, first


def _history(
    scheduler: StepScheduler, requests: list[tuple[int, int, int]], *, at_once: bool
) -> tuple[list[Any], list[int]]:
    """Return all that happens, and preemptions of each request.

    `at_once`: rounds of decoding are passed at once where they can be.
    """
    limits = scheduler.limits
    most = (max_ahead if limits.tokens_ahead > 1 else max_in_flight)(limits.num_stages)
    asked = [
        Request(id=n, prompt=(1,) * prompt, max_new=answer)
        for n, (_, prompt, answer) in enumerate(requests)
    ]
    inbox = deque(zip([at for at, _, _ in requests], asked, strict=True))
    under_way = deque[MicroBatch]()
    happens: list[Any] = []
    begun, ended_steps = set[int](), 0
    while inbox or not scheduler.idle:
        while inbox and (inbox[0][0] <= ended_steps or scheduler.idle):
            scheduler.submit(inbox.popleft()[1])
        while len(under_way) < most and (step := scheduler.next_micro_batch()) is not None:
            under_way.append(step)
            happens.append(_shown(step, begun))
        oldest = under_way.popleft()
        tokens = np.full((len(oldest.requests), 1), TOKEN)
        happens.append([request.id for request in scheduler.update_from_output(oldest, tokens)])
        ended_steps += 1
        steps = [oldest, *under_way]
        if at_once and all(one.kind is StepKind.DECODE for one in steps):
            groups = [one.members_B for one in steps]
            repeats = scheduler.repeats(groups)
            groups = groups if limits.tokens_ahead == 1 else groups[:1]
            rounds = scheduler.rounds_ahead() if repeats else 0
            happens.append((repeats, rounds))
            if rounds:
                happens.append(list(map(scheduler.next_caches, groups)))
                scheduler.pass_rounds(rounds, rounds * len(groups), under_way, TOKEN)
    return happens, [request.num_preemptions for request in asked]


@pytest.mark.parametrize("seed", range(60))
def test_counts_decide_the_same_steps(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        limits, requests, at_once = _limits(rng), _requests(rng), rng.random() < 0.5
        counted = _history(CountedScheduler(limits), requests, at_once=at_once)
        whole = _history(Scheduler(limits), requests, at_once=at_once)
        assert counted == whole, (limits, requests)
