"""Decides the next step over a pool of KV blocks: which tokens of which requests. No torch.

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

Rows that only decode are hundreds and alike from step to step: their counters stand in arrays
(request_table.py), which a step moves on together. Requests are looked at one by one only where
something happens to them: they are admitted, get a block, may end, are drafted for.

The caller asks `next_micro_batch()` as often as it likes and reports each result, in the order the
micro-batches were issued, with `update_from_output()`: stages see steps in that order, which is why
blocks that a step under way still writes may be given to later steps. Knows nothing of devices or
time.

Legend: B rows of a step, D of them (the first ones) only decode, T new tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np

from llmpq.runtime.drafts.drafters import Drafter, FixedDrafter
from llmpq.runtime.engine.block_tables import BlockTables, DraftRound, RunningRequest
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.request_table import RowConstants
from llmpq.runtime.requests.request import (
    NO_INTS,
    NOT_FINITE_TOKEN,
    PENDING_TOKEN,
    FinishReason,
    Ints,
    MicroBatch,
    NewTokens,
    PagedRow,
    Request,
    StepKind,
    StepRequests,
)


@dataclass
class StepBuilder:
    """A step in the making."""

    decoding_D: Ints = field(default_factory=lambda: NO_INTS)
    """Rows of the table whose requests take a token each, without drafts."""
    reqs: list[RunningRequest] = field(default_factory=list)
    """The others."""
    counts: list[int] = field(default_factory=list)
    drafts: list[Sequence[int]] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """Drafts wanted behind each of them, as `PagedRow.drafts_wanted`."""

    def add(
        self, req: RunningRequest, count: int, drafts: Sequence[int], *, wanted: int = -1
    ) -> None:
        """Add `count` tokens of a request, the last of them its drafts."""
        self.reqs.append(req)
        self.counts.append(count)
        self.drafts.append(drafts)
        self.wanted.append(wanted)

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self.decoding_D) + len(self.reqs)

    @property
    def num_tokens(self) -> int:
        """Their tokens."""
        return len(self.decoding_D) + sum(self.counts)

    def has(self, req: RunningRequest) -> bool:
        """Whether a request has a row of the step."""
        return req in self.reqs or req.row in self.decoding_D


@dataclass(frozen=True, kw_only=True, eq=False)
class Phases:
    """Admitted requests, by what their next step computes; each in order."""

    decoding_N: Ints
    """Rows of the table of those that decode: their next step takes one token."""
    prompts: list[RunningRequest]
    """With more of a prompt to compute."""


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
        self.limits, self.tables = limits, BlockTables(limits, salt)
        self._counters = self.tables.counters
        self._drafter, self._ends_in_stop_text = drafter, ends_in_stop_text
        by_head = isinstance(drafter, FixedDrafter) and drafter.by_head
        self._head_drafter = drafter if isinstance(drafter, FixedDrafter) and by_head else None
        """Where the model's own head (MTP) drafts on the last stage: who says how much."""
        assert drafter is None or by_head or limits.tokens_ahead == 1, "drafts need known tokens"
        self._seen: set[int] = set()
        """Rows of the table of admitted requests that the head is to see, and may draft for."""
        self._reqs: dict[int, RunningRequest] = {}
        self._waiting: list[RunningRequest] = []
        self._running: list[RunningRequest] = []
        """Admitted requests, in order."""
        self._at_row: dict[int, RunningRequest] = {}
        """The same by their rows of the table."""
        self._rows: Ints | None = None
        """These rows, in order; None since one came or went."""
        self._changes = 0
        """How often one did."""
        self._groups: dict[bytes, tuple[StepRequests, RowConstants]] = {}
        """Rows that had a step together since then -> what all their steps have of them."""
        self._phases: Phases | None = None
        """The admitted requests by phase; None since one came or went, or got on in its prompt."""
        self._new_tokens: list[NewTokens] = []
        self._of_streams = False
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
        self._drafter = self._head_drafter = self._phases = None
        self.fused_rounds = False
        self._seen.clear()
        if runs_ahead:
            self.limits = replace(self.limits, tokens_ahead=2)

    @property
    def idle(self) -> bool:
        """Whether every submitted request has ended."""
        return not self._reqs

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
        step, phases = StepBuilder(), self._by_phase()
        if self._enough_under_way(len(phases.decoding_N)):
            return None
        if self._drafted:
            self._add_drafted(step, self._drafted.popleft())
        else:
            plain = self._last_was_round and self._has_prompts(phases)
            round_ = self._add_decoding(step, phases.decoding_N, plain=plain)
            if round_ is not None:
                return self._issue_round(round_)
        decoding = step.num_rows
        if phases.prompts or self._waiting:
            self._add_prompts(step, phases)
        if not step.num_rows:
            return None
        kind = StepKind.MIXED
        if decoding == step.num_rows:
            kind = StepKind.VERIFY if any(step.drafts) else StepKind.DECODE
        elif decoding == 0:
            kind = StepKind.PREFILL
        if decoding:
            self._decode_steps += 1
            self._last_decode = self._seq + 1
        return self._issue(kind, step)

    def update_from_output(
        self, micro_batch: MicroBatch, tokens: Ints | Sequence[Sequence[int]]
    ) -> list[Request]:
        """Take the new tokens of each row that samples; return the requests that ended.

        `tokens`: of each row; an array [B, 1] where each row has one.
        """
        self._steps -= 1
        if micro_batch.kind is StepKind.DRAFT:
            assert not isinstance(tokens, np.ndarray)
            self._take_drafts(self._rounds.pop(micro_batch.seq), micro_batch, tokens)
            return []
        self._decode_steps -= micro_batch.kind is not StepKind.PREFILL
        finished = self._without_token(micro_batch, tokens)
        if micro_batch.num_decoding:
            self._take_decoded(micro_batch, tokens, finished)
        if micro_batch.num_decoding < len(micro_batch.requests):
            self._take_chunks(micro_batch, tokens, finished)
        return finished

    def rounds_ahead(self) -> int:
        """Return for how many rounds nothing but decoding can happen, nothing being submitted.

        A round is a step of every running request. Meant of a scheduler whose last steps only
        decoded; fewer rounds than could be where some requests keep windows or draft.
        """
        rows, table = self._running_rows(), self._counters
        if self._drafter is not None or not len(rows) or self._by_phase().prompts:
            return 0
        if self._waiting and self._waiting[0].in_flight > 0:  # it may be admitted when that ends
            return 0
        rounds = int((table.max_new[rows] - table.num_sampled[rows]).min()) - 1
        while rounds > 0 and not self.tables.hold_more(rows, rounds):
            rounds //= 2
        return max(0, rounds)

    def repeats(self, groups: Sequence[Ints]) -> bool:
        """Whether these steps come again and again, in this order; False where that is not known.

        `groups`: rows of the table that decode, those whose tokens have just come, then of each
        step under way. Asked where nothing but decoding can happen (`rounds_ahead`). Then the next
        step has the rows that are ready, as many of them as a group has: where no row has a token
        ahead these are the first step's, if all others are under way; a single group has all.
        """
        rows = self._running_rows()
        running, sizes = len(rows), [len(own) for own in groups]
        if self._drafter is not None or not running:
            return False
        num_groups = self._num_groups(running)
        if self._tokens_ahead > 1:
            return num_groups == 1 and all(np.array_equal(own, rows) for own in groups)
        if sum(sizes) != running or max(sizes) > -(-running // num_groups):
            return False
        return np.array_equal(np.sort(np.concatenate(groups)), np.sort(rows))

    def next_caches(self, rows: Ints) -> list[int]:
        """Return the tokens in the caches of requests that decode, with their next step.

        `rows`: theirs in the table.
        """
        caches: list[int] = (self._counters.num_computed[rows] + 1).tolist()
        return caches

    def pass_rounds(
        self, rounds: int, steps: int, under_way: Iterable[MicroBatch], token: int
    ) -> None:
        """Be as after so many rounds (`rounds_ahead`) of so many steps, which brought `token`.

        As many steps are under way as now, of the same rows. For simulations: what a step of real
        stages would have got is not known.
        """
        rows, table = self._running_rows(), self._counters
        table.num_computed[rows] += rounds
        table.num_sampled[rows] += rounds
        table.newest[rows] = token
        table.last_step[rows] += steps
        self._seq += steps
        self._last_decode += steps
        self.generated_tokens += rounds * len(rows)
        for micro_batch in under_way:
            np.add(micro_batch.starts_B, rounds, out=micro_batch.starts_B)
            np.add(micro_batch.sample_steps_B, rounds, out=micro_batch.sample_steps_B)
        for req in self._running:
            req.request.output.extend([token] * rounds)
        known = table.num_computed[rows] - table.in_flight[rows]
        for place in (table.num_computed[rows] > table.needs_blocks_at[rows]).nonzero()[0].tolist():
            req = self._running[place]
            self.tables.grow(req, req.num_computed)
        for place in (known > table.fills_block_at[rows]).nonzero()[0].tolist():
            self.tables.register(self._running[place], int(known[place]))

    def take_new_tokens(self) -> tuple[list[NewTokens], bool]:
        """Return the tokens of streamed and recorded requests that came since the last call.

        And whether one of them is of a stream, which somebody waits for.
        """
        found = self._new_tokens, self._of_streams
        self._new_tokens, self._of_streams = [], False
        return found

    def take_drafts(self, micro_batch: MicroBatch, drafts: Sequence[Sequence[int]]) -> None:
        """Take what the last stage drafted behind the new tokens of a step's rows."""
        rows = zip(micro_batch.requests, micro_batch.admissions_B, drafts, strict=bool(drafts))
        for request, admission, found in rows:
            req = self._reqs.get(request.id)
            if req is not None and req.request is request and admission == req.admission:
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

    def _by_phase(self) -> Phases:
        """Return the admitted requests by phase, sorted anew where one may have changed it."""
        if self._phases is None:
            rows, table = self._running_rows(), self._counters
            left_N = table.num_tokens(rows, self._tokens_ahead) - table.num_computed[rows]
            is_prompt_N = (left_N > 1) | (table.num_sampled[rows] == 0)
            begun = [self._at_row[row] for row in rows[is_prompt_N].tolist()]
            self._phases = Phases(
                decoding_N=rows[~is_prompt_N],
                prompts=[req for req in begun if self._left_of_prompt(req) > 0],
            )
        return self._phases

    def _ready(self, decoding_N: Ints) -> Ints:
        """Return the rows whose newest token is known, or may be built on while it is under way."""
        if not self._steps:
            return decoding_N
        return decoding_N[~self._counters.waits(decoding_N, self._tokens_ahead)]

    @property
    def _tokens_ahead(self) -> int:
        """Steps of one request that may be under way: one while the head sees any."""
        return 1 if self._seen else self.limits.tokens_ahead

    def _running_rows(self) -> Ints:
        """Return the admitted requests' rows of the table, in order."""
        if self._rows is None:
            self._rows = np.array([req.row for req in self._running], dtype=np.int64)
        return self._rows

    def _membership_changed(self) -> None:
        """Note that a request was admitted, or is no longer."""
        self._rows = self._phases = None
        self._changes += 1
        self._groups.clear()

    def _add_prompts(self, step: StepBuilder, phases: Phases) -> None:
        """Add chunks of prompts beside what a step has: of those begun, then of others."""
        room = self._prompt_room(phases, taken=step.num_tokens)
        for req in self._prompts(phases.prompts):
            count = min(room, self._left_of_prompt(req), self.limits.row_tokens)
            count = self.tables.cut(req, count)
            if count == 0:
                continue  # found in the prefix cache but for its newest token, which decodes
            if not self._grow(req, req.num_computed + count, step):
                break
            if self._head_drafter is not None and self._head_drafter.rests:
                self._seen.discard(req.row)  # what it misses of a prompt it never gets
            step.add(req, count, [], wanted=0 if req.row in self._seen else -1)
            self._phases = None
            room -= count
            if room == 0:
                break

    def _prompt_room(self, phases: Phases, *, taken: int) -> int:
        """Return the tokens of prompts that a step takes, beside those it has."""
        limits, num_decoding, waiting = self.limits, len(phases.decoding_N), 0
        if not num_decoding and limits.num_stages > 1:
            waiting = sum(self._left_of_prompt(req) for req in phases.prompts)
            waiting += sum(req.num_tokens for req in self._waiting)
        most = limits.prompt_tokens_of_step(waiting=waiting, decoding=num_decoding)
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
        if self._tokens_ahead == 1 or not num_decoding:
            return False
        return self._steps >= self.limits.num_stages * self._tokens_ahead

    def _has_prompts(self, phases: Phases) -> bool:
        """Whether a step could have tokens of prompts."""
        return bool(phases.prompts) or (bool(self._waiting) and self._may_admit(self._waiting[0]))

    def _add_decoding(
        self, step: StepBuilder, decoding_N: Ints, *, plain: bool
    ) -> DraftRound | None:
        """Add the rows that decode next, oldest first; or begin a round of drafts for them.

        `plain`: without drafts, beside prompts, which have no place in a round of one step.

        Rows that decode are split evenly into as many groups as keep all stages at work. No row
        goes on from a token of the last such step while that is under way: stages would wait for
        each other, which another group's step between the two keeps at work.
        """
        table, num_groups = self._counters, self._num_groups(len(decoding_N))
        if self._decode_steps >= num_groups * self._tokens_ahead:
            return None
        ready_N = self._ready(decoding_N)
        size = -(-len(decoding_N) // num_groups)
        if num_groups > 1:
            free_N = (table.in_flight[ready_N] == 0) | (
                table.last_step[ready_N] != self._last_decode
            )
            ready_N = ready_N[free_N]
        if self._drafter is None:
            step.decoding_D = self._with_blocks(ready_N[:size], step)
            return None
        ready = [self._at_row[row] for row in ready_N.tolist()]
        ready = [req for req in ready if req.round is None]
        drafts, gamma = self._drafts(ready[:size], plain=plain)
        if self._decodes_plainly(drafts, gamma):
            rows = np.array([req.row for req, _, _ in drafts], dtype=np.int64)
            step.decoding_D = self._with_blocks(rows, step)
            return None
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

    def _num_groups(self, decoding: int) -> int:
        """Return into how many steps rows that decode are split."""
        limits = self.limits
        return max(-(-decoding // limits.decode_rows), min(limits.num_stages, decoding))

    def _with_blocks(self, group_D: Ints, step: StepBuilder) -> Ints:
        """Return the rows of a group that have the block of their next token, or could get it."""
        table = self._counters
        lack_D = table.num_computed[group_D] >= table.needs_blocks_at[group_D]
        lacking = lack_D.nonzero()[0].tolist()
        if not lacking:
            return group_D
        takes_D = np.ones(len(group_D), dtype=np.bool_)
        for place in lacking:
            req = self._at_row.get(int(group_D[place]))
            if req is not None:  # not preempted for one before it
                step.decoding_D = group_D[:place][takes_D[:place]]
                takes_D[place] = self._grow(req, req.num_computed + 1, step)
        return group_D[takes_D & (table.slot[group_D] >= 0)]

    def _drafts(
        self, group: Sequence[RunningRequest], *, plain: bool
    ) -> tuple[list[tuple[RunningRequest, int, list[int] | None]], int]:
        """Return how many tokens each row of a group drafts, and these; None if the model does.

        `plain`: none. And how many tokens the group drafts by the drafter, which the model's own
        head (MTP) will do for the next round.
        """
        drafter = None if plain else self._drafter
        drafted = [req.request for req in group if self._counts_as_drafted(req)]
        gamma = drafter.gamma(drafted) if drafter is not None and drafted else 0
        found: list[tuple[RunningRequest, int, list[int] | None]] = []
        for req in group:
            most = gamma if self._head_drafter is None else len(req.request.drafts)
            count = min(most, req.request.remaining - 1) if req.request.may_draft else 0
            drafts = drafter.propose(req.request, count) if drafter and count > 0 else []
            found.append((req, count if drafts is None else len(drafts), drafts))
        return found, gamma

    def _counts_as_drafted(self, req: RunningRequest) -> bool:
        """Whether the drafter is asked for a row: of those that its head lost, while that rests."""
        head = self._head_drafter
        if head is None or not req.request.may_draft:
            return req.request.may_draft
        return req.row in self._seen or head.rests

    def _decodes_plainly(
        self, drafts: Sequence[tuple[RunningRequest, int, list[int] | None]], gamma: int
    ) -> bool:
        """Whether the head (MTP) has no part in a group's rows.

        Where steps may run ahead of their tokens it loses all rows as it goes to rest: it would
        have to know these.
        """
        head, rows = self._head_drafter, {req.row for req, _, _ in drafts}
        if head is None or any(count for _, count, _ in drafts):
            return False
        if self.limits.tokens_ahead > 1 and head.rests and gamma == 0 and rows & self._seen:
            self._seen -= rows
            self._phases = None
        return bool(rows) and not rows & self._seen

    def _wanted(self, req: RunningRequest, gamma: int, count: int) -> int:
        """Return how many tokens the head is to draft behind a row with `count` drafts.

        No more than may follow, all of the row's accepted, and than the request's blocks hold.
        """
        if req.row not in self._seen:
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
        found = [(place, req.take_news()) for place, req in enumerate(reqs)]
        rows, table = np.array([req.row for req in reqs], dtype=np.int64), self._counters
        of = StepRequests.of([req.request for req in reqs])
        tokens = [req.drafts[-1] if drafted else req.newest for req in reqs]
        self._seq += 1
        self._steps += 1
        self._last_decode = self._seq
        self._rounds[self._seq] = round_
        return MicroBatch(
            seq=self._seq,
            kind=StepKind.DRAFT,
            of=of,
            sampling=of.sampling,
            rules_B=of.rules_B,
            slots_B=table.slot[rows],
            starts_B=table.num_computed[rows] + drafted,
            num_new_B=np.ones_like(rows),
            tokens_T=np.array(tokens, dtype=np.int64),
            sample_steps_B=table.num_sampled[rows] + drafted,
            news={place: news for place, news in found if news is not None},
            members_B=rows,
            arrivals_B=table.arrival[rows],
            admissions_B=table.admission[rows],
            changes=self._changes,
        )

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
            req.request.slot = self._counters.slot[req.row] = heappop(self._free_slots)
            insort(self._running, req)
            self._at_row[req.row] = req
            if self._head_drafter is not None and req.request.may_draft:
                self._seen.add(req.row)
            self._membership_changed()
            yield req

    def _may_admit(self, req: RunningRequest) -> bool:
        """Whether the first of the waiting requests may be admitted now."""
        if not self._free_slots or req.in_flight > 0:
            return False
        if not self._running:
            return True
        return self.tables.fits(req, self._running, self._running_rows())

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
            others = [
                other
                for other in self._running
                if other.blocks and other not in members and not step.has(other)
            ]
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
        del self._at_row[req.row]
        self._seen.discard(req.row)
        self._membership_changed()
        heappush(self._free_slots, req.request.slot)
        req.request.slot = self._counters.slot[req.row] = -1

    def _issue(self, kind: StepKind, step: StepBuilder) -> MicroBatch:
        """Return a step, its requests' counters moved on."""
        table, members_B, first = self._counters, step.decoding_D, len(step.decoding_D)
        tokens_T = table.newest[members_B]
        if self._steps:
            tokens_T = np.where(table.in_flight[members_B], PENDING_TOKEN, tokens_T)
        news, number = self._news_of(members_B), self._seq + 1
        if step.reqs:
            tokens, samples = self._chunks(step, news)
            members_B = _extended(members_B, [req.row for req in step.reqs])
            tokens_T = _extended(tokens_T, tokens)
        of, constants = self._group_of(members_B)
        counts_B = samples_B = constants.ones_B
        if step.reqs:
            counts_B = _extended(counts_B[:first], step.counts)
            samples_B = _extended(samples_B[:first], samples)
        if self.tables.saves:  # by the first row, which says them of others
            first_row = news.get(0) or self._at_row[int(members_B[0])].new_row()
            news[0] = replace(first_row, saves=tuple(self.tables.saves))
            self.tables.saves = []
        starts_B, sample_steps_B = table.issue(
            members_B, computed_B=counts_B, sampled_B=samples_B, step=number
        )
        self._seq = number
        self._steps += 1
        self._last_was_round = kind is StepKind.ROUND
        return MicroBatch(
            seq=number,
            kind=kind,
            of=of,
            sampling=of.sampling,
            rules_B=of.rules_B,
            slots_B=constants.slots_B,
            starts_B=starts_B,
            num_new_B=counts_B,
            tokens_T=tokens_T,
            sample_steps_B=sample_steps_B,
            news=news,
            num_decoding=first,
            members_B=members_B,
            arrivals_B=constants.arrivals_B,
            admissions_B=constants.admissions_B,
            changes=self._changes,
        )

    def _chunks(self, step: StepBuilder, news: dict[int, PagedRow]) -> tuple[list[int], list[bool]]:
        """Return the tokens of the rows that do more than decode, and which of these sample.

        What is to be said of them is added to the news.
        """
        tokens: list[int] = []
        samples: list[bool] = []
        parts = zip(step.reqs, step.counts, step.drafts, step.wanted, strict=True)
        for row, (req, count, drafts, wanted) in enumerate(parts, start=len(step.decoding_D)):
            end = req.num_computed + count
            known = end - len(drafts)
            tokens += [*req.tokens(end - count, known), *drafts]
            samples.append(known == req.num_tokens)
            saves = self.tables.snapshot(req, end) if self.limits.snapshots else -1
            found = req.take_news(
                samples=samples[-1], drafts=drafts, drafts_wanted=wanted, saves_state=saves
            )
            if found is not None:
                news[row] = found
            self._news_taken(req)
            req.request.drafts = []
        return tokens, samples

    def _group_of(self, members_B: Ints) -> tuple[StepRequests, RowConstants]:
        """Return what there is of rows of the table, found once for steps of the same rows."""
        key = members_B.tobytes()
        if key not in self._groups:
            requests = [self._at_row[row].request for row in members_B.tolist()]
            constants = self._counters.constants(members_B, _stop_ids(requests))
            self._groups[key] = StepRequests.of(requests), constants
        return self._groups[key]

    def _news_of(self, decoding_D: Ints) -> dict[int, PagedRow]:
        """Return what a step says of rows that decode, by their place in it."""
        found = {}
        for place in self._counters.has_news[decoding_D].nonzero()[0].tolist():
            req = self._at_row[int(decoding_D[place])]
            row = req.take_news()
            assert row is not None
            found[place] = row
            self._news_taken(req)
        return found

    def _news_taken(self, req: RunningRequest) -> None:
        """Let go what a request's first row has brought to the stages."""
        self.tables.state_loaded(req)
        if req.offloaded:
            self.tables.drop_offloaded(req)

    def _without_token(
        self, micro_batch: MicroBatch, tokens: Ints | Sequence[Sequence[int]]
    ) -> list[Request]:
        """End the requests for which no token could be chosen, and return them."""
        failed: list[Request] = []
        if isinstance(tokens, np.ndarray) and NOT_FINITE_TOKEN not in tokens:
            return failed
        for row, came in enumerate(tokens):
            if NOT_FINITE_TOKEN not in came:
                continue
            request, news = micro_batch.requests[row], micro_batch.news.get(row)
            there = self._counters.arrival[micro_batch.members_B[row]]
            if there == micro_batch.arrivals_B[row] and (news is None or news.samples):
                self._end(self._reqs[request.id], "error")
                failed.append(request)
        return failed

    def _take_decoded(
        self,
        micro_batch: MicroBatch,
        tokens: Ints | Sequence[Sequence[int]],
        finished: list[Request],
    ) -> None:
        """Take the tokens of the rows that only decode; add the requests that ended."""
        table, count = self._counters, micro_batch.num_decoding
        rows, outputs = micro_batch.members_B[:count], micro_batch.of.outputs
        tokens_D = np.array(tokens[:count], dtype=np.int64).reshape(count)
        steps_D, starts_D = micro_batch.sample_steps_B[:count], micro_batch.starts_B[:count]
        if micro_batch.changes == self._changes:
            constants, keeps_blocks_D = self._group_of(rows)[1], None
        else:  # requests of some may have ended since: a token too many
            there = np.flatnonzero(table.arrival[rows] == micro_batch.arrivals_B[:count])
            requests = [micro_batch.requests[place] for place in there.tolist()]
            outputs = [request.output for request in requests]
            rows, tokens_D = rows[there], tokens_D[there]
            steps_D, starts_D = steps_D[there], starts_D[there]
            constants = table.constants(rows, _stop_ids(requests))
            keeps_blocks_D = constants.admissions_B == micro_batch.admissions_B[:count][there]
            keeps_blocks_D &= constants.slots_B >= 0
        table.take(rows, tokens_D)
        new = tokens_D.tolist()
        self._hand_out(constants, outputs, new)
        fills_D = starts_D >= table.fills_block_at[rows]
        if keeps_blocks_D is not None:
            fills_D &= keeps_blocks_D
        for place in fills_D.nonzero()[0].tolist():
            self.tables.register(self._at_row[int(rows[place])], int(starts_D[place]) + 1)
        for place in constants.may_end(new, steps_D):
            req = self._req_at(int(rows[place]))
            reason = self._ends(req.request, int(steps_D[place]))
            if reason is not None:
                self._end(req, reason)
                finished.append(req.request)

    def _hand_out(self, of: RowConstants, outputs: list[list[int]], new: list[int]) -> None:
        """Put a token into each output, and keep those that are wanted as they come."""
        # By `map`, as a loop over hundreds of rows takes three times as long.
        deque(map(list.append, outputs, new), maxlen=0)
        self.generated_tokens += len(new)
        if of.numbers:
            if len(of.numbers) < len(new):
                new = [new[place] for place in of.published]
            self._new_tokens.append((of.numbers, new))
            self._of_streams |= of.streams

    def _req_at(self, row: int) -> RunningRequest:
        """Return the request of a row of the table, running or preempted since."""
        req = self._at_row.get(row)
        return req or next(waiting for waiting in self._waiting if waiting.row == row)

    def _take_chunks(
        self,
        micro_batch: MicroBatch,
        tokens: Ints | Sequence[Sequence[int]],
        finished: list[Request],
    ) -> None:
        """Take the tokens of the rows that do more than decode; add the requests that ended."""
        table, first = self._counters, micro_batch.num_decoding
        rows, ends = micro_batch.members_B, micro_batch.starts_B + micro_batch.num_new_B
        there_B = table.arrival[rows] == micro_batch.arrivals_B  # others ended meanwhile
        keeps_B = there_B & (micro_batch.admissions_B == table.admission[rows])
        keeps_B &= table.slot[rows] >= 0
        columns = (there_B, keeps_B, micro_batch.sample_steps_B, ends, table.fills_block_at[rows])
        lists = [column[first:].tolist() for column in columns]
        requests = micro_batch.requests[first:]
        numbers: list[int] = []
        published: list[int] = []
        places = enumerate(zip(requests, *lists, strict=True), start=first)
        for index, (request, there, keeps, place, end, fills_at) in places:
            if not there:
                continue
            req, row, reason = self._reqs[request.id], micro_batch.news.get(index), None
            drafts = () if row is None else row.drafts
            if row is None or row.samples:
                came = tokens[index]
                if self._drafter is not None and drafts:
                    self._drafter.observe(len(drafts), len(came) - 1)
                reason = self._append(req, came[: request.max_new - place])
                self.generated_tokens += len(request.output) - place
                end += len(request.output) - place - 1 - len(drafts)
                if request.stream or request.recorded:
                    published += request.output[place:]
                    numbers += [request.id] * (len(published) - len(numbers))
                    self._of_streams |= request.stream
            if keeps and drafts:
                req.num_computed = end
            if keeps and end > fills_at:
                self.tables.register(req, min(end, req.num_tokens))
            if reason is not None:
                self._end(req, reason)
                finished.append(request)
        if published:
            self._new_tokens.append((numbers, published))

    def _append(self, req: RunningRequest, new: Sequence[int]) -> FinishReason | None:
        """Put tokens into the output up to the first stop or the limit; why it ends, if it does."""
        request, reason = req.request, None
        for token in new:
            request.output.append(int(token))
            reason = self._ends(request, len(request.output) - 1)
            if reason is not None:
                break
        req.in_flight -= 1
        if len(new) > 1:
            req.num_sampled += len(new) - 1
        req.newest = request.output[-1]
        return reason

    def _ends(self, request: Request, index: int) -> FinishReason | None:
        """Return why a request ends with the newest token of its output, None if it does not."""
        if index + 1 > request.min_new:
            if request.output[index] in request.stop_ids:
                return "stop"
            ends_in_text = self._ends_in_stop_text if request.stop_texts else None
            if ends_in_text is not None and ends_in_text(request):
                return "stop"
        return "length" if index + 1 == request.max_new else None

    def _end(self, req: RunningRequest, reason: FinishReason) -> None:
        """Forget a request, its blocks free."""
        request = req.request
        request.finish_reason = reason
        del self._reqs[request.id]
        if request.slot >= 0:
            self._let_go(req)
        else:
            self._waiting.remove(req)
            self._waiting.sort()
        self.tables.forget(req)


def _stop_ids(requests: Sequence[Request]) -> frozenset[int]:
    """Return the tokens that end one of some requests, or several."""
    return frozenset().union(*{request.stop_ids for request in requests})


def _extended(values: Ints, more: Sequence[int]) -> Ints:
    """Return an array with more values behind its own."""
    others = np.array(more, dtype=np.int64)
    return np.concatenate((values, others)) if len(values) else others
