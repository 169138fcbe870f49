"""The scheduler without devices: the plan's micro-batches, slot reuse, fairness, drafts, speed."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.runtime.engine.slot_limits import SlotLimits
from llmpq.runtime.engine.slot_scheduler import SlotScheduler
from llmpq.runtime.request import MicroBatch, Request, StepKind
from reference.schedule_replay import replay

pytestmark = pytest.mark.pure


def limits(**changes) -> SlotLimits:
    values = {
        "num_slots": 8,
        "prompt_len": 16,
        "max_len": 32,
        "prefill_microbatch": 2,
        "decode_microbatch": 4,
    }
    return SlotLimits(**(values | changes))


def request(number: int, length: int = 5, max_new: int = 6, **more) -> Request:
    return Request(id=number, prompt=tuple(range(1, length + 1)), max_new=max_new, **more)


def true_token(request_id: int, position: int) -> int:
    """What the 'model' says at a position: depends on nothing else."""
    return (request_id * 31 + position * 7) % 97


class FakePipeline:
    """Runs a scheduler: `depth` micro-batches in flight, results in the order of issue."""

    def __init__(self, scheduler: SlotScheduler, depth: int, right_drafts: float = 1.0) -> None:
        self.scheduler, self.depth, self.right = scheduler, depth, right_drafts
        self.issued: list[MicroBatch] = []
        self.finished: list[Request] = []
        self.cached: dict[int, list[int]] = {}
        self._rng = random.Random(0)

    def run(self) -> None:
        in_flight: deque[MicroBatch] = deque()
        while True:
            while len(in_flight) < self.depth:
                micro_batch = self.scheduler.next_micro_batch()
                if micro_batch is None:
                    break
                self._check(micro_batch, in_flight)
                self.issued.append(micro_batch)
                in_flight.append(micro_batch)
            if not in_flight:
                return
            done = in_flight.popleft()
            self.finished += self.scheduler.update_from_output(done, self._results(done))

    def _check(self, micro_batch: MicroBatch, in_flight: deque[MicroBatch]) -> None:
        flying = {r.id for other in in_flight for r in other.requests}
        assert not flying & {r.id for r in micro_batch.requests}, "a request is in flight twice"
        slots = [r.slot for r in micro_batch.requests]
        assert len(set(slots)) == len(slots) and min(slots) >= 0
        assert len(slots) <= self.scheduler.limits.num_slots
        for r, start, tokens in zip(*_rows(micro_batch), strict=True):
            # The slot holds this request's tokens, in order and without holes, before the new ones.
            cache = self.cached.setdefault(r.slot, [])
            assert start <= len(cache) or start == 0
            del cache[start:]
            cache.extend(tokens)
            known = [*r.prompt, *r.output, *r.drafts]
            assert cache == known[: len(cache)]

    def _results(self, micro_batch: MicroBatch) -> list[list[int]]:
        return [self._row(micro_batch.kind, *row) for row in zip(*_rows(micro_batch), strict=True)]

    def _row(self, kind: StepKind, r: Request, start: int, tokens: list[int]) -> list[int]:
        first = 0 if kind is StepKind.PREFILL else start + 1 - len(r.prompt)
        if kind is StepKind.VERIFY:  # the longest right prefix and one more
            right = [d == true_token(r.id, first + k) for k, d in enumerate(r.drafts)]
            accepted = right.index(False) if False in right else len(right)
            return [true_token(r.id, first + k) for k in range(accepted + 1)]
        if kind is StepKind.DRAFT and self._rng.random() > self.right:
            return [98]
        return [true_token(r.id, first)]


def _rows(micro_batch: MicroBatch):
    return micro_batch.requests, micro_batch.starts, micro_batch.tokens


class EveryGamma:
    """A drafter that always drafts `gamma` tokens with the model, or proposes right ones."""

    def __init__(self, gamma: int, *, proposes: bool = False) -> None:
        self._gamma, self._proposes = gamma, proposes
        self.seen: list[tuple[int, int]] = []

    def gamma(self, requests):
        return self._gamma

    def propose(self, request, gamma):
        if not self._proposes:
            return None
        first = len(request.output)
        return [true_token(request.id, first + k) for k in range(min(gamma, request.id % 4))]

    def observe(self, num_drafted, num_accepted):
        self.seen.append((num_drafted, num_accepted))


def expected_output(r: Request) -> list[int]:
    return [true_token(r.id, position) for position in range(r.max_new)]


def test_a_fixed_batch_runs_in_the_plans_micro_batches():
    pipeline = FakePipeline(SlotScheduler(limits()), depth=4)
    for number in range(8):
        pipeline.scheduler.submit(request(number))
    pipeline.run()
    sizes = [(mb.kind, len(mb.requests)) for mb in pipeline.issued]
    assert sizes[:4] == [(StepKind.PREFILL, 2)] * 4
    assert sizes[4:] == [(StepKind.DECODE, 4)] * (2 * 5)
    assert [r.output for r in pipeline.finished] == [expected_output(r) for r in pipeline.finished]
    assert pipeline.scheduler.idle and pipeline.scheduler.generated_tokens == 8 * 6


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from(["continuous", "static"]),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
)
@settings(max_examples=150)
def test_every_request_gets_its_tokens(sizes, depth, prefill, decode, batching, gamma, proposes):
    drafter = EveryGamma(gamma, proposes=proposes) if gamma else None
    shape = limits(prefill_microbatch=prefill, decode_microbatch=decode, batching=batching)
    pipeline = FakePipeline(SlotScheduler(shape, drafter=drafter), depth, right_drafts=0.6)
    requests = [request(i, length, new) for i, (length, new) in enumerate(sizes)]
    for r in requests:
        pipeline.scheduler.submit(r)
    pipeline.run()
    assert {r.id for r in pipeline.finished} == {r.id for r in requests}
    assert all(r.output == expected_output(r) for r in requests)
    assert all(r.finish_reason == "length" and r.slot == -1 for r in requests)
    for micro_batch in pipeline.issued:
        prompt = micro_batch.kind is StepKind.PREFILL
        assert len(micro_batch.requests) <= (prefill if prompt else decode)
        assert micro_batch.max_end <= shape.max_len


def test_a_free_slot_is_refilled_at_once_and_first_come_is_first_served():
    pipeline = FakePipeline(SlotScheduler(limits(num_slots=2, decode_microbatch=2)), depth=2)
    for number, new in enumerate((2, 9, 2, 2, 2)):
        pipeline.scheduler.submit(request(number, max_new=new))
    pipeline.run()
    prompts = [r.id for mb in pipeline.issued if mb.kind is StepKind.PREFILL for r in mb.requests]
    assert prompts == [0, 1, 2, 3, 4]
    assert [r.id for r in pipeline.finished][-1] == 1, "the long one must not hold up the others"


def test_lower_priorities_go_first_and_equal_ones_as_they_came():
    pipeline = FakePipeline(SlotScheduler(limits(num_slots=1, decode_microbatch=1)), depth=1)
    for number, priority in enumerate((0, 1, 0, -1, 1, 0)):
        pipeline.scheduler.submit(replace(request(number, max_new=2), priority=priority))
    pipeline.run()
    assert [r.id for r in pipeline.finished] == [3, 0, 2, 5, 1, 4]


def test_static_batching_waits_for_the_whole_batch():
    pipeline = FakePipeline(SlotScheduler(limits(num_slots=2, batching="static")), depth=2)
    for number, new in enumerate((2, 9, 2, 2)):
        pipeline.scheduler.submit(request(number, max_new=new))
    pipeline.run()
    assert [r.id for r in pipeline.finished] == [0, 1, 2, 3]


def test_groups_that_shrink_merge():
    pipeline = FakePipeline(SlotScheduler(limits()), depth=2)
    for number in range(8):
        pipeline.scheduler.submit(request(number, max_new=2 if number % 2 else 12))
    pipeline.run()
    tail = [len(mb.requests) for mb in pipeline.issued[-9:]]
    assert tail[:-1] == [4] * 8, "the four that are left decode together, not two and two"


def test_very_unequal_prompts_do_not_share_a_padded_micro_batch():
    pipeline = FakePipeline(SlotScheduler(limits(prefill_microbatch=4)), depth=1)
    for number, length in enumerate((16, 1, 1, 1)):
        pipeline.scheduler.submit(request(number, length))
    pipeline.run()
    prompts = [mb for mb in pipeline.issued if mb.kind is StepKind.PREFILL]
    assert [len(mb.requests) for mb in prompts] == [1, 3]


def test_end_of_text_and_stop_texts_end_a_request_and_free_its_slot():
    stop = true_token(1, 2)
    scheduler = SlotScheduler(limits(), ends_in_stop_text=lambda r: len(r.output) == 4)
    pipeline = FakePipeline(scheduler, depth=2)
    requests = [
        request(0),
        request(1, stop_ids=frozenset({stop})),
        request(2, stop_texts=("x",)),
    ]
    for r in requests:
        scheduler.submit(r)
    pipeline.run()
    assert [len(r.output) for r in requests] == [6, 3, 4]
    assert [r.finish_reason for r in requests] == ["length", "stop", "stop"]


def test_a_stop_inside_an_accepted_draft_cuts_the_rest():
    stop = true_token(3, 2)
    pipeline = FakePipeline(SlotScheduler(limits(), drafter=EveryGamma(4)), depth=2)
    r = request(3, stop_ids=frozenset({stop}))
    pipeline.scheduler.submit(r)
    pipeline.run()
    assert r.output == expected_output(r)[:3] and r.finish_reason == "stop"


def test_rounds_draft_then_verify_and_never_beyond_the_limit():
    drafter = EveryGamma(3)
    pipeline = FakePipeline(SlotScheduler(limits(), drafter=drafter), depth=2)
    for number, new in enumerate((6, 3)):
        pipeline.scheduler.submit(request(number, max_new=new))
    pipeline.run()
    kinds = [(mb.kind.name, [len(t) for t in mb.tokens]) for mb in pipeline.issued]
    assert kinds == [
        ("PREFILL", [5, 5]),
        ("DRAFT", [1, 1]),
        ("DRAFT", [1]),
        ("DRAFT", [1]),
        ("VERIFY", [4, 2]),
        ("DECODE", [1]),
    ]
    assert drafter.seen == [(3, 3), (1, 1)]


def test_a_request_that_may_not_draft_decodes_plainly():
    drafter = EveryGamma(3)
    pipeline = FakePipeline(SlotScheduler(limits(), drafter=drafter), depth=2)
    pipeline.scheduler.submit(request(0, may_draft=False))
    pipeline.run()
    assert {mb.kind for mb in pipeline.issued} == {StepKind.PREFILL, StepKind.DECODE}
    assert drafter.seen == [] and pipeline.finished[0].output == expected_output(request(0))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_nothing_starves_while_requests_keep_coming(num_stages):
    """One long request under a stream of short ones: it is in every few steps, and ends early."""
    shape = limits(num_slots=4, decode_microbatch=2, num_stages=num_stages)
    pipeline = FakePipeline(SlotScheduler(shape, drafter=EveryGamma(2)), depth=2 * num_stages)
    pipeline.scheduler.submit(request(0, max_new=24))
    for number in range(1, 200):
        pipeline.scheduler.submit(request(number, max_new=2 + number % 3))
    pipeline.run()
    steps = [k for k, mb in enumerate(pipeline.issued) if 0 in {r.id for r in mb.requests}]
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 16
    assert [r.id for r in pipeline.finished].index(0) < 100
    prompts = [r.id for mb in pipeline.issued if mb.kind is StepKind.PREFILL for r in mb.requests]
    assert prompts == list(range(200)), "first come, first served"


def test_a_replay_takes_the_schedulers_decisions():
    """Simulated time changes nothing about which micro-batches are issued, drafts included."""

    def jobs() -> list[Request]:
        return [request(number, max_new=2 + 5 * (number % 3)) for number in range(20)]

    shape, seen = limits(num_stages=2), []

    def cost(micro_batch: MicroBatch) -> float:
        seen.append((micro_batch.kind, [r.id for r in micro_batch.requests], micro_batch.starts))
        return 1.0 if micro_batch.kind is StepKind.PREFILL else 0.1

    replay(SlotScheduler(shape, drafter=EveryGamma(2)), jobs(), [cost, lambda micro_batch: 0.5])
    pipeline = FakePipeline(SlotScheduler(shape, drafter=EveryGamma(2)), depth=4)
    for r in jobs():
        pipeline.scheduler.submit(r)
    pipeline.run()
    issued = [(mb.kind, [r.id for r in mb.requests], mb.starts) for mb in pipeline.issued]
    assert seen == issued


@pytest.mark.parametrize(
    ("r", "message"),
    [
        (request(0, 17), "17 tokens, the plan was made for prompts of at most 16"),
        (request(0, 16, 18), "need 33 cache positions, the plan has 32"),
        (request(0, 0), "no tokens"),
        (request(0, 5, 0), "at least 1, got 0"),
    ],
)
def test_requests_that_can_never_run_are_refused(r, message):
    with pytest.raises(ValueError, match=message):
        SlotScheduler(limits()).submit(r)


def unequal_requests() -> list[Request]:
    """64 requests, prompts and outputs lognormal (medians 64 and 48, sigma 0.8), 16 to 400."""
    rng = random.Random(0)

    def length(median: int) -> int:
        return min(400, max(16, round(rng.lognormvariate(math.log(median), 0.8))))

    return [request(i, length(64), length(48)) for i in range(64)]


def step_cost(micro_batch: MicroBatch) -> float:
    """Seconds of a step: prompts cost per token, tokens mostly per step."""
    if micro_batch.kind is StepKind.PREFILL:
        return 1e-3 + 4e-5 * len(micro_batch.requests) * micro_batch.q_len
    return 3e-3 + 2e-4 * len(micro_batch.requests)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_continuous_batching_keeps_stages_at_work(num_stages):
    runs = {}
    for batching in ("continuous", "static"):
        shape = SlotLimits(
            num_slots=8,
            prompt_len=400,
            max_len=799,
            prefill_microbatch=1,
            decode_microbatch=8 // num_stages,
            num_stages=num_stages,
            batching=batching,
        )
        runs[batching] = replay(SlotScheduler(shape), unequal_requests(), [step_cost] * num_stages)
    faster = runs["static"].makespan_s / runs["continuous"].makespan_s
    assert runs["continuous"].tokens == runs["static"].tokens
    assert faster >= 1.3
    assert runs["continuous"].busy_share >= 0.85
    ended = sorted(runs["continuous"].finished_s, key=runs["continuous"].finished_s.__getitem__)
    assert max(abs(place - i) for place, i in enumerate(ended)) < 40, "no request starves"


def test_the_replay_of_a_fixed_batch_is_the_closed_form():
    """T = (mp-1) P + sum tp + (n-2) max(md D, sum td) + sum td + (md-1) D, a barrier between."""
    tp, td, mp, md, n = (0.03, 0.05), (0.02, 0.01), 4, 2, 6
    shape = limits(num_stages=2)
    jobs = [request(number, max_new=n) for number in range(8)]
    stages = [lambda mb, k=k: (tp if mb.kind is StepKind.PREFILL else td)[k] for k in range(2)]
    run = replay(SlotScheduler(shape), jobs, stages)
    barrier = (mp - 1) * max(tp) + sum(tp)
    barrier += (n - 2) * max(md * max(td), sum(td)) + sum(td) + (md - 1) * max(td)
    assert run.makespan_s <= barrier + 1e-9, "the scheduler may only gain at the phases' border"
    assert run.makespan_s == pytest.approx(barrier, rel=0.12)


def test_a_step_costs_little_with_ten_thousand_waiting():
    shape = limits(num_slots=256, prefill_microbatch=256, decode_microbatch=256)
    scheduler = SlotScheduler(shape)
    for number in range(10_256):
        scheduler.submit(request(number, max_new=16))
    rng = random.Random(0)
    best_s = float("inf")
    for _ in range(40):  # the quickest of 40 steps, by the clock of this thread
        started_s = time.thread_time()
        micro_batch = scheduler.next_micro_batch()
        assert micro_batch is not None
        scheduler.update_from_output(
            micro_batch, [[rng.randrange(97)] for _ in micro_batch.requests]
        )
        elapsed_s = time.thread_time() - started_s
        if len(micro_batch.requests) == 256:
            best_s = min(best_s, elapsed_s)
    assert best_s / 256 <= 20e-6


def test_groups_stay_together_where_steps_go_on_without_their_tokens():
    """32 rows in groups of 11, 11, 10: no row of one waits in another for its newest token."""
    limits = SlotLimits(
        num_slots=32,
        prompt_len=8,
        max_len=40,
        prefill_microbatch=4,
        decode_microbatch=11,
        num_stages=4,
    )
    scheduler = SlotScheduler(limits)
    for index in range(32):
        scheduler.submit(Request(id=index, prompt=(1,) * 8, max_new=20))
    groups = []
    while len(groups) < 12:
        micro_batch = scheduler.next_micro_batch()
        assert micro_batch is not None
        if micro_batch.kind is StepKind.DECODE:
            groups.append({request.id for request in micro_batch.requests})
        scheduler.update_from_output(micro_batch, [[-1]] * len(micro_batch.requests))
    assert sorted(map(len, groups[:3])) == [10, 11, 11]
    assert groups[3:6] == groups[6:9] == groups[9:12] == groups[:3]


@pytest.mark.parametrize("gamma", [0, 3])
def test_an_aborted_request_frees_its_slot_and_leaves_the_others_alone(gamma):
    """Whether it waits, is between steps or under way; the slots that remain serve the rest."""
    for abort_after in range(9):
        scheduler = SlotScheduler(limits(num_slots=3), drafter=EveryGamma(gamma) if gamma else None)
        pipeline = FakePipeline(scheduler, depth=2)
        requests = [request(i, max_new=9) for i in range(6)]
        for r in requests:
            scheduler.submit(r)
        in_flight: deque[MicroBatch] = deque()
        dropped, at_once, steps = (requests[abort_after % 4], requests[4]), [], 0
        while not scheduler.idle or in_flight:
            while len(in_flight) < 2 and (issued := scheduler.next_micro_batch()) is not None:
                in_flight.append(issued)
            done = in_flight.popleft()
            pipeline.finished += scheduler.update_from_output(done, pipeline._results(done))
            steps += 1
            if steps == abort_after + 1:
                at_once = [r for r in dropped if scheduler.abort(r)]
                assert not any(scheduler.abort(r) for r in at_once), "an abort is told once"
        ended = [*pipeline.finished, *at_once]
        assert sorted(r.id for r in ended) == list(range(6)), "everyone ends, and once"
        assert scheduler.num_running == 0 and scheduler.num_waiting == 0
        assert requests[4].finish_reason == "abort"
        for r in requests:
            if r.finish_reason == "abort":
                assert r in dropped and r.output == expected_output(r)[: len(r.output)]
            else:
                assert r.output == expected_output(r)
