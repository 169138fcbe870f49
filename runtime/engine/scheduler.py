"""Decides the next step over a pool of KV blocks: which tokens of which requests. Pure Python.

A step is a list of (request, range of its tokens): a decoding row is a range of one, a chunk of a
prompt (chunked prefill) a longer one, a row with drafts the newest token and what was drafted
behind it. All three go together. A request is admitted while blocks are free above a watermark,
gets blocks as it grows, and reserves none for what it may still ask; without free blocks the
youngest is preempted: its blocks are offloaded to the hosts, or it is recomputed later. The oldest
is never preempted by another and fits the pool by itself, so it always ends.

Drafts by the model: a group of decoding rows first takes a step for each draft (`DraftRound`), with
blocks reserved for all of them; their verify is an ordinary step. Refused drafts cost nothing but
their step: the next tokens overwrite them. Drafts by the model's own head (MTP) come with the
tokens of the last step, which asked for them.

The caller asks `next_micro_batch()` as often as it likes and reports each result, in the order the
micro-batches were issued, with `update_from_output()`: stages see steps in that order, which is why
blocks that a step under way still writes may be given to later steps. Knows nothing of devices or
time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from operator import attrgetter

from llmpq.runtime.drafts.drafters import Drafter, FixedDrafter
from llmpq.runtime.engine.block_tables import BlockTables, DraftRound, RunningRequest
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.request import PENDING_TOKEN, FinishReason, MicroBatch, Request, StepKind

NO_DRAFTS: tuple[int, ...] = ()
_order = attrgetter("order")


@dataclass
class StepBuilder:
    """A step in the making."""

    reqs: list[RunningRequest] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    drafts: list[Sequence[int]] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """Drafts wanted behind each, as `PagedRow.drafts_wanted`."""

    def add(
        self, req: RunningRequest, count: int, drafts: Sequence[int], *, wanted: int = -1
    ) -> None:
        """Add `count` tokens of a request, the last of them its drafts."""
        self.reqs.append(req)
        self.counts.append(count)
        self.drafts.append(drafts)
        self.wanted.append(wanted)

    def complete(self) -> None:
        """Give requests that were added by themselves a token each, without drafts."""
        count = len(self.reqs) - len(self.counts)
        self.counts += [1] * count
        self.drafts += [NO_DRAFTS] * count
        self.wanted += [-1] * count


@dataclass
class ReadySets:
    """Admitted requests, by what they wait for."""

    ready: list[RunningRequest] = field(default_factory=list)
    """Whose newest token is known, in order."""
    prompts: list[RunningRequest] = field(default_factory=list)
    """With more of a prompt to compute, in order."""
    num_decoding: int = 0
    """Those that are ready, and those whose newest token is under way."""


class Scheduler:
    """Continuous batching over a pool of blocks, prompts in chunks beside decoding rows."""

    def __init__(
        self,
        limits: PoolLimits,
        *,
        drafter: Drafter | None = None,
        ends_in_stop_text: Callable[[Request], bool] | None = None,
        salt: str = "",
    ) -> None:
        """`salt` keeps the prefixes of this model apart from others'."""
        assert drafter is None or limits.tokens_ahead == 1, "drafts need to know the tokens"
        self.limits, self.tables = limits, BlockTables(limits, salt)
        self._drafter, self._ends_in_stop_text = drafter, ends_in_stop_text
        by_head = isinstance(drafter, FixedDrafter) and drafter.by_head
        self._head_drafter = drafter if isinstance(drafter, FixedDrafter) and by_head else None
        """Where the model's own head (MTP) drafts on the last stage: who says how much."""
        self._reqs: dict[int, RunningRequest] = {}
        self._waiting: list[RunningRequest] = []
        self._running: list[RunningRequest] = []
        self._free_slots = list(range(limits.max_rows))
        self._num_submitted = self._seq = 0
        self._steps = 0
        """Steps under way."""
        self._decode_steps = 0
        """Those of them in which rows decode, and rounds of drafts."""
        self._last_decode = 0
        """Number of the step in which rows decoded last."""
        self._rounds: dict[int, DraftRound] = {}
        """Number of a draft step under way -> its round."""
        self._drafted: deque[DraftRound] = deque()
        """Rounds whose last draft step is complete, oldest first."""
        self.generated_tokens = self.num_preemptions = 0
        self.fused_rounds = False
        """Whether the device takes greedy rows' drafts and their verify as one step."""
        self._last_was_round = False
        """Whether the step issued last was such a round."""

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet, or nothing any more."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._running)

    @property
    def drafts(self) -> bool:
        """Whether requests may be drafted for."""
        return self._drafter is not None

    @property
    def drafts_in_vain(self) -> bool:
        """Whether drafts pay nowhere and none is half done, so that they may end."""
        rounds = self._rounds or self._drafted
        return self._drafter is not None and self._drafter.in_vain and not rounds

    def end_drafts(self, *, runs_ahead: bool) -> None:
        """Draft no more; no step may be under way.

        `runs_ahead`: whether the device takes a step before the last one's tokens are known.
        """
        self._drafter = self._head_drafter = None
        self.fused_rounds = False
        if runs_ahead:
            self.limits = replace(self.limits, tokens_ahead=2)

    @property
    def idle(self) -> bool:
        """Whether every submitted request has ended."""
        return not self._reqs

    def cached_tokens(self) -> list[int]:
        """Return how many tokens of each running request are, or are being, computed."""
        return [req.num_computed for req in self._running]

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
        """Queue a request; `ValueError` if it can never run.

        One whose answer has begun elsewhere goes on from there: what it has is recomputed.
        """
        self.limits.check(request)
        req = self.tables.new_request(request, self._num_submitted)
        req.num_sampled = len(request.output)
        self._num_submitted += 1
        self._reqs[request.id] = req
        heappush(self._waiting, req)

    def abort(self, request: Request) -> bool:
        """End a request at once, its blocks free; return whether it was there to be ended."""
        req = self._reqs.get(request.id)
        if req is None:
            return False
        request.aborted = True
        self._end(req, "abort")
        return True

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step, or None until another one completes."""
        if self._drafted and self._drafted[0].drafting:
            return self._issue_drafts(self._drafted.popleft())
        step, sets = StepBuilder(), self._ready_sets()
        if self._enough_under_way(sets.num_decoding):
            return None
        if self._drafted:
            self._add_drafted(step, self._drafted.popleft())
        else:
            plain = self._last_was_round and self._has_prompts(sets)
            round_ = self._add_decoding(step, sets, plain=plain)
            if round_ is not None:
                return self._issue_round(round_)
        decoding = len(step.reqs)
        room = self._prompt_room(sets, taken=sum(step.counts))
        for req in self._prompts(sets.prompts):
            count = min(room, self._left_of_prompt(req), self.limits.row_tokens)
            count = self.tables.cut(req, count)
            if count == 0:
                continue  # found in the prefix cache but for its newest token, which decodes
            if not self._grow(req, req.num_computed + count, step):
                break
            rests = self._head_drafter is not None and self._head_drafter.rests
            step.add(req, count, [], wanted=0 if self._sees(req) and not rests else -1)
            room -= count
            if room == 0:
                break
        if not step.reqs:
            return None
        kind = StepKind.MIXED
        if decoding == len(step.reqs):
            kind = StepKind.VERIFY if any(step.drafts) else StepKind.DECODE
        elif decoding == 0:
            kind = StepKind.PREFILL
        if decoding:
            self._decode_steps += 1
            self._last_decode = self._seq + 1
        return self._issue(kind, step)

    def update_from_output(
        self, micro_batch: MicroBatch, tokens: Sequence[Sequence[int]]
    ) -> list[Request]:
        """Take the new tokens of each row that samples; return the requests that ended."""
        self._steps -= 1
        if micro_batch.kind is StepKind.DRAFT:
            self._take_drafts(self._rounds.pop(micro_batch.seq), micro_batch, tokens)
            return []
        self._decode_steps -= micro_batch.kind is not StepKind.PREFILL
        finished = []
        steps = zip(micro_batch.requests, micro_batch.rows, micro_batch.sample_steps, strict=True)
        for index, (request, row, place) in enumerate(steps):
            req = self._reqs.get(request.id)
            if req is None or req.request is not request:
                continue  # ended meanwhile: a token too many
            end = micro_batch.starts[index] + len(micro_batch.tokens[index])
            reason = None
            if row.samples:
                new = tokens[index]
                if len(new) > 1:
                    new = new[: request.max_new - place]
                if self._drafter is not None and row.drafts:
                    self._drafter.observe(len(row.drafts), len(tokens[index]) - 1)
                reason = self._append(req, place, new)
                end += len(new) - 1 - len(row.drafts)
            if row.admission == req.admission and request.slot >= 0:
                if row.drafts:
                    req.num_computed = end
                if self.tables.may_register(req, end):
                    self.tables.register(req, min(end, req.num_tokens))
            if reason is not None:
                self._end(req, reason)
                finished.append(request)
        return finished

    def take_drafts(self, micro_batch: MicroBatch, drafts: Sequence[Sequence[int]]) -> None:
        """Take what the last stage drafted behind the new tokens of a step's rows."""
        rows = zip(micro_batch.requests, micro_batch.rows, drafts, strict=bool(drafts))
        for request, row, found in rows:
            req = self._reqs.get(request.id)
            if req is not None and req.request is request and row.admission == req.admission:
                request.drafts = list(found) if request.slot >= 0 else []

    def check(self) -> None:
        """Raise `AssertionError` if a block or a slot is lost or owned twice; for tests."""
        self.tables.check(self._reqs.values())
        slots = [req.request.slot for req in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_rows))
        known = [req.request.id for req in self._waiting + self._running]
        assert sorted(known) == sorted(self._reqs)
        assert not any(h.blocks or h.round or h.request.slot >= 0 for h in self._waiting)
        rounds = [*self._rounds.values(), *self._drafted]
        members = [id(req) for round_ in rounds for req in round_.members]
        assert sorted(members) == sorted(id(req) for req in self._running if req.round is not None)
        assert all(round_.members for round_ in self._drafted)
        assert len(rounds) <= self._decode_steps

    def _ready_sets(self) -> ReadySets:
        """Look once at every admitted request: steps are short, and they are many."""
        found = ReadySets()
        for req in self._running:
            request = req.request
            left = len(request.prompt) + len(request.output) - req.num_computed
            if left > 1 or req.num_sampled == 0:
                if self._left_of_prompt(req) > 0:
                    found.prompts.append(req)
                continue
            found.num_decoding += 1
            if left == 1 and req.round is None:
                found.ready.append(req)
        found.ready.sort(key=_order)
        found.prompts.sort(key=_order)
        return found

    def _prompt_room(self, sets: ReadySets, *, taken: int) -> int:
        """Return the tokens of prompts that a step takes, beside those it has."""
        limits, waiting = self.limits, 0
        if not sets.num_decoding and limits.num_stages > 1:
            waiting = sum(self._left_of_prompt(req) for req in sets.prompts)
            waiting += sum(req.num_tokens for req in self._waiting)
        most = limits.prompt_tokens_of_step(waiting=waiting, decoding=sets.num_decoding)
        return max(1, most - taken)

    def _left_of_prompt(self, req: RunningRequest) -> int:
        """Return how many tokens a request has yet to compute as a prompt.

        Of an answer that is recomputed the newest token decodes where drafts may follow it, as it
        would have: sampled rows then get the tokens they would have got.
        """
        drafts = self._drafter is not None and req.request.may_draft
        return req.remaining - (1 if drafts and req.num_sampled > 0 else 0)

    def _enough_under_way(self, num_decoding: int) -> bool:
        """Whether prompts had better wait for rows that decode, to share a step with them.

        Issued as soon as one may be, steps of prompts alone would fill every one of them, and
        rows that decode go on in steps of their own, as long as each reads the weights again.
        """
        limits = self.limits
        if limits.tokens_ahead == 1 or not num_decoding:
            return False
        return self._steps >= limits.num_stages * limits.tokens_ahead

    def _has_prompts(self, sets: ReadySets) -> bool:
        """Whether a step could have tokens of prompts."""
        return bool(sets.prompts) or (bool(self._waiting) and self._may_admit(self._waiting[0]))

    def _add_decoding(
        self, step: StepBuilder, sets: ReadySets, *, plain: bool
    ) -> DraftRound | None:
        """Add the rows that decode next, oldest first; or begin a round of drafts for them.

        `plain`: without drafts, beside prompts, which have no place in a round of one step.

        Rows that decode are split evenly into as many groups as keep all stages at work. No row
        goes on from a token of the last such step while that is under way: stages would wait for
        each other, which another group's step between the two keeps at work.
        """
        ready, decoding = sets.ready, sets.num_decoding
        num_groups = max(
            -(-decoding // self.limits.decode_rows), min(self.limits.num_stages, decoding)
        )
        if not ready or self._decode_steps >= num_groups * self.limits.tokens_ahead:
            return None
        size = -(-decoding // num_groups)
        if num_groups > 1:
            ready = [h for h in ready if h.in_flight == 0 or h.last_step != self._last_decode]
        if self._drafter is None:
            for req in ready[:size]:
                # Blocks of a row are most often there, and rows are many.
                if req.request.slot >= 0 and (
                    self.tables.has_block(req) or self._grow(req, req.num_computed + 1, step)
                ):
                    step.reqs.append(req)
            step.complete()
            return None
        drafts, gamma = self._drafts(ready[:size], plain=plain)
        by_model = any(found is None for _, _, found in drafts)
        round_ = DraftRound()
        for req, count, found in drafts:
            if req.request.slot < 0:
                continue  # preempted for one before it
            wanted = self._wanted(req, gamma, count)
            ahead = max(0, wanted - 1)
            if not self._grow(req, req.num_computed + 1 + count + ahead, step, round_):
                continue
            if by_model:
                round_.add(req, count)
            else:
                step.add(req, 1 + count, found or [], wanted=wanted)
        return round_ if round_.members else None

    def _drafts(
        self, group: Sequence[RunningRequest], *, plain: bool
    ) -> tuple[list[tuple[RunningRequest, int, list[int] | None]], int]:
        """Return how many tokens each row of a group drafts, and these; None if the model does.

        `plain`: none. And how many tokens the group drafts by the drafter, which the model's own
        head (MTP) will do for the next round.
        """
        drafter = None if plain else self._drafter
        drafted = [req.request for req in group if req.request.may_draft]
        gamma = drafter.gamma(drafted) if drafter is not None and drafted else 0
        found: list[tuple[RunningRequest, int, list[int] | None]] = []
        for req in group:
            most = gamma if self._head_drafter is None else len(req.request.drafts)
            count = min(most, req.request.remaining - 1) if req.request.may_draft else 0
            drafts = drafter.propose(req.request, count) if drafter and count > 0 else []
            found.append((req, count if drafts is None else len(drafts), drafts))
        return found, gamma

    def _sees(self, req: RunningRequest) -> bool:
        """Whether the model's own head (MTP) is to see what is computed of a request."""
        return self._head_drafter is not None and req.request.may_draft

    def _wanted(self, req: RunningRequest, gamma: int, count: int) -> int:
        """Return how many tokens the head is to draft behind a row with `count` drafts.

        No more than may follow, all of the row's accepted, and than the request's blocks hold.
        """
        if not self._sees(req):
            return -1
        room = req.longest - req.num_computed - count
        return max(0, min(gamma, req.request.remaining - 2, room))

    def _issue_round(self, round_: DraftRound) -> MicroBatch:
        """Return a round of drafts and their verify in one step, or its first draft step."""
        fused = self.fused_rounds and all(req.request.drafts_plainly for req in round_.members)
        self._decode_steps += 1
        if not fused:
            return self._issue_drafts(round_)
        step = StepBuilder()
        for req in list(round_.members):
            count = req.num_to_draft
            round_.remove(req)
            step.add(req, 1 + count, [PENDING_TOKEN] * count)
        self._last_decode = self._seq + 1
        return self._issue(StepKind.ROUND, step)

    def _add_drafted(self, step: StepBuilder, round_: DraftRound) -> None:
        """Add the verify of a round."""
        for req in list(round_.members):
            drafts = req.drafts
            round_.remove(req)
            step.add(req, 1 + len(drafts), drafts)
        self._decode_steps -= 1  # the round's, which the step now counts as

    def _issue_drafts(self, round_: DraftRound) -> MicroBatch:
        """Return the next draft step of a round."""
        reqs, drafted = round_.drafting, round_.num_drafted
        rows = tuple(req.row(samples=True) for req in reqs)
        starts = [req.num_computed + drafted for req in reqs]
        tokens = [[req.drafts[-1] if drafted else req.request.output[-1]] for req in reqs]
        self._seq += 1
        self._steps += 1
        self._last_decode = self._seq
        self._rounds[self._seq] = round_
        requests = [req.request for req in reqs]
        steps = [req.num_sampled + drafted for req in reqs]
        return MicroBatch(self._seq, StepKind.DRAFT, requests, starts, tokens, rows, steps)

    def _take_drafts(
        self, round_: DraftRound, micro_batch: MicroBatch, tokens: Sequence[Sequence[int]]
    ) -> None:
        """Take what a step has drafted for the members that are still there."""
        round_.num_drafted += 1
        for request, drafted in zip(micro_batch.requests, tokens, strict=True):
            req = self._reqs.get(request.id)
            if req is not None and req.round is round_:
                req.drafts.extend(drafted)
        if round_.members:
            self._drafted.append(round_)
        else:
            self._decode_steps -= 1

    def _leave_round(self, req: RunningRequest) -> None:
        """Take a request that loses its blocks out of its round."""
        round_ = req.round
        if round_ is None:
            return
        round_.remove(req)
        if not round_.members and round_ in self._drafted:
            self._drafted.remove(round_)
            self._decode_steps -= 1

    def _prompts(self, begun: Sequence[RunningRequest]) -> Iterator[RunningRequest]:
        """Yield requests with a prompt left to compute, then newly admitted ones, in order."""
        for req in begun:
            if req.request.slot >= 0:  # not preempted for one before it
                yield req
        while self._waiting and self._may_admit(self._waiting[0]):
            req = heappop(self._waiting)
            self.tables.begin(req)
            req.request.slot = heappop(self._free_slots)
            self._running.append(req)
            yield req

    def _may_admit(self, req: RunningRequest) -> bool:
        """Whether the first of the waiting requests may be admitted now."""
        if not self._free_slots or req.in_flight > 0:
            return False
        if not self._running:
            return True
        return self.tables.fits(req, self._running)

    def _grow(
        self,
        req: RunningRequest,
        tokens: int,
        step: StepBuilder,
        round_: DraftRound | None = None,
    ) -> bool:
        """Give a request the blocks of so many tokens; False if it has to wait for them.

        Younger requests are preempted for it, the youngest first, but none of the step or of the
        round in the making.
        """
        members = () if round_ is None else round_.members
        if self.tables.holds(req, tokens):
            return True
        self.tables.pass_windows(req)
        while self.tables.lacks(req, tokens) > 0:
            busy = (*step.reqs, *members)
            others = [h for h in self._running if h.blocks and h not in busy]
            victim = max(others, default=req)
            if not req < victim:
                return False
            self._preempt(victim)
        self.tables.grow(req, tokens)
        return True

    def _preempt(self, req: RunningRequest) -> None:
        """Have a running request wait, its blocks free, offloaded or to be recomputed."""
        if self._drafter is None:  # which drafts are accepted is not known yet
            self.tables.offload(req)
        self._let_go(req)
        req.request.drafts = []  # what they were drawn from is noted by slot
        req.request.num_preemptions += 1
        self.num_preemptions += 1
        heappush(self._waiting, req)

    def _let_go(self, req: RunningRequest) -> None:
        """Take slot and blocks of a running request."""
        self._leave_round(req)
        self.tables.release(req)
        self._running.remove(req)
        heappush(self._free_slots, req.request.slot)
        req.request.slot = -1

    def _issue(self, kind: StepKind, step: StepBuilder) -> MicroBatch:
        starts, tokens, rows, sample_steps = [], [], [], []
        tables, number = self.tables, self._seq + 1
        with_states, tokens_ahead = self.limits.snapshots > 0, self.limits.tokens_ahead
        parts = zip(step.reqs, step.counts, step.drafts, step.wanted, strict=True)
        for req, count, drafts, wanted in parts:  # short: a step has hundreds of rows
            request, start = req.request, req.num_computed
            end, behind = start + count, start - len(request.prompt)
            starts.append(start)
            if count == 1 and behind >= 0:
                tokens.append([request.output[behind]])
            else:
                tokens.append([*req.tokens(start, end - len(drafts)), *drafts])
            samples = end - len(drafts) == len(request.prompt) + len(request.output)
            if with_states:
                saves = tables.snapshot(req, end)
                row = req.row(
                    samples=samples, drafts=drafts, drafts_wanted=wanted, saves_state=saves
                )
                tables.state_loaded(req)
            else:
                row = req.row(samples=samples, drafts=drafts, drafts_wanted=wanted)
            rows.append(row)
            sample_steps.append(req.num_sampled)
            if request.drafts:
                request.drafts = []
            if req.offloaded:
                tables.drop_offloaded(req)
            req.num_computed, req.last_step = end, number
            if samples:
                req.num_sampled += 1
                req.in_flight += 1
                if req.in_flight < tokens_ahead:
                    self._go_ahead(req)
        if tables.saves:
            rows[0], tables.saves = replace(rows[0], saves=tuple(tables.saves)), []
        self._seq = number
        self._steps += 1
        self._last_was_round = kind is StepKind.ROUND
        requests = [req.request for req in step.reqs]
        return MicroBatch(self._seq, kind, requests, starts, tokens, tuple(rows), sample_steps)

    def _go_ahead(self, req: RunningRequest) -> None:
        """Let a request's next token be asked for although the last one is not known yet."""
        request = req.request
        if len(request.output) < req.num_sampled < request.max_new:
            request.output.append(PENDING_TOKEN)

    def _append(self, req: RunningRequest, place: int, new: Sequence[int]) -> FinishReason | None:
        """Put tokens into the output up to the first stop or the limit; why it ends, if it does."""
        request, output = req.request, req.request.output
        req.in_flight -= 1
        req.num_sampled += len(new) - 1
        for index, token in enumerate(new, start=place):
            if index < len(output):
                output[index] = token
            else:
                output.append(token)
            self.generated_tokens += 1
            if token in request.stop_ids or request.stop_texts or index + 1 == request.max_new:
                reason = self._ends(request, index)
                if reason is not None:
                    del output[index + 1 :]
                    return reason
        if req.in_flight < self.limits.tokens_ahead:
            self._go_ahead(req)
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

    def _end(self, req: RunningRequest, reason: FinishReason) -> None:
        """Forget a request, its blocks free."""
        request = req.request
        if PENDING_TOKEN in request.output:
            del request.output[request.output.index(PENDING_TOKEN) :]
        request.finish_reason = reason
        del self._reqs[request.id]
        self.tables.drop_offloaded(req)
        if request.slot >= 0:
            self._let_go(req)
        else:
            self._waiting.remove(req)
            self._waiting.sort()
