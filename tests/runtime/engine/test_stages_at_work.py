"""Stages on a clock: two that run ahead of their tokens, three unequal ones that do not."""

import random
from collections import deque

import pytest

from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits, max_ahead, max_in_flight
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import PENDING_TOKEN, Request, StepKind

pytestmark = pytest.mark.cpu


def limits(**changed):
    values = {
        "num_blocks": 2000,
        "max_rows": 64,
        "max_len": 4096,
        "step_tokens": 128,
        "decode_rows": 64,
        "num_stages": 2,
        "tokens_ahead": 2,
    }
    return PoolLimits(**values | changed)


def seconds(micro_batch):
    """What a stage computes: weights read once, or tokens; and every row's cache."""
    tokens = sum(map(len, micro_batch.tokens))
    return max(2.4e-3, 45e-6 * tokens) + 15e-9 * sum(micro_batch.starts_B)


def busy_shares(scheduler, speeds=(1.0, 1.0), most=max_ahead):
    """Serve to the end over stages; return the slowest one's share of the time at work.

    `speeds`: how many times as long as `seconds` each computes. `most`: steps under way.
    """
    flights, free_s, busy_s, now_s = deque(), [0.0] * len(speeds), 0.0, 0.0
    while not scheduler.idle:
        while len(flights) < most(len(speeds)):
            step = scheduler.next_micro_batch()
            if step is None:
                break
            rows = zip(step.requests, step.tokens, strict=True)
            asked = {request.id for request, tokens in rows if PENDING_TOKEN in tokens}
            known_s = [f[1] for f in flights if any(r.id in asked for r in f[0].requests)]
            at_s = max(now_s, *known_s, 0.0)
            for stage, speed in enumerate(speeds):
                at_s = free_s[stage] = max(at_s, free_s[stage]) + speed * seconds(step)
            busy_s += max(speeds) * seconds(step)
            flights.append((step, at_s))
        step, now_s = flights.popleft()
        scheduler.update_from_output(step, [[1]] * len(step.requests))
        scheduler.check()
    return busy_s / now_s


def test_both_stages_stay_at_work():
    rng = random.Random(0)
    scheduler = Scheduler(limits())
    for number in range(150):
        prompt = tuple([number] * rng.randint(20, 400))
        scheduler.submit(Request(id=number, prompt=prompt, max_new=rng.randint(20, 150)))
    assert busy_shares(scheduler) > 0.85


def test_one_request_is_not_held_back():
    scheduler = Scheduler(limits())
    scheduler.submit(Request(id=0, prompt=(1, 2, 3), max_new=20))
    assert busy_shares(scheduler) > 0.45
    for number in (1, 2):
        scheduler.submit(Request(id=number, prompt=(number,), max_new=20))
    assert busy_shares(scheduler) > 0.8


def test_prompts_go_with_rows_that_decode():
    """As many as run at once, and others waiting: next to no step is of prompts alone."""
    rng, kinds = random.Random(1), []
    scheduler = Scheduler(limits(max_rows=48))
    for number in range(300):
        prompt = tuple([number] * rng.randint(200, 600))
        scheduler.submit(Request(id=number, prompt=prompt, max_new=rng.randint(20, 150)))
    issued = scheduler.next_micro_batch

    def noted():
        step = issued()
        if step is not None:
            kinds.append(step.kind)
        return step

    scheduler.next_micro_batch = noted
    assert busy_shares(scheduler) > 0.95
    assert kinds.count(StepKind.PREFILL) < 0.02 * len(kinds)


@pytest.mark.parametrize("speeds", [(0.5, 1.0, 0.7), (1.0, 0.6, 0.8), (0.7, 0.9, 1.0)])
def test_the_slowest_of_three_unequal_stages_stays_at_work(speeds):
    """As on CPUs, where a row goes on once its token is known."""
    rng = random.Random(2)
    scheduler = Scheduler(limits(num_stages=3, tokens_ahead=1))
    for number in range(200):
        prompt = tuple([number] * rng.randint(20, 400))
        scheduler.submit(Request(id=number, prompt=prompt, max_new=rng.randint(20, 150)))
    assert busy_shares(scheduler, speeds, max_in_flight) > 0.9


class Resting(FixedDrafter):
    """Drafts of the model's own head, which rests when asked to."""

    resting, asked = False, 0

    @property
    def rests(self):
        return self.resting

    def gamma(self, requests):
        self.asked += 1
        return 0 if self.resting else 2


def test_rows_run_ahead_once_the_head_that_drafts_rests():
    """As without drafts: from then on the head does not see them; a request that comes later it
    does, and then tokens are waited for again."""
    drafter = Resting("mtp", 2)
    scheduler = Scheduler(limits(), drafter=drafter)

    def issued():
        step = scheduler.next_micro_batch()
        return step, None if step is None else [row.drafts_wanted for row in step.news.values()]

    def done(step, tokens):
        scheduler.update_from_output(step, tokens)
        scheduler.check()

    scheduler.submit(Request(id=0, prompt=(1, 2, 3), max_new=100))
    prompt, wanted = issued()
    assert wanted == [0] and issued()[0] is None, "its token is not known yet"
    done(prompt, [[5]])
    step, wanted = issued()
    assert wanted == [2] and issued()[0] is None
    done(step, [[6]])
    scheduler.take_drafts(step, [[7, 8]])
    drafter.resting = True
    verify, wanted = issued()
    assert verify.kind is StepKind.VERIFY and wanted == [0]
    done(verify, [[7, 8, 9]])
    first, wanted = issued()
    second, more = issued()
    assert [first.kind, second.kind] == [StepKind.DECODE] * 2 and not [*wanted, *more]
    assert first.tokens == [[9]] and second.tokens == [[PENDING_TOKEN]]
    assert issued()[0] is None, "two steps of one request are under way"
    asked = drafter.asked
    done(first, [[10]])
    third, _ = issued()
    assert third.tokens == [[PENDING_TOKEN]] and drafter.asked == asked + 1, "rounds of its rest"
    drafter.resting = False
    done(second, [[11]])
    asked, fourth = drafter.asked, issued()[0]
    assert fourth.kind is StepKind.DECODE and drafter.asked == asked, "the head has lost it"
    scheduler.submit(Request(id=1, prompt=(4, 5), max_new=100))
    done(third, [[12]])
    while (step := issued()[0]) is None or step.kind is StepKind.DECODE:
        done(fourth, [[13]])
        fourth = step
    assert [row.drafts_wanted for row in step.news.values()][-1] == 0, "the head sees its prompt"
    assert not scheduler.drafts_in_vain
