"""The paged scheduler: any schedule gives what one request after the other gives, no block lost."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.precision import KVPrecision
from llmpq.runtime.engine import scheduler as scheduler_module
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Phases, Scheduler
from llmpq.runtime.requests.request import (
    NOT_FINITE_TOKEN,
    PENDING_TOKEN,
    MicroBatch,
    PagedRow,
    Request,
    StepKind,
)
from llmpq.sizes.kv_format import (
    BLOCK_TOKENS,
    HOLDBACK_TOKENS,
    TAIL_TOKENS,
    packed_end,
    spanned_blocks,
)

pytestmark = pytest.mark.pure

VOCAB = 7
STOP = 0


def chained(digest: int, token: int) -> int:
    """Return the digest of a token behind others."""
    return crc32(token.to_bytes(8, "little", signed=True), digest)


def next_token(digest: int) -> int:
    """Return the token that the model of this world says after tokens of a digest."""
    return digest % VOCAB


def simple_schedule(requests: Sequence[Request]) -> dict[int, list[int]]:
    """The oracle: one request after the other, one token after the other."""
    answers = {}
    for request in requests:
        digest, output = 0, []
        for token in request.prompt:
            digest = chained(digest, token)
        while len(output) < request.max_new:
            output.append(next_token(digest))
            digest = chained(digest, output[-1])
            if output[-1] in request.stop_ids:
                break
        answers[request.id] = output
    return answers


def rows_of(step: MicroBatch) -> list[PagedRow]:
    """Return what a step says of each of its rows; of most of them nothing."""
    slots = enumerate(step.slots_B.tolist())
    return [step.news.get(row) or PagedRow(slot=slot, first_block=1 << 40) for row, slot in slots]


@dataclass
class FakeStage:
    """A stage without arithmetic: what stands for keys and values is a digest of all tokens so far.

    A row that finds another request's block, an old one or none is caught where it reads it.
    """

    kv: KVPrecision
    blocks: dict[int, list[int]] = field(default_factory=dict)
    rings: dict[tuple[int, int], int] = field(default_factory=dict)
    """(slot, position) -> digest: the 16-bit tokens of a cache of few bits."""
    tables: dict[int, list[int]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    window: int = 0
    window_blocks: dict[int, list[int]] = field(default_factory=dict)
    """What layers with a window keep of the same digests, in blocks of their own."""
    window_tables: dict[int, dict[int, int]] = field(default_factory=dict)
    host: dict[int, list[int]] = field(default_factory=dict)
    """What hosts keep of blocks by number."""
    num_loaded: int = 0
    published: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of recorded requests that the scheduler gave out as they came."""
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    num_drafted: int = 0
    failing: dict[int, int] = field(default_factory=dict)
    """Request -> the place in its answer for which no token can be chosen."""

    def run(self, micro_batch: MicroBatch) -> list[list[int]]:
        """Return the new tokens of every row; a row that samples nothing gets one nobody wants."""
        rows = rows_of(micro_batch)
        for row in rows:
            for block, number in row.saves:
                self.host[number] = list(self.blocks[block])
        for row in rows:
            for number, block in row.loads:
                self.blocks[block] = list(self.host[number])
                self.num_loaded += 1
        steps = list(zip(rows, micro_batch.starts_B.tolist(), micro_batch.tokens, strict=True))
        if micro_batch.kind is StepKind.ROUND:
            rounds = [self._round(row, start, tokens) for row, start, tokens in steps]
            return self._failed(micro_batch, rounds)
        found = [self._row(row, start, tokens) for row, start, tokens in steps]
        if micro_batch.kind is StepKind.DRAFT:
            right = [self.rng.random() < 0.7 for _ in found]
            self.num_drafted += len(found)
            return [
                n if r else [self.rng.randrange(VOCAB)] for n, r in zip(found, right, strict=True)
            ]
        return self._failed(micro_batch, found)

    def _failed(self, micro_batch: MicroBatch, found: list[list[int]]) -> list[list[int]]:
        """Return the rows' new tokens up to where none can be chosen."""
        steps = micro_batch.sample_steps_B.tolist()
        for row, request in enumerate(micro_batch.requests):
            place = self.failing.get(request.id, -1) - steps[row]
            if 0 <= place < len(found[row]):
                found[row] = [*found[row][:place], NOT_FINITE_TOKEN]
        return found

    def _round(self, row: PagedRow, start: int, tokens: Sequence[int]) -> list[int]:
        """Draft what `tokens` leave open, right more often than not, and verify it."""
        drafted, row_of_step = [tokens[0]], replace(row, drafts=())
        sent = replace(
            row_of_step,
            first_block=row.first_block + len(row.new_blocks),
            new_blocks=(),
            new_window_blocks=(),
        )
        for at, pending in enumerate(tokens[1:]):
            assert pending == PENDING_TOKEN == row.drafts[at]
            (token,) = self._row(row_of_step, start + at, drafted[-1:])
            drafted.append(token if self.rng.random() < 0.7 else self.rng.randrange(VOCAB))
            row_of_step, self.num_drafted = sent, self.num_drafted + 1
        return self._row(replace(row_of_step, drafts=tuple(drafted[1:])), start, drafted)

    def _row(self, row: PagedRow, start: int, tokens: Sequence[int]) -> list[int]:
        table = self.tables.setdefault(row.slot, [])
        del table[row.first_block :]
        table += row.new_blocks
        windowed = self.window_tables.setdefault(row.slot, {})
        if row.first_block == 0 and row.new_blocks:
            windowed.clear()
        windowed |= dict(enumerate(row.new_window_blocks, start=row.first_window_block))
        if row.resumes and self.kv is not KVPrecision.KV16:
            tail = self.blocks[table[start // BLOCK_TOKENS - 1]][BLOCK_TOKENS:]
            for index, digest in enumerate(tail):
                self.rings[row.slot, start - TAIL_TOKENS + index] = digest
        digests = []
        for index, carried in enumerate(tokens):
            token = self.newest[row.slot] if carried == PENDING_TOKEN else carried
            position = start + index
            packs = self._pack(row.slot, table, position)
            before = self._read(row.slot, table, position) if position else 0
            digests.append(chained(before, token))
            self._write(row.slot, table, position, digests[-1])
            self._see(row.slot, table, position, digests[-1])
            if packs:
                self.blocks[table[position // BLOCK_TOKENS - 1]].append(digests[-1])
        found = [next_token(digests[-1 - len(row.drafts)])]
        for index, draft in enumerate(row.drafts):
            if draft != found[-1]:
                break
            found.append(next_token(digests[len(tokens) - len(row.drafts) + index]))
        self.newest[row.slot] = found[-1]
        return found

    def _read(self, slot: int, table: Sequence[int], position: int) -> int:
        """Return the digest before a position, from where its query would read it."""
        last = position - 1
        if self.kv is KVPrecision.KV16:
            return self.blocks[table[last // BLOCK_TOKENS]][last % BLOCK_TOKENS]
        line = packed_end(position)
        for old in range(max(0, line - BLOCK_TOKENS), line):  # the newest packed block
            digest = self.blocks[table[old // BLOCK_TOKENS]][old % BLOCK_TOKENS]
            if old + 1 < line:
                following = self.blocks[table[old // BLOCK_TOKENS]][old % BLOCK_TOKENS + 1]
                assert any(chained(digest, token) == following for token in range(VOCAB))
        for recent in range(line + 1, position):
            digest, following = self.rings[slot, recent - 1], self.rings[slot, recent]
            assert any(chained(digest, token) == following for token in range(VOCAB))
        return self.rings[slot, last]

    def _see(self, slot: int, table: Sequence[int], position: int, digest: int) -> None:
        """Write a window layer's token, then read all that its query sees."""
        if not self.window:
            return
        blocks = self.window_tables[slot]
        own = self.window_blocks.setdefault(blocks[position // BLOCK_TOKENS], [0] * BLOCK_TOKENS)
        own[position % BLOCK_TOKENS] = digest
        for seen in range(max(0, position - self.window + 1), position + 1):
            number, place = divmod(seen, BLOCK_TOKENS)
            kept = self.window_blocks[blocks[number]][place]
            assert kept == self.blocks[table[number]][place], (position, seen)

    def _pack(self, slot: int, table: Sequence[int], position: int) -> bool:
        """Pack the block that the query at a position is the first to see packed, if any."""
        line = packed_end(position)
        packs = self.kv is not KVPrecision.KV16 and 0 < line == position - HOLDBACK_TOKENS
        if packs:
            span = range(line - BLOCK_TOKENS, line + HOLDBACK_TOKENS)
            self.blocks[table[line // BLOCK_TOKENS - 1]] = [self.rings[slot, p] for p in span]
        return packs

    def _write(self, slot: int, table: Sequence[int], position: int, digest: int) -> None:
        if self.kv is KVPrecision.KV16:
            block = self.blocks.setdefault(table[position // BLOCK_TOKENS], [0] * BLOCK_TOKENS)
            block[position % BLOCK_TOKENS] = digest
            return
        self.rings[slot, position] = digest
        self.rings.pop((slot, position - BLOCK_TOKENS - 2 * HOLDBACK_TOKENS), None)


class GuessingDrafter:
    """Drafts that are right more often than not."""

    def __init__(self, rng: random.Random, length: int) -> None:
        self._rng, self._length = rng, length

    def gamma(self, requests: Sequence[Request]) -> int:
        return self._length

    def propose(self, request: Request, gamma: int) -> list[int] | None:
        digest = 0
        for token in (*request.prompt, *request.output):
            digest = chained(digest, token)
        drafts = []
        for _ in range(self._rng.randint(0, gamma)):
            right = self._rng.random() < 0.7
            drafts.append(next_token(digest) if right else self._rng.randrange(VOCAB))
            digest = chained(digest, drafts[-1])
        return drafts

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted


class DraftsByTheModel:
    """Has the stages draft, as many tokens each time as it likes."""

    in_vain = False

    def __init__(self, rng: random.Random, longest: int) -> None:
        self._rng, self._longest = rng, longest

    def gamma(self, requests: Sequence[Request]) -> int:
        assert requests and all(request.may_draft for request in requests)
        return self._rng.randint(0, self._longest)

    def propose(self, request: Request, gamma: int) -> None:
        return None

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted


def play(
    scheduler: Scheduler,
    requests: Sequence[Request],
    rng: random.Random,
    *,
    depth: int,
    abort_chance: float = 0.0,
    stage: FakeStage | None = None,
) -> set[int]:
    """Serve requests that come at random times; return those that were aborted.

    `depth` micro-batches are under way at most. The scheduler is checked after every move.
    """
    stage = stage or FakeStage(scheduler.limits.kv, window=scheduler.limits.window)
    coming, open_, aborted = deque(requests), {}, set()
    in_flight: deque[tuple[MicroBatch, list[list[int]]]] = deque()
    while coming or not scheduler.idle or in_flight:
        moves = []
        if coming:
            moves.append("submit")
        if len(in_flight) < depth:
            moves += ["issue"] * 3
        if in_flight:
            moves += ["complete"] * 3
        move = rng.choice(moves)
        if scheduler._running and rng.random() < abort_chance:
            scheduler._preempt(rng.choice(scheduler._running))
        elif open_ and rng.random() < abort_chance:
            request = rng.choice(list(open_.values()))
            assert scheduler.abort(request) and request.slot == -1
            aborted.add(request.id)
            del open_[request.id]
        elif move == "submit":
            request = coming.popleft()
            scheduler.submit(request)
            open_[request.id] = request
        elif move == "issue":
            micro_batch = scheduler.next_micro_batch()
            if micro_batch is not None:
                in_flight.append((micro_batch, stage.run(micro_batch)))
            else:
                stuck = not in_flight and not coming and not scheduler.idle
                assert not stuck, "nothing runs and nothing will"
        else:
            for request in scheduler.update_from_output(*in_flight.popleft()):
                del open_[request.id]
            for numbers, tokens in scheduler.take_new_tokens()[0]:
                for number, token in zip(numbers, tokens, strict=True):
                    stage.published.setdefault(number, []).append(token)
        scheduler.check()
    assert not open_
    assert scheduler.tables.pool.num_held == 0
    assert scheduler.tables.windows is None or scheduler.tables.windows.pool.num_held == 0
    return aborted


def limits(**changed: object) -> PoolLimits:
    values = {
        "num_blocks": 8,
        "max_rows": 4,
        "max_len": 10_000,
        "step_tokens": 64,
        "decode_rows": 4,
        **changed,
    }
    return PoolLimits(**values)  # type: ignore[arg-type]


def make_requests(rng: random.Random, count: int, longest: int) -> list[Request]:
    """Prompts of few tokens that share beginnings of many."""
    trunk = [rng.randrange(VOCAB) for _ in range(longest)]
    found = []
    for number in range(count):
        shared = trunk[: rng.choice((0, rng.randint(0, longest - 1)))]
        own = rng.randint(0 if shared else 1, min(40, longest - len(shared)))
        prompt = (*shared, *(rng.randrange(VOCAB) for _ in range(own)))
        found.append(
            Request(
                id=number,
                prompt=prompt,
                max_new=rng.choice((1, 2, 30, 150)),
                stop_ids=frozenset({STOP} if rng.random() < 0.3 else ()),
                priority=rng.choice((0, 0, 0, 1)),
                may_draft=rng.random() < 0.8,
                recorded=rng.random() < 0.5,
            )
        )
    return found


@settings(
    max_examples=int(os.environ.get("LLMPQ_SCHEDULES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    kv=st.sampled_from([KVPrecision.KV16, KVPrecision.KV4]),
    num_blocks=st.integers(5, 24),
    max_rows=st.integers(1, 6),
    step_tokens=st.sampled_from([1, 7, 64, 129, 1000]),
    mixed_tokens=st.sampled_from([None, 3, 100]),
    fill_tokens=st.sampled_from([0.0, 0.3, 40.0]),
    prompt_tokens=st.sampled_from([None, 5, 64]),
    stages=st.integers(1, 3),
    mode=st.sampled_from(["plain", "ahead", "drafts", "model", "fused"]),
    prefix_cache=st.booleans(),
    abort_chance=st.sampled_from([0.0, 0.02]),
    fail_chance=st.sampled_from([0.0, 0.3]),
    window=st.sampled_from([0, 0, 1, 40, 130, 300]),
    host_blocks=st.sampled_from([0, 3, 100]),
)
def test_random_schedules_equal_the_simple_one(
    seed,
    kv,
    num_blocks,
    max_rows,
    step_tokens,
    mixed_tokens,
    fill_tokens,
    prompt_tokens,
    stages,
    mode,
    prefix_cache,
    abort_chance,
    fail_chance,
    window,
    host_blocks,
):
    rng = random.Random(seed)
    allowed = limits(
        num_blocks=num_blocks,
        kv=kv,
        window=window if kv is KVPrecision.KV16 else 0,
        host_blocks=host_blocks if kv is KVPrecision.KV16 and not window else 0,
        window_blocks=spanned_blocks(window, BLOCK_TOKENS) + rng.randint(0, 4) if window else 0,
        max_rows=max_rows,
        step_tokens=step_tokens,
        mixed_tokens=mixed_tokens,
        fill_tokens=fill_tokens,
        prompt_tokens=prompt_tokens,
        decode_rows=rng.randint(1, max_rows),
        num_stages=stages,
        prefix_cache=prefix_cache,
        tokens_ahead=rng.randint(2, 4) if mode == "ahead" else 1,
    )
    longest = min(300, num_blocks * BLOCK_TOKENS - 160)
    requests = make_requests(rng, rng.randint(1, 10), longest)
    makers = {"drafts": GuessingDrafter, "model": DraftsByTheModel, "fused": DraftsByTheModel}
    drafter = makers[mode](rng, rng.randint(1, 7)) if mode in makers else None
    scheduler = Scheduler(allowed, drafter=drafter)
    scheduler.fused_rounds = mode == "fused"
    expected = simple_schedule(requests)
    for request in requests:  # some have begun on stages that were lost
        request.output = expected[request.id][: rng.choice((0, 0, rng.randrange(150)))]
        if request.output == expected[request.id]:
            del request.output[-1]
    had = {request.id: len(request.output) for request in requests}
    stage = FakeStage(allowed.kv, window=allowed.window)
    stage.failing = {r.id: rng.randrange(60) for r in requests if rng.random() < fail_chance}
    aborted = play(
        scheduler,
        requests,
        rng,
        depth=rng.randint(1, 2 * stages + 2),
        abort_chance=abort_chance,
        stage=stage,
    )
    came_in_all = sum(len(request.output) - had[request.id] for request in requests)
    assert scheduler.generated_tokens == came_in_all
    for request in requests:
        came = request.output[had[request.id] :] if request.recorded else []
        assert stage.published.get(request.id, []) == came
        fails_at = stage.failing.get(request.id, -1)
        fails = had[request.id] <= fails_at < len(expected[request.id])
        if request.id in aborted or fails:
            assert request.output == expected[request.id][: len(request.output)]
            assert request.id in aborted or request.finish_reason == "error"
        else:
            assert request.output == expected[request.id], request.id
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_prompts_share_a_step_chunk_by_chunk():
    allowed = limits(num_blocks=40, max_rows=4, step_tokens=96, prompt_tokens=32)
    scheduler = Scheduler(allowed)
    for number in range(4):
        scheduler.submit(Request(id=number, prompt=(1,) * 70, max_new=1))
    steps = []
    while (step := scheduler.next_micro_batch()) is not None:
        steps.append(
            [
                (request.id, len(tokens))
                for request, tokens in zip(step.requests, step.tokens, strict=True)
            ]
        )
    assert steps == [
        [(0, 32), (1, 32), (2, 32)],
        [(0, 32), (1, 32), (2, 32)],
        [(0, 6), (1, 6), (2, 6), (3, 32)],
        [(3, 32)],
        [(3, 6)],
    ]


def test_a_long_prompt_goes_in_chunks_beside_decoding_rows():
    scheduler = Scheduler(limits(step_tokens=32))
    short = Request(id=0, prompt=(1,) * 10, max_new=50)
    scheduler.submit(short)
    first = scheduler.next_micro_batch()
    assert first is not None and first.kind is StepKind.PREFILL
    scheduler.update_from_output(first, [[2]])
    long = Request(id=1, prompt=(2,) * 100, max_new=4)
    scheduler.submit(long)
    seen = []
    while len(long.output) == 0:
        step = scheduler.next_micro_batch()
        assert step is not None
        seen.append((step.kind, [len(tokens) for tokens in step.tokens]))
        scheduler.update_from_output(step, [[3]] * len(step.requests))
    assert seen == [(StepKind.MIXED, [1, 31])] * 3 + [(StepKind.MIXED, [1, 7])]


def counts(step) -> list[int]:
    assert step is not None
    return [len(tokens) for tokens in step.tokens]


def test_prompts_alone_take_a_large_step_and_beside_decoding_rows_a_small_one():
    scheduler = Scheduler(limits(num_blocks=40, step_tokens=1000, mixed_tokens=50))
    scheduler.submit(Request(id=0, prompt=(1,) * 600, max_new=3))
    scheduler.submit(Request(id=1, prompt=(2,) * 300, max_new=1))
    scheduler.submit(Request(id=2, prompt=(3,) * 300, max_new=1))
    first = scheduler.next_micro_batch()
    assert counts(first) == [600, 300, 100]  # packed
    scheduler.update_from_output(first, [[5], [5], [-1]])
    second = scheduler.next_micro_batch()
    assert second.kind is StepKind.MIXED and counts(second) == [1, 49]
    scheduler.update_from_output(second, [[5], [-1]])
    third = scheduler.next_micro_batch()
    assert counts(third) == [1, 49]
    scheduler.update_from_output(third, [[5], [-1]])  # the last token of the one that decodes
    assert counts(scheduler.next_micro_batch()) == [102]


def test_rows_whose_token_is_under_way_decode_too():
    """The next step would hold up what comes behind the token that is not known yet."""
    scheduler = Scheduler(limits(num_blocks=40, step_tokens=500, mixed_tokens=50, num_stages=2))
    scheduler.submit(Request(id=0, prompt=(1,) * 400, max_new=3))
    assert counts(scheduler.next_micro_batch()) == [400]
    scheduler.submit(Request(id=1, prompt=(2,) * 300, max_new=1))
    assert counts(scheduler.next_micro_batch()) == [50]


def test_a_prompt_alone_is_shared_out_over_stages():
    shared = limits(num_blocks=40, step_tokens=1000, num_stages=3, fill_tokens=50.0)
    scheduler, seen = Scheduler(shared), []
    scheduler.submit(Request(id=0, prompt=(1,) * 900, max_new=2))
    while (step := scheduler.next_micro_batch()) is not None:
        seen += counts(step)
    assert seen == [128] * 5 + [64] * 4 + [4]  # ever less is left
    assert shared.prompt_tokens_of_step(waiting=10**6, decoding=0) == 1000
    alone = limits(step_tokens=1000, fill_tokens=50.0)
    assert alone.prompt_tokens_of_step(waiting=900, decoding=0) == 1000


class FourDrafts(DraftsByTheModel):
    """Always four."""

    def __init__(self) -> None:
        pass

    def gamma(self, requests: Sequence[Request]) -> int:
        return 4


def test_a_round_drafts_step_by_step_and_its_verify_is_an_ordinary_step():
    """Beside it go chunks of prompts and rows that are not drafted for; blocks are there before."""
    scheduler = Scheduler(limits(step_tokens=160), drafter=FourDrafts())
    prompts = ((1,) * 126, True), ((2,) * 5, False), ((3,) * 5, True)
    for number, (prompt, may_draft) in enumerate(prompts):
        new = 20 if number < 2 else 4  # one is the prompt's, one the verifier's own
        scheduler.submit(Request(id=number, prompt=prompt, max_new=new, may_draft=may_draft))
    step = scheduler.next_micro_batch()
    assert step is not None and scheduler.update_from_output(step, [[5]] * 3) == []
    scheduler.submit(Request(id=3, prompt=(4,) * 200, max_new=2))
    seen = []
    for _ in range(6):
        step = scheduler.next_micro_batch()
        assert step is not None
        rows = zip(step.requests, step.starts_B, step.tokens, rows_of(step), strict=True)
        if step.kind is StepKind.DRAFT:
            parts = zip(step.requests, step.starts_B, step.sample_steps_B, strict=True)
            seen.append([(r.id, start, place) for r, start, place in parts])
            scheduler.update_from_output(step, [[6]] * len(step.requests))
            continue
        verify = {r.id: (start, tokens, len(row.drafts)) for r, start, tokens, row in rows}
        verified = [[6, 6, 5] if row.drafts else [5] for row in rows_of(step)]
        scheduler.update_from_output(step, verified)
        break
    assert seen == [
        [(0, 126, 1), (2, 5, 1)],
        [(0, 127, 2), (2, 6, 2)],
        [(0, 128, 3)],
        [(0, 129, 4)],
    ]
    assert verify[0] == (126, [5, 6, 6, 6, 6], 4) and verify[2] == (5, [5, 6, 6], 2)
    assert verify[1][2] == 0 and len(verify[3][1]) == 160 - 5 - 3 - 1
    first = scheduler._reqs[0]
    assert (
        first.num_computed == 129
        and len(first.blocks) == 2
        and first.request.output[1:] == [6, 6, 5]
    )


def test_rounds_of_one_step_make_way_for_prompts_every_other_time():
    """And the device gets the drafts' places, which it fills by itself."""
    scheduler = Scheduler(limits(step_tokens=40), drafter=FourDrafts())
    scheduler.fused_rounds = True
    for number, new in ((0, 40), (1, 3)):
        scheduler.submit(Request(id=number, prompt=(number,) * 9, max_new=new))
    kinds = []
    for step_number in range(7):
        step = scheduler.next_micro_batch()
        assert step is not None
        kinds.append(step.kind)
        if step_number == 1:
            assert step.tokens == [[5, *[PENDING_TOKEN] * 4], [5, PENDING_TOKEN]]
            scheduler.submit(Request(id=2, prompt=(2,) * 60, max_new=1))
        scheduler.update_from_output(step, [[5, 5] if row.drafts else [5] for row in rows_of(step)])
    prompts = [StepKind.MIXED, StepKind.ROUND]
    assert kinds == [StepKind.PREFILL, StepKind.ROUND, *prompts * 2, StepKind.ROUND]


def test_what_a_request_may_still_ask_reserves_nothing():
    scheduler = Scheduler(limits(num_blocks=8, max_rows=4))
    for number in range(4):
        scheduler.submit(Request(id=number, prompt=(1,) * 16, max_new=900))
    step = scheduler.next_micro_batch()
    assert step is not None and len(step.requests) == 4
    assert scheduler.tables.pool.num_held == 4


def test_the_youngest_is_preempted_and_the_oldest_never():
    rng = random.Random(3)
    scheduler = Scheduler(limits(num_blocks=4, max_rows=4, step_tokens=512))
    requests = [Request(id=n, prompt=(n + 1,) * 20, max_new=300) for n in range(4)]
    expected = simple_schedule(requests)
    play(scheduler, requests, rng, depth=1)
    assert [request.output for request in requests] == [expected[n] for n in range(4)]
    assert requests[0].num_preemptions == 0 and requests[3].num_preemptions > 0


@pytest.mark.parametrize("host_blocks", [0, 20])
def test_hosts_keep_what_preempted_requests_have_computed(host_blocks):
    """Those go on where they were; without hosts, and with their blocks gone, they begin anew."""
    allowed = limits(num_blocks=4, max_rows=4, step_tokens=512, host_blocks=host_blocks)
    scheduler, rng = Scheduler(allowed), random.Random(4)
    requests = make_requests(rng, 5, 100)
    requests = [replace(r, max_new=200, stop_ids=frozenset(), priority=0) for r in requests]
    stage, computed = FakeStage(allowed.kv), 0
    issue = scheduler.next_micro_batch

    def counting():
        nonlocal computed
        step = issue()
        computed += sum(map(len, step.tokens)) if step is not None else 0
        return step

    scheduler.next_micro_batch = counting
    play(scheduler, requests, rng, depth=1, stage=stage)
    expected = simple_schedule(requests)
    assert {r.id: r.output for r in requests} == expected
    assert sum(r.num_preemptions for r in requests) > 0
    least = sum(len(r.prompt) + len(r.output) - 1 for r in requests)
    assert (computed == least) == bool(stage.num_loaded) == bool(host_blocks)


def test_lower_priorities_run_first():
    scheduler = Scheduler(limits(max_rows=1))
    for number, priority in enumerate((2, 0, 1)):
        scheduler.submit(Request(id=number, prompt=(1,), max_new=1, priority=priority))
    order = []
    while not scheduler.idle:
        step = scheduler.next_micro_batch()
        assert step is not None
        order += [request.id for request in scheduler.update_from_output(step, [[1]])]
    assert order == [1, 2, 0]


@pytest.mark.parametrize(
    ("kv", "shared", "hit"),
    [
        (KVPrecision.KV16, 300, 256),
        (KVPrecision.KV16, 256, 256),
        (KVPrecision.KV4, 300, 256 + 17),
        (KVPrecision.KV4, 270, 128 + 17),
    ],
)
def test_full_blocks_are_found_again(kv, shared, hit):
    scheduler = Scheduler(limits(num_blocks=16, kv=kv, step_tokens=1000))
    trunk = tuple(n % VOCAB for n in range(shared))
    requests = [Request(id=n, prompt=(*trunk, n + 1, 5, 5), max_new=2) for n in range(2)]
    expected = simple_schedule(requests)
    stage = FakeStage(kv)
    for request in requests:  # one after the other
        play(scheduler, [request], random.Random(0), depth=1, stage=stage)
    assert [request.num_prefix_hits for request in requests] == [0, hit]
    assert [request.output for request in requests] == [expected[n] for n in range(2)]


@pytest.mark.parametrize(("window_blocks", "hit"), [(12, 896), (4, 0)])
def test_layers_with_a_window_keep_its_blocks_and_prefixes_are_found_in_both_pools(
    window_blocks, hit
):
    """Nobody goes on behind a prefix whose last blocks in sight were taken meanwhile."""
    allowed = limits(num_blocks=40, step_tokens=64, window=200, window_blocks=window_blocks)
    scheduler = Scheduler(allowed)
    stage = FakeStage(KVPrecision.KV16, window=200)
    trunk = tuple(n % VOCAB for n in range(1000))
    requests = [Request(id=n, prompt=(*trunk, n + 1, 5), max_new=200) for n in range(2)]
    expected = simple_schedule(requests)
    held = []
    for request in requests:  # one after the other
        scheduler.submit(request)
        while not scheduler.idle:
            step = scheduler.next_micro_batch()
            assert step is not None and scheduler.tables.windows is not None
            held.append(scheduler.tables.windows.pool.num_held)
            scheduler.update_from_output(step, stage.run(step))
            scheduler.check()
    assert max(held) == 3, "a window of 200 tokens, a chunk of 64"
    assert [request.num_prefix_hits for request in requests] == [0, hit]
    assert [request.output for request in requests] == [expected[n] for n in range(2)]


def test_only_requests_of_one_salt_share_blocks():
    scheduler = Scheduler(limits(num_blocks=16, step_tokens=1000))
    stage, hits = FakeStage(KVPrecision.KV16), []
    for number, salt in enumerate(("a", "b", None, "a", None, "b")):
        request = Request(id=number, prompt=(1,) * 200, max_new=1, cache_salt=salt)
        play(scheduler, [request], random.Random(0), depth=1, stage=stage)
        hits.append(request.num_prefix_hits)
    assert hits == [0, 0, 0, 128, 128, 128]


def test_a_prompt_found_whole_computes_a_token_at_least():
    scheduler = Scheduler(limits(num_blocks=16, step_tokens=1000))
    stage = FakeStage(KVPrecision.KV16)
    for number in range(2):
        request = Request(id=number, prompt=(1,) * 256, max_new=1)
        play(scheduler, [request], random.Random(0), depth=1, stage=stage)
    assert request.num_prefix_hits == 128


def test_other_models_salts_and_precisions_share_nothing():
    keys = set()
    for kv in KVPrecision:
        for salt in ("a", "b"):
            scheduler = Scheduler(limits(kv=kv), salt=salt)
            req = scheduler.tables.new_request(Request(id=0, prompt=(1,) * 200, max_new=1), 0)
            keys |= set(req.keys.upto(req.tokens, 200, 1))
    assert len(keys) == 2 * len(KVPrecision)


@pytest.mark.parametrize(
    ("prompt", "max_new", "says"),
    [
        (0, 1, "no tokens"),
        (10, 0, "at least 1"),
        (1025, 1, "has 1025 tokens, .* is 1025 with"),
        (1000, 40, "at most 25"),
    ],
)
def test_what_can_never_run_is_refused(prompt, max_new, says):
    with pytest.raises(ValueError, match=says):
        limits(num_blocks=8).check(Request(id=0, prompt=(1,) * prompt, max_new=max_new))


def test_a_prompt_that_fills_the_positions_may_be_scored():
    """Its one token is not cached; where blocks are the limit, the prompt itself has no room."""
    most = limits(num_blocks=9, max_len=1024)
    most.check(Request(id=0, prompt=(1,) * 1024, max_new=1))
    play(Scheduler(most), [Request(id=0, prompt=(1,) * 1024, max_new=1)], random.Random(0), depth=1)
    for max_new in (2, 5):
        with pytest.raises(ValueError, match="too long"):
            most.check(Request(id=0, prompt=(1,) * 1024, max_new=max_new))


def test_the_longest_request_there_is_room_for_runs():
    for kv in KVPrecision:
        allowed = limits(num_blocks=5, kv=kv, step_tokens=100)
        request = Request(id=0, prompt=(1,) * (allowed.room - 5), max_new=5)
        play(Scheduler(allowed), [request], random.Random(0), depth=1)
        assert len(request.output) == 5


def test_a_step_says_of_rows_what_is_new_and_nothing_else():
    """Of two requests of which one is preempted and admitted again on the way."""
    num_blocks = 2 * -(-260 // BLOCK_TOKENS) - 3  # too few for both
    scheduler = Scheduler(limits(num_blocks=num_blocks, max_rows=2, max_len=300, host_blocks=4))
    for number in range(2):
        scheduler.submit(Request(id=number, prompt=(1 + number,) * 60, max_new=200))
    tables: dict[int, list[int]] = {}
    num_plain = num_saves = 0
    while (step := scheduler.next_micro_batch()) is not None:
        rows = rows_of(step)
        num_saves += sum(len(row.saves) for row in rows)
        num_plain += len(rows) - len(step.news)
        for row in step.news.values():
            says = row.new_blocks or row.loads or row.saves or row.resumes
            assert says or not row.samples
        for request, row, start in zip(step.requests, rows, step.starts_B, strict=True):
            table = tables.setdefault(request.id, [])
            table[row.first_block :] = row.new_blocks
            assert row.slot == request.slot and len(table) * BLOCK_TOKENS > start
        for request, row, place in zip(step.requests, rows, step.sample_steps_B, strict=True):
            assert not row.samples or place == len(request.output)
        scheduler.update_from_output(step, [[5] if row.samples else [] for row in rows])
        scheduler.check()
    assert num_plain > 300 and scheduler.idle
    assert scheduler.num_preemptions > 0 and 0 < num_saves <= 4 * scheduler.num_preemptions


@pytest.mark.parametrize("ended", ["by a stop token", "by an abort", "by nothing"])
def test_requests_are_sorted_by_phase_only_where_one_may_have_changed_it(ended, monkeypatch):
    """Where one comes, goes or gets on in its prompt; not in the hundreds of steps between."""
    scheduler = Scheduler(limits(num_blocks=40, step_tokens=200))
    stage = FakeStage(KVPrecision.KV16)
    requests = [Request(id=n, prompt=(n + 1,) * 20, max_new=300, recorded=True) for n in range(3)]
    expected = simple_schedule(requests)
    if ended == "by a stop token":
        requests[1].stop_ids = frozenset({99})
        expected[1][150:] = [99]
    sorted_anew = []
    monkeypatch.setattr(
        scheduler_module, "Phases", lambda **sets: sorted_anew.append(sets) or Phases(**sets)
    )
    for request in requests:
        scheduler.submit(request)
    num_steps, late, published = 0, Request(id=3, prompt=(4,) * 9, max_new=100), {}
    while (step := scheduler.next_micro_batch()) is not None:
        num_steps += 1
        tokens = stage.run(step)
        for row, request in enumerate(step.requests):
            if 99 in request.stop_ids and step.sample_steps_B[row] == 150:
                tokens[row] = [99]
        if num_steps == 50:
            scheduler.submit(late)
        if num_steps == 90 and ended == "by an abort":
            assert scheduler.abort(requests[1])  # while its step is under way
        scheduler.update_from_output(step, tokens)
        for numbers, new in scheduler.take_new_tokens()[0]:
            for number, token in zip(numbers, new, strict=True):
                published.setdefault(number, []).append(token)
    scheduler.check()
    assert scheduler.idle and num_steps >= 300 and 0 < len(sorted_anew) < 20
    for request in requests:
        want = expected[request.id]
        if ended == "by an abort" and request.id == 1:
            want = want[:89]
        assert request.output == published[request.id] == want
    assert late.output == simple_schedule([late])[3]
