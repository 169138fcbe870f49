"""Decides the next step over a pool of KV blocks: which tokens of which requests. Pure Python.

A step is a list of (request, range of its tokens): a decoding row is a range of one, a chunk of a
prompt a longer one, a row with drafts the newest token and what was drafted behind it. All three
go together. A request is let in while blocks are free above a watermark, gets blocks as it grows,
and reserves none for what it may still ask; without blocks the youngest is preempted: hosts keep
its blocks, or it is computed again later. The oldest is never preempted by another and fits the
pool alone, so it always ends.

The caller asks `next_micro_batch()` as often as it likes and reports each result, in the order the
micro-batches were issued, with `complete()`: stages see steps in that order, which is why blocks
that a step under way still writes may be given to later steps. Knows nothing of devices or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from llmpq.runtime.drafts.drafter import Drafter
from llmpq.runtime.engine.block_tables import BlockTables, Holder
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import UNKNOWN
from llmpq.runtime.request import FinishReason, MicroBatch, Request, StepKind

_order = attrgetter("order")


@dataclass
class _Plan:
    """A step in the making."""

    holders: list[Holder] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)

    def add(self, holder: Holder, count: int, drafts: list[int]) -> None:
        self.holders.append(holder)
        self.counts.append(count)
        self.drafts.append(drafts)


@dataclass
class _Sorts:
    """Requests that were let in, by what they wait for."""

    ready: list[Holder] = field(default_factory=list)
    """Whose newest token is there to go on from, first come first."""
    prompts: list[Holder] = field(default_factory=list)
    """With more of a prompt to compute, first come first."""
    num_decoding: int = 0
    """Those that are ready, and those whose newest token is under way."""


class PagedScheduler:
    """Continuous batching over a pool of blocks, prompts in chunks beside decoding rows."""

    def __init__(
        self,
        limits: PoolLimits,
        *,
        drafter: Drafter | None = None,
        ends_in_stop_text: Callable[[Request], bool] | None = None,
        salt: str = "",
    ) -> None:
        """`drafter`: one that finds drafts without the model. `salt` keeps prefixes apart."""
        assert drafter is None or limits.tokens_ahead == 1, "drafts need to know the tokens"
        self.limits, self.tables = limits, BlockTables(limits, salt)
        self._drafter, self._ends_in_stop_text = drafter, ends_in_stop_text
        self._holders: dict[int, Holder] = {}
        self._waiting: list[Holder] = []
        self._running: list[Holder] = []
        self._free_slots = list(range(limits.max_rows))
        self._num_submitted = self._seq = 0
        self._left_to_fill = 0
        """Of a static batch: requests that may still be let in."""
        self._steps = 0
        """Steps under way."""
        self._decode_steps = 0
        """Those of them in which rows decode."""
        self._last_decode = 0
        """Number of the step in which rows decoded last."""
        self.generated_tokens = self.num_preemptions = 0
        self.whole_rounds = False

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet, or nothing any more."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have been let in."""
        return len(self._running)

    @property
    def drafts(self) -> bool:
        """Whether requests may be drafted for."""
        return self._drafter is not None

    @property
    def drafts_in_vain(self) -> bool:
        """Never: drafts of a pool need no model, and nothing is kept for them."""
        return False

    def end_drafts(self) -> None:
        """Draft no more."""
        self._drafter = None

    @property
    def idle(self) -> bool:
        """Whether every submitted request has ended."""
        return not self._holders

    def cached_tokens(self) -> list[int]:
        """Return how many tokens of each running request are, or are being, computed."""
        return [holder.num_computed for holder in self._running]

    def gauges(self) -> dict[str, int]:
        """Return blocks of the pool, and tokens of the prefix cache since the start."""
        pool = self.tables.pool
        return {
            "blocks": pool.num_blocks,
            "blocks_held": pool.num_held,
            "blocks_cached": pool.num_cached,
            "prefix_queries": self.tables.prefix_queries,
            "prefix_hits": self.tables.prefix_hits,
            "preemptions": self.num_preemptions,
        }

    def submit(self, request: Request) -> None:
        """Queue a request; `ValueError` if it can never run."""
        self.limits.check(request)
        holder = self.tables.holder(request, self._num_submitted)
        self._num_submitted += 1
        self._holders[request.id] = holder
        heappush(self._waiting, holder)

    def abort(self, request: Request) -> bool:
        """End a request at once, its blocks free; return whether it was there to be ended."""
        holder = self._holders.get(request.id)
        if holder is None:
            return False
        request.aborted = True
        self._end(holder, "abort")
        return True

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step, or None until another one completes."""
        plan, sorts = _Plan(), self._sorts()
        if self._enough_under_way(sorts.num_decoding):
            return None
        self._add_decoding(plan, sorts)
        decoding = len(plan.holders)
        room = max(1, self.limits.step_tokens - sum(plan.counts))
        for holder in self._prompts(sorts.prompts):
            count = min(room, holder.remaining, self.limits.row_tokens)
            if not self._grow(holder, holder.num_computed + count, plan):
                break
            plan.add(holder, count, [])
            room -= count
            if room == 0:
                break
        if not plan.holders:
            return None
        kind = StepKind.MIXED
        if decoding == len(plan.holders):
            kind = StepKind.DECODE
        elif decoding == 0:
            kind = StepKind.PREFILL
        if decoding:
            self._decode_steps += 1
            self._last_decode = self._seq + 1
        return self._issue(kind, plan)

    def complete(self, micro_batch: MicroBatch, tokens: Sequence[Sequence[int]]) -> list[Request]:
        """Take the new tokens of each row that samples; return the requests that ended."""
        self._steps -= 1
        self._decode_steps -= micro_batch.kind is not StepKind.PREFILL
        finished = []
        steps = zip(micro_batch.requests, micro_batch.rows, strict=True)
        for index, (request, row) in enumerate(steps):
            holder = self._holders.get(request.id)
            if holder is None or holder.request is not request:
                continue  # ended meanwhile: a token too many
            end = micro_batch.starts[index] + len(micro_batch.tokens[index])
            reason = None
            if row.samples:
                new = tokens[index][: request.max_new - row.sample_step]
                if self._drafter is not None and row.drafts:
                    self._drafter.observe(len(row.drafts), len(tokens[index]) - 1)
                reason = self._append(holder, row.sample_step, new)
                end += len(new) - 1 - len(row.drafts)
            if row.admission == holder.admission and request.slot >= 0:
                if row.drafts:
                    holder.num_computed = end
                self.tables.register(holder, min(end, holder.num_tokens))
            if reason is not None:
                self._end(holder, reason)
                finished.append(request)
        return finished

    def check(self) -> None:
        """Raise `AssertionError` if a block or a slot is lost or owned twice; for tests."""
        self.tables.check(self._holders.values())
        slots = [holder.request.slot for holder in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_rows))
        known = [holder.request.id for holder in self._waiting + self._running]
        assert sorted(known) == sorted(self._holders)
        assert not any(h.blocks or h.request.slot >= 0 for h in self._waiting)

    def _sorts(self) -> _Sorts:
        """Look once at every request that was let in: steps are short, and they are many."""
        found = _Sorts()
        for holder in self._running:
            left = holder.remaining
            if left > 1 or holder.num_sampled == 0:
                if left > 0:
                    found.prompts.append(holder)
                continue
            found.num_decoding += 1
            if left == 1:
                found.ready.append(holder)
        found.ready.sort(key=_order)
        found.prompts.sort(key=_order)
        return found

    def _enough_under_way(self, num_decoding: int) -> bool:
        """Whether prompts had better wait for rows that decode, to share a step with them.

        Issued as soon as there is a place, steps of prompts alone would fill every one of them, and
        rows that decode go on in steps of their own, as long as each reads the weights again.
        """
        limits = self.limits
        if limits.tokens_ahead == 1 or not num_decoding:
            return False
        return self._steps >= limits.num_stages * limits.tokens_ahead

    def _add_decoding(self, plan: _Plan, sorts: _Sorts) -> None:
        """Add the rows that decode next, oldest first, with their drafts.

        Rows that decode are split evenly into as many groups as keep all stages at work. No row
        goes on from a token of the last such step while that is under way: stages would wait for
        each other, which another group's step between the two keeps at work.
        """
        ready, decoding = sorts.ready, sorts.num_decoding
        num_groups = max(
            -(-decoding // self.limits.decode_rows), min(self.limits.num_stages, decoding)
        )
        if not ready or self._decode_steps >= num_groups * self.limits.tokens_ahead:
            return
        size = -(-decoding // num_groups)
        if num_groups > 1:
            ready = [h for h in ready if h.in_flight == 0 or h.last_step != self._last_decode]
        for holder in ready[:size]:
            if holder.request.slot < 0:
                continue  # preempted for one before it
            drafts = self._drafts(holder)
            if self._grow(holder, holder.num_computed + 1 + len(drafts), plan):
                plan.add(holder, 1 + len(drafts), drafts)

    def _drafts(self, holder: Holder) -> list[int]:
        """Return tokens to verify behind the newest, found without the model."""
        request = holder.request
        if self._drafter is None or not request.may_draft:
            return []
        gamma = min(self._drafter.gamma([request]), request.max_new - len(request.output) - 1)
        return list(self._drafter.propose(request, gamma) or ()) if gamma > 0 else []

    def _prompts(self, begun: Sequence[Holder]) -> Iterator[Holder]:
        """Yield requests with a prompt left to compute, then those that are let in, in order."""
        for holder in begun:
            if holder.request.slot >= 0:  # not preempted for one before it
                yield holder
        while self._waiting and self._may_admit(self._waiting[0]):
            holder = heappop(self._waiting)
            self._left_to_fill -= holder.admission == 0
            self.tables.begin(holder)
            holder.request.slot = heappop(self._free_slots)
            self._running.append(holder)
            yield holder

    def _may_admit(self, holder: Holder) -> bool:
        """Whether the first of those that wait may be let in now."""
        if not self._free_slots or holder.in_flight > 0:
            return False
        if not self._running:
            self._left_to_fill = self.limits.max_rows
            return True
        if self.limits.batching == "static" and holder.admission == 0 and not self._left_to_fill:
            return False
        return self.tables.fits(holder, self._running)

    def _grow(self, holder: Holder, tokens: int, plan: _Plan) -> bool:
        """Give a request the blocks of so many tokens; False if it has to wait for them.

        Younger requests are preempted for it, the youngest first, but none of the step planned.
        """
        if self.tables.holds(holder, tokens):
            return True
        self.tables.pass_windows(holder)
        while self.tables.lacks(holder, tokens) > 0:
            others = [h for h in self._running if h.blocks and h not in plan.holders]
            victim = max(others, default=holder)
            if not holder < victim:
                return False
            self._preempt(victim)
        self.tables.grow(holder, tokens)
        return True

    def _preempt(self, holder: Holder) -> None:
        """Have a running request wait, its blocks free, kept by hosts or to be computed again."""
        if self._drafter is None:  # what of drafts counts is not known yet
            self.tables.keep(holder)
        self._let_go(holder)
        holder.request.num_preemptions += 1
        self.num_preemptions += 1
        heappush(self._waiting, holder)

    def _let_go(self, holder: Holder) -> None:
        """Take slot and blocks of a running request."""
        self.tables.release(holder)
        self._running.remove(holder)
        heappush(self._free_slots, holder.request.slot)
        holder.request.slot = -1

    def _issue(self, kind: StepKind, plan: _Plan) -> MicroBatch:
        starts, tokens, rows = [], [], []
        for holder, count, drafts in zip(plan.holders, plan.counts, plan.drafts, strict=True):
            start = holder.num_computed
            end = start + count - len(drafts)
            starts.append(start)
            tokens.append([*holder.tokens(start, end), *drafts])
            samples = end == holder.num_tokens
            rows.append(holder.row(samples=samples, drafts=drafts))
            self.tables.forget(holder)
            holder.num_computed, holder.last_step = start + count, self._seq + 1
            if samples:
                holder.num_sampled += 1
                holder.in_flight += 1
                self._go_ahead(holder)
        rows[0].saves, self.tables.saves = tuple(self.tables.saves), []
        self._seq += 1
        self._steps += 1
        requests = [holder.request for holder in plan.holders]
        return MicroBatch(self._seq, kind, requests, starts, tokens, None, tuple(rows))

    def _go_ahead(self, holder: Holder) -> None:
        """Let a request's next token be asked for although the last one is not known yet."""
        output = holder.request.output
        missing = len(output) < holder.num_sampled < holder.request.max_new
        if missing and holder.in_flight < self.limits.tokens_ahead:
            output.append(UNKNOWN)

    def _append(self, holder: Holder, place: int, new: Sequence[int]) -> FinishReason | None:
        """Put tokens into the output up to the first stop or the limit; why it ends, if it does."""
        output = holder.request.output
        holder.in_flight -= 1
        holder.num_sampled += len(new) - 1
        for index, token in enumerate(new, start=place):
            output[index : index + 1] = [token]
            self.generated_tokens += 1
            reason = self._ends(holder.request, index)
            if reason is not None:
                del output[index + 1 :]
                return reason
        self._go_ahead(holder)
        return None

    def _ends(self, request: Request, index: int) -> FinishReason | None:
        """Return why a request ends with a token of its output, None if it does not."""
        output = request.output
        may_stop = index + 1 > request.min_new
        if may_stop and output[index] in request.stop_ids:
            return "stop"
        if may_stop and request.stop_texts and self._ends_in_stop_text is not None:
            behind = output[index + 1 :]
            del output[index + 1 :]
            ended = self._ends_in_stop_text(request)
            output += behind
            if ended:
                return "stop"
        return "length" if index + 1 == request.max_new else None

    def _end(self, holder: Holder, reason: FinishReason) -> None:
        """Forget a request, its blocks free."""
        request = holder.request
        if UNKNOWN in request.output:
            del request.output[request.output.index(UNKNOWN) :]
        request.finish_reason = reason
        del self._holders[request.id]
        self.tables.forget(holder)
        if request.slot >= 0:
            self._let_go(holder)
        else:
            self._waiting.remove(holder)
            self._waiting.sort()
