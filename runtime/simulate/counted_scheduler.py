"""The decisions of the runtime's scheduler (engine/scheduler.py) from counts alone.

Where no prefix is found again and no layer has a pool or a state of its own, which blocks a request
holds changes nothing, only how many: then tokens and blocks of a request are a few integers. The
rules are those of `Scheduler`, `BlockTables` and `RequestTable`, under the same names, for requests
that arrive with nothing and end by their length, without drafts. Tests compare both, request by
request and step by step. With tables a simulation takes four times as long (2026-12: the 92 of a
plan for live traffic 11.7 s of a core, from counts 2.5).

Invariants, of each request between two steps: `num_sampled - in_flight` tokens of its answer are
known; a running one holds the blocks of its `num_computed` tokens; `available` and the blocks of
all requests add up to the pool.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from llmpq.runtime.engine.block_tables import WATERMARK
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.requests.request import Ints, MicroBatch, PagedRow, Request, StepKind
from llmpq.runtime.simulate.step_times import StepRows
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, pool_blocks

NO_TOKEN = PagedRow(slot=-1, samples=False)
"""Of a chunk that is not the last of its prompt."""


class CountedRequest:
    """How far a request has come, and how many blocks it holds."""

    __slots__ = (
        "arrival", "has_loads", "in_flight", "last_step", "max_new", "most_blocks",
        "needs_blocks_at", "num_blocks", "num_computed", "num_host_blocks", "num_offloaded",
        "num_prompt", "num_sampled", "request", "runs",
    )  # fmt: skip

    def __init__(self, request: Request, arrival: int, most_blocks: int) -> None:
        self.request, self.arrival = request, arrival
        self.num_prompt, self.max_new = len(request.prompt), request.max_new
        self.most_blocks = most_blocks
        """Blocks that it may come to hold."""
        self.num_computed = self.num_sampled = self.in_flight = self.last_step = 0
        """As `RequestTable` says."""
        self.num_blocks = self.needs_blocks_at = 0
        """Blocks that it holds, and the position of the first token for which it lacks one."""
        self.num_host_blocks = self.num_offloaded = 0
        """Blocks that hosts have of it since it was preempted, and the tokens in these."""
        self.has_loads = False
        """Whether these are yet to be copied back."""
        self.runs = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.num_prompt + self.num_sampled - self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens that are there to be computed."""
        return self.num_tokens - self.num_computed

    def __lt__(self, other: CountedRequest) -> bool:
        return self.arrival < other.arrival


Chunk = tuple[CountedRequest, int]
"""A request, and so many tokens of its prompt, or of an answer that is computed again."""


class CountedBatch(MicroBatch):
    """A step of a `CountedScheduler`: what a simulation reads of it, without tokens and slots."""

    def __init__(
        self,
        group: Sequence[CountedRequest],
        chunks: Sequence[Chunk],
        samplers: Sequence[CountedRequest],
        rows: StepRows,
    ) -> None:
        """`samplers`: of the chunks' requests those that get a token."""
        kind = StepKind.DECODE if not chunks else StepKind.MIXED if group else StepKind.PREFILL
        of_chunks = [req for req, _ in chunks]
        news = {n: NO_TOKEN for n, req in enumerate(of_chunks, len(group)) if req not in samplers}
        vars(self).update(  # frozen for all others
            kind=kind, group=group, of_chunks=of_chunks, samplers=samplers, rows=rows, news=news
        )

    group: Sequence[CountedRequest]
    of_chunks: Sequence[CountedRequest]
    samplers: Sequence[CountedRequest]
    rows: StepRows

    @cached_property
    def requests(self) -> list[Request]:
        """Whose rows they are."""
        return [req.request for req in (*self.group, *self.of_chunks)]

    @property
    def not_only_decoding(self) -> list[int]:
        """Rows of chunks."""
        first = len(self.group)
        return list(range(first, first + len(self.of_chunks)))

    @cached_property
    def members_B(self) -> Ints:  # noqa: N802
        """The number of each request of the group, which stands for its row of a table."""
        return np.array([req.arrival for req in self.group], dtype=np.int64)


