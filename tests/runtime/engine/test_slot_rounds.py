"""Whole rounds: drafts and verify in one step, issued before the last one's yield is known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.slot_limits import SlotLimits
from llmpq.runtime.engine.slot_scheduler import SlotScheduler
from llmpq.runtime.request import PENDING_TOKEN, MicroBatch, Request, StepKind
from llmpq.runtime.sampling_params import SamplerConfig

pytestmark = pytest.mark.pure
SLOTS, MAX_LEN = 4, 40


def true_token(request_id: int, position: int) -> int:
    """What the model says at a position: depends on nothing else."""
    return (request_id * 31 + position * 7) % 97


class Device:
    """Knows of each slot whose request it holds and how far that has come; yields at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.owner: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.blind = 0

    def run(self, micro_batch: MicroBatch) -> list[list[int]]:
        """Return new tokens; positions and tokens the host names must be those known here."""
        rows = []
        for request, start, told in zip(
            micro_batch.requests, micro_batch.starts, micro_batch.tokens, strict=True
        ):
            slot = self.slots[micro_batch.seq][request.id]
            if micro_batch.kind is StepKind.PREFILL:
                self.owner[slot], self.length[slot] = request.id, len(told)
                rows.append([true_token(request.id, len(told))])
                continue
            # The slot may have changed hands only after every step that was issued for it.
            assert self.owner[slot] == request.id
            place = self.length[slot]
            if start == PENDING_TOKEN:
                self.blind += 1
                assert told == [PENDING_TOKEN]
            elif micro_batch.kind is StepKind.DRAFT:
                rows.append([0])  # never right
                assert start == place + len(request.drafts)
                continue
            else:
                assert start == place and told[0] == true_token(request.id, place)
            new = 1
            if micro_batch.kind is StepKind.ROUND:
                assert micro_batch.round is not None
                new = 1 + self.rng.randint(0, micro_batch.round.gamma)
                new = min(new, max(1, MAX_LEN - place))
            self.length[slot] = min(place + new, MAX_LEN - 1)
            rows.append([true_token(request.id, place + 1 + i) for i in range(new)])
        return rows


def serve(scheduler: SlotScheduler, device: Device, on_done: Callable[[Request], None]) -> None:
    """Keep two steps in flight; the device runs them in the order of issue."""
    device.slots = {}
    in_flight: deque[tuple[MicroBatch, list[list[int]]]] = deque()
    while True:
        while len(in_flight) < 2:
            micro_batch = scheduler.next_micro_batch()
            if micro_batch is None:
                break
            device.slots[micro_batch.seq] = {r.id: r.slot for r in micro_batch.requests}
            in_flight.append((micro_batch, device.run(micro_batch)))
        if not in_flight:
            return
        for request in scheduler.update_from_output(*in_flight.popleft()):
            on_done(request)


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 20)), min_size=1, max_size=24),
    st.integers(1, SLOTS),
    st.sampled_from([1, 3, 7]),
    st.sets(st.integers(0, 23)),
    st.integers(0, 9),
)
@settings(max_examples=150)
def test_every_request_gets_its_tokens(sizes, decode, gamma, sampled, seed):
    limits = SlotLimits(num_slots=SLOTS, prompt_len=16, max_len=MAX_LEN, prefill_microbatch=2,
                    decode_microbatch=decode)  # fmt: skip
    drafter = FixedDrafter("kv4", gamma)
    scheduler = SlotScheduler(limits, drafter=drafter)
    scheduler.fused_rounds = True
    device, done = Device(seed), []
    requests = [
        Request(id=i, prompt=(1,) * length, max_new=new,
                sampling=SamplerConfig(temperature=float(i in sampled)))
        for i, (length, new) in enumerate(sizes)
    ]  # fmt: skip
    for request in requests:
        scheduler.submit(request)
    serve(scheduler, device, done.append)
    assert scheduler.idle and sorted(r.id for r in done) == [r.id for r in requests]
    for request in requests:
        first = len(request.prompt)
        assert request.output == [true_token(request.id, first + i) for i in range(request.max_new)]
        assert request.in_flight == 0 and request.slot == -1
    assert scheduler.generated_tokens == sum(request.max_new for request in requests)


def test_rounds_run_ahead_and_a_stop_token_ends_a_request_all_the_same():
    limits = SlotLimits(num_slots=2, prompt_len=8, max_len=MAX_LEN, prefill_microbatch=2,
                    decode_microbatch=2)  # fmt: skip
    scheduler = SlotScheduler(limits, drafter=FixedDrafter("kv4", 3))
    scheduler.fused_rounds = True
    device, done = Device(1), []
    stop = true_token(0, 4 + 6)
    scheduler.submit(Request(id=0, prompt=(1,) * 4, max_new=20, stop_ids=frozenset({stop})))
    for number in (1, 2):
        scheduler.submit(Request(id=number, prompt=(1,) * 4, max_new=20))
    serve(scheduler, device, done.append)
    by_id = {request.id: request for request in done}
    assert by_id[0].output == [true_token(0, 4 + i) for i in range(7)]
    assert by_id[0].finish_reason == "stop" and len(by_id[2].output) == 20
    assert device.blind > 5


def test_one_token_more_needs_no_further_round():
    """A row whose rounds under way are sure to bring all its tokens is not issued again."""
    limits = SlotLimits(num_slots=1, prompt_len=8, max_len=MAX_LEN, prefill_microbatch=1,
                    decode_microbatch=1)  # fmt: skip
    scheduler = SlotScheduler(limits, drafter=FixedDrafter("kv4", 3))
    scheduler.fused_rounds = True
    scheduler.submit(Request(id=0, prompt=(1,) * 4, max_new=3))
    prefill = scheduler.next_micro_batch()
    scheduler.update_from_output(prefill, [[5]])
    first, second = scheduler.next_micro_batch(), scheduler.next_micro_batch()
    assert (
        first.starts == [4]
        and second.starts == [PENDING_TOKEN]
        and second.tokens == [[PENDING_TOKEN]]
    )
    assert scheduler.next_micro_batch() is None
    assert scheduler.update_from_output(first, [[6]]) == []
    assert [r.output for r in scheduler.update_from_output(second, [[7, 8, 9]])] == [[5, 6, 7]]
    assert scheduler.idle


def test_acceptance_counts_no_drafts_beyond_the_limit():
    limits = SlotLimits(num_slots=1, prompt_len=8, max_len=MAX_LEN, prefill_microbatch=1,
                    decode_microbatch=1)  # fmt: skip
    drafter = FixedDrafter("kv4", 5)
    scheduler = SlotScheduler(limits, drafter=drafter)
    scheduler.fused_rounds = True
    scheduler.submit(Request(id=0, prompt=(1,) * 4, max_new=4))
    scheduler.update_from_output(scheduler.next_micro_batch(), [[5]])
    scheduler.update_from_output(scheduler.next_micro_batch(), [[6, 7, 8, 9, 9, 9]])
    assert drafter.acceptance.drafted[:3] == [1, 1, 0] == drafter.acceptance.accepted[:3]