class CountedScheduler:
    """Continuous batching over a pool of blocks, prompts in chunks beside decoding rows."""

    def __init__(self, limits: PoolLimits) -> None:
        assert self.suffice(limits), "blocks are more than a number"
        self.limits = limits
        self._tokens_ahead, self._stages = limits.tokens_ahead, limits.num_stages
        self._row_tokens = limits.row_tokens
        self._behind = 0 if limits.tail == 0 else BLOCK_TOKENS + HOLDBACK_TOKENS
        self._watermark = max(1, int(WATERMARK * limits.num_blocks))
        self._available = limits.num_blocks
        self._host_blocks = limits.host_blocks
        """Free ones."""
        self._most_of_running = 0
        self._waiting: list[CountedRequest] = []
        self._running: list[CountedRequest] = []
        """Admitted requests, in order."""
        self._decoding: list[CountedRequest] = []
        """Those of them whose next step takes one token."""
        self._prompts: list[CountedRequest] = []
        """The others: with more of a prompt to compute."""
        self._num_submitted = self._seq = 0
        self._steps = self._decode_steps = self._last_decode = 0
        """Steps under way, those of them in which rows decode, and the number of the last such."""

    @staticmethod
    def suffice(limits: PoolLimits) -> bool:
        """Whether counts are enough to decide an engine's steps."""
        return not (limits.prefix_cache or limits.window or limits.snapshots)

    @property
    def idle(self) -> bool:
        """Whether every submitted request has ended."""
        return not self._running and not self._waiting

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Queue a request; `ValueError` if it can never run."""
        self.limits.check(request)
        most = self._blocks(len(request.prompt) + request.max_new - 1)
        heappush(self._waiting, CountedRequest(request, self._num_submitted, most))
        self._num_submitted += 1

    def next_micro_batch(self) -> CountedBatch | None:
        """Return the next step, or None until another one ends."""
        num_decoding, ahead = len(self._decoding), self._tokens_ahead
        if ahead > 1 and num_decoding and self._steps >= self._stages * ahead:
            return None  # prompts wait for rows that decode, to share a step with them
        begun = self._prompts.copy()
        group = self._next_group() if num_decoding else []
        chunks: list[Chunk] = []
        if begun or self._waiting:
            self._add_prompts(group, chunks, num_decoding, begun)
        if not group and not chunks:
            return None
        return self._counted(group, chunks)

    def update_from_output(self, micro_batch: MicroBatch, tokens: Ints) -> list[Request]:
        """End the oldest step under way; return the requests that ended with it."""
        assert isinstance(micro_batch, CountedBatch), "it is of this scheduler"
        self._steps -= 1
        self._decode_steps -= bool(micro_batch.group)
        ended = []
        for got in (micro_batch.group, micro_batch.samplers):
            for req in got:
                req.in_flight = in_flight = req.in_flight - 1
                if req.num_sampled - in_flight == req.max_new:
                    ended.append(req)
        for req in ended:
            self._end(req)
        return [req.request for req in ended]

    def rounds_ahead(self) -> int:
        """Return for how many rounds nothing but decoding can happen."""
        running = self._running
        if not running or self._prompts:
            return 0
        if self._waiting and self._waiting[0].in_flight > 0:  # it may be admitted when that ends
            return 0
        rounds = min([req.max_new - req.num_sampled for req in running]) - 1
        while rounds > 0 and not self._hold_more(rounds):
            rounds //= 2
        return max(0, rounds)

    def repeats(self, groups: Sequence[Ints]) -> bool:
        """Whether these groups come again and again, in this order."""
        running, sizes = [req.arrival for req in self._running], [len(own) for own in groups]
        if not running:
            return False
        num_groups = self._num_groups(len(running))
        if self._tokens_ahead > 1:
            return num_groups == 1 and all(own.tolist() == running for own in groups)
        if sum(sizes) != len(running) or max(sizes) > -(-len(running) // num_groups):
            return False
        return sorted(np.concatenate(groups).tolist()) == running

    def next_caches(self, rows: Ints) -> list[int]:
        """Return the tokens in the caches of rows that decode, with their next step."""
        running = {req.arrival: req for req in self._running}
        return [running[number].num_computed + 1 for number in rows.tolist()]

    def pass_rounds(
        self, rounds: int, steps: int, under_way: Iterable[MicroBatch], token: int
    ) -> None:
        """Be as after so many rounds of so many steps."""
        self._seq += steps
        self._last_decode += steps
        for req in self._running:
            req.num_computed += rounds
            req.num_sampled += rounds
            req.last_step += steps
            if req.num_computed > req.needs_blocks_at:
                self._take_blocks(req, req.num_computed)

    def _sort_in(self, req: CountedRequest) -> None:
        """Note what a running request's next step computes."""
        left = self._to_build_on(req) - req.num_computed
        insort(self._decoding if left <= 1 and req.num_sampled else self._prompts, req)

    def _sort_out(self, req: CountedRequest) -> None:
        (self._prompts if req in self._prompts else self._decoding).remove(req)

    def _to_build_on(self, req: CountedRequest) -> int:
        """Return the tokens that a request's next step may build on, as `num_tokens` of a table."""
        waits = req.num_sampled >= req.max_new or req.in_flight >= self._tokens_ahead
        return req.num_prompt + req.num_sampled - waits

    def _num_groups(self, decoding: int) -> int:
        """Return into how many steps rows that decode are split."""
        return max(-(-decoding // self.limits.decode_rows), min(self._stages, decoding))

    def _next_group(self) -> list[CountedRequest]:
        """Return the rows that decode next, oldest first: as `Scheduler._add_decoding`."""
        decoding, ahead = self._decoding, self._tokens_ahead
        num_groups = self._num_groups(len(decoding))
        if self._decode_steps >= num_groups * ahead:
            return []
        ready = decoding
        if self._steps:
            ready = [r for r in ready if r.in_flight < ahead and r.num_sampled < r.max_new]
        if num_groups > 1:
            last = self._last_decode
            ready = [r for r in ready if not r.in_flight or r.last_step != last]
        group = ready[: -(-len(decoding) // num_groups)]
        for req in group:
            if req.num_computed >= req.needs_blocks_at:
                return self._with_blocks(group)
        return group

    def _with_blocks(self, group: list[CountedRequest]) -> list[CountedRequest]:
        """Return the rows of a group that have the block of their next token, or could get it."""
        taken: list[CountedRequest] = []
        for req in group:
            if not req.runs:
                continue  # preempted for one before it
            has = req.num_computed < req.needs_blocks_at
            if has or self._grow(req, req.num_computed + 1, taken, []):
                taken.append(req)
        return taken

    def _add_prompts(
        self,
        group: list[CountedRequest],
        chunks: list[Chunk],
        num_decoding: int,
        begun: Sequence[CountedRequest],
    ) -> None:
        """Add chunks of prompts beside rows that decode: of those begun, then of others."""
        waiting = 0
        if not num_decoding and self._stages > 1:
            waiting = sum(req.remaining for req in begun)
            waiting += sum(req.num_tokens for req in self._waiting)
        most = self.limits.prompt_tokens_of_step(waiting=waiting, decoding=num_decoding)
        room = max(1, most - len(group))
        for req in self._begun_then_new(begun):
            count = min(room, req.remaining, self._row_tokens)
            if count == 0:
                continue  # hosts had all of it but for its newest token, which decodes
            if not self._grow(req, req.num_computed + count, group, chunks):
                break
            chunks.append((req, count))
            room -= count
            if room == 0:
                break

    def _begun_then_new(self, begun: Sequence[CountedRequest]) -> Iterator[CountedRequest]:
        """Yield requests with a prompt left to compute, then newly admitted ones, in order."""
        for req in begun:
            if req.runs:
                yield req
        while self._waiting and self._may_admit(self._waiting[0]):
            req = heappop(self._waiting)
            self._begin(req)
            yield req

    def _may_admit(self, req: CountedRequest) -> bool:
        """Whether the first of the waiting requests may be admitted now."""
        running = self._running
        if len(running) == self.limits.max_rows or req.in_flight > 0:
            return False
        if not running or req.most_blocks + self._most_of_running <= self.limits.num_blocks:
            return True
        promised = 0
        for one in running:
            promised += max(0, self._behind_reach(self._to_build_on(one)) - one.num_blocks)
        return self._available - promised - self._watermark >= self._blocks(req.num_tokens)

    def _begin(self, req: CountedRequest) -> None:
        """Admit a request, with the blocks that hosts have of it."""
        insort(self._running, req)
        self._most_of_running += req.most_blocks
        req.runs = True
        req.needs_blocks_at = self._behind
        if req.num_offloaded:
            self._take_blocks(req, req.num_offloaded)
            req.num_computed, req.has_loads = req.num_offloaded, True
        self._sort_in(req)

    def _grow(
        self,
        req: CountedRequest,
        tokens: int,
        group: Sequence[CountedRequest],
        chunks: Sequence[Chunk],
    ) -> bool:
        """Give a request the blocks of so many tokens; False if it has to wait for them.

        Younger requests are preempted for it, the youngest first, but none of the step in the
        making.
        """
        lacks = self._blocks(tokens) - req.num_blocks
        if lacks <= 0:
            return True
        while lacks > self._available:
            in_step = {*group, *(one for one, _ in chunks)}
            others = [one for one in self._running if one.num_blocks and one not in in_step]
            victim = max(others, default=req)
            if not req < victim:
                return False
            self._preempt(victim)
        self._take_blocks(req, tokens)
        return True

    def _take_blocks(self, req: CountedRequest, tokens: int) -> None:
        more = self._blocks(tokens) - req.num_blocks
        if more > 0:
            assert more <= self._available, "blocks that were asked for are available"
            self._available -= more
            req.num_blocks += more
            req.needs_blocks_at = req.num_blocks * BLOCK_TOKENS + self._behind

    def _preempt(self, req: CountedRequest) -> None:
        """Have a running request wait, its blocks free, offloaded or to be computed again."""
        if req.has_loads:  # not copied back yet: hosts still have them
            req.has_loads = False
        else:
            self._drop_offloaded(req)
            count = self._blocks(req.num_computed)
            if 0 < count <= self._host_blocks:
                req.num_host_blocks, req.num_offloaded = count, req.num_computed
                self._host_blocks -= count
        self._let_go(req)
        req.request.num_preemptions += 1
        heappush(self._waiting, req)

    def _drop_offloaded(self, req: CountedRequest) -> None:
        self._host_blocks += req.num_host_blocks
        req.num_host_blocks = req.num_offloaded = 0
        req.has_loads = False

    def _let_go(self, req: CountedRequest) -> None:
        """Take the blocks of a running request."""
        self._available += req.num_blocks
        self._most_of_running -= req.most_blocks
        req.num_blocks = req.num_computed = 0
        req.runs = False
        self._running.remove(req)
        self._sort_out(req)

    def _counted(self, group: list[CountedRequest], chunks: Sequence[Chunk]) -> CountedBatch:
        """Return a step, its requests' counters moved on."""
        self._seq = number = self._seq + 1
        self._steps += 1
        if group:
            self._decode_steps += 1
            self._last_decode = number
        caches: list[int] = []
        for req in group:
            req.num_computed = end = req.num_computed + 1
            req.num_sampled += 1
            req.in_flight += 1
            req.last_step = number
            caches.append(end)
            if req.num_host_blocks:
                self._drop_offloaded(req)
        of_prompts: list[tuple[int, int]] = []
        samplers: list[CountedRequest] = []
        for req, count in chunks:
            start, known = req.num_computed, req.num_tokens
            if count == 1 and start > 0:
                caches.append(start + 1)
            else:
                of_prompts.append((start, count))
            req.num_computed, req.last_step = start + count, number
            if start + count == known:
                req.num_sampled += 1
                req.in_flight += 1
                samplers.append(req)
            if req.num_host_blocks:
                self._drop_offloaded(req)
            self._sort_out(req)
            self._sort_in(req)
        rows = StepRows(of_prompts, caches, len(group) + len(samplers))
        return CountedBatch(group, chunks, samplers, rows)

    def _end(self, req: CountedRequest) -> None:
        """Forget a request, its blocks free."""
        req.request.output = [0] * req.max_new
        if req.runs:
            self._let_go(req)
        else:
            self._waiting.remove(req)
            heapify(self._waiting)
        self._drop_offloaded(req)

    def _hold_more(self, tokens: int) -> bool:
        """Whether there are blocks for so many more tokens of each running request."""
        lacks = 0
        for req in self._running:
            lacks += max(0, self._behind_reach(req.num_computed + tokens) - req.num_blocks)
        return lacks <= self._available

    def _behind_reach(self, tokens: int) -> int:
        """Return the blocks of so many tokens, as `BlockTables` counts those to be taken."""
        return -(-max(0, tokens - self._behind) // BLOCK_TOKENS)

    def _blocks(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        if not self._behind:
            return -(-tokens // BLOCK_TOKENS)
        return pool_blocks(self.limits.kv, tokens)
