"""Decides the next micro-batch: which requests, which phase, which KV slots. Pure Python.

Continuous batching as in ORCA (OSDI 2022): a request joins as soon as a slot is free and leaves
the moment it ends. LLM-PQ's offline job is the special case of all requests present at the start:
prompts run in micro-batches of `prefill_microbatch`, tokens in micro-batches of
`decode_microbatch`, both from the plan, several in flight so that every stage has work.

The caller asks `next_micro_batch()` as often as it likes and reports each result, in the order the
micro-batches were issued, with `update_from_output()`. Knows nothing of devices, text or time.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from operator import attrgetter

from llmpq.runtime.drafts.drafter import Drafter
from llmpq.runtime.engine.slot_limits import SlotLimits
from llmpq.runtime.request import PENDING_TOKEN, FinishReason, MicroBatch, Request, Round, StepKind

MAX_PADDING, MAX_LARGE_PADDING = 0.3, 0.05
"""Prompts share a prefill micro-batch while at most this share of its tokens is padding: sharing
the reading of weights pays for it as long as there are few of them."""
LARGE_PREFILL = 1024
"""Tokens from which on a prefill takes what its tokens take, padding included."""


class SlotScheduler:
    """Continuous batching over the KV slots of a plan."""

    def __init__(
        self,
        limits: SlotLimits,
        *,
        drafter: Drafter | None = None,
        ends_in_stop_text: Callable[[Request], bool] | None = None,
    ) -> None:
        self.limits = limits
        self._drafter = drafter
        self._ends_in_stop_text = ends_in_stop_text
        self._waiting: deque[Request] = deque()
        self._ready: deque[Request] = deque()
        self._resumable: deque[Round] = deque()
        self._free_slots = list(range(limits.num_slots))
        self._seq = 0
        self._filling = True
        self._joining = 0
        self._rounds = 0
        self._rows_in_rounds = 0
        self._num_groups_started = self._fewest_rows = 0
        self._group_of: dict[int, int] = {}
        """Running request -> the group it decoded in last."""
        self.generated_tokens = 0
        """Tokens appended to all requests so far."""
        self.fused_rounds = False
        """Whether the device takes greedy rows' drafts and their verify as one step. Such rows are
        issued again before the tokens of the round before are known."""

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self.limits.num_slots - len(self._free_slots)

    @property
    def drafts(self) -> bool:
        """Whether requests may be drafted for."""
        return self._drafter is not None

    @property
    def drafts_in_vain(self) -> bool:
        """Whether drafts pay nowhere and none is half done, so that they may end."""
        return self._drafter is not None and self._drafter.in_vain and not self._resumable

    def end_drafts(self, *, runs_ahead: bool) -> None:
        """Draft no more; no step may be under way."""
        self._drafter, self.fused_rounds = None, False

    @property
    def idle(self) -> bool:
        """Whether every submitted request has ended."""
        return not self._waiting and self.num_running == 0

    def gauges(self) -> dict[str, int]:
        """Return nothing: slots say all there is."""
        return {}

    def submit(self, request: Request) -> None:
        """Queue a request behind those of its priority; `ValueError` if it can never run.

        An answer that has begun elsewhere is generated again: a slot has room for a prompt of the
        plan's length, not for a prompt and half an answer.
        """
        self.limits.check(request)
        request.output.clear()
        if self._waiting and request.priority < self._waiting[-1].priority:
            insort(self._waiting, request, key=attrgetter("priority"))
        else:
            self._waiting.append(request)

    def abort(self, request: Request) -> bool:
        """End a request; return whether it has ended.

        If not, it ends when the step that is under way for it completes.
        """
        if request.finish_reason is not None:
            return False
        request.aborted = True
        if request in self._waiting:
            self._waiting.remove(request)
            request.finish_reason = "abort"
        elif request.in_flight == 0 and request in self._ready:
            self._ready.remove(request)
            self._end(request, "abort")
        return request.finish_reason is not None

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next unit of work, or None until another one completes."""
        if self._resumable:
            return self._continue_round(self._resumable.popleft())
        if self._waiting and self._may_refill():
            return self._prefill()
        size = self._decode_group_size()
        if size == 0:
            return None
        group = self._take(size)
        group.sort(key=lambda request: request.slot)  # neighbouring slots are read in place
        return self._start_round(group)

    def update_from_output(
        self, micro_batch: MicroBatch, tokens: Sequence[Sequence[int]]
    ) -> list[Request]:
        """Take the new tokens of each row; return the requests that ended, their slots free."""
        round_ = micro_batch.round
        if micro_batch.kind is StepKind.ROUND:
            return self._complete_whole(micro_batch, tokens)
        if micro_batch.kind is StepKind.DRAFT:
            assert round_ is not None
            for request, drafted in zip(micro_batch.requests, tokens, strict=True):
                request.drafts.extend(drafted)
            round_.drafts_done += 1
            self._resumable.append(round_)
            return []
        if round_ is None:
            self._joining -= len(micro_batch.requests)
        else:
            self._rounds -= 1
            self._rows_in_rounds -= len(round_.requests)
        finished = []
        for request, new in zip(micro_batch.requests, tokens, strict=True):
            if micro_batch.kind is StepKind.VERIFY and self._drafter is not None:
                self._drafter.observe(len(request.drafts), len(new) - 1)
            request.drafts.clear()
            if self._append(request, new):
                finished.append(request)
            else:
                self._ready.append(request)
        return finished

    def _complete_whole(
        self, micro_batch: MicroBatch, tokens: Sequence[Sequence[int]]
    ) -> list[Request]:
        """Take the tokens of a round in one step; rows that ended meanwhile brought nothing."""
        assert micro_batch.round is not None
        finished = []
        for request, new in zip(micro_batch.requests, tokens, strict=True):
            request.in_flight -= 1
            if request.finish_reason is not None:
                continue
            drafted = min(micro_batch.round.gamma, request.remaining - 1)
            if self._drafter is not None:
                self._drafter.observe(drafted, min(len(new) - 1, drafted))
            if self._append(request, new):
                finished.append(request)
                with suppress(ValueError):
                    self._ready.remove(request)
        return finished

    def _may_refill(self) -> bool:
        if self.limits.batching == "static":
            self._filling = self._filling or self.num_running == 0
            return self._filling and bool(self._free_slots)
        return bool(self._free_slots)

    def _prefill(self) -> MicroBatch:
        """Take waiting requests in order while slots, the plan's size and padding allow."""
        group: list[Request] = []
        longest = total = 0
        while self._waiting and self._free_slots and len(group) < self.limits.prefill_microbatch:
            length = len(self._waiting[0].prompt)
            longest, total = max(longest, length), total + length
            padded = longest * (len(group) + 1)
            allowed = MAX_LARGE_PADDING if padded > LARGE_PREFILL else MAX_PADDING
            if group and total < (1 - allowed) * padded:
                break
            request = self._waiting.popleft()
            request.slot = heappop(self._free_slots)
            group.append(request)
        self._joining += len(group)
        return self._issue(
            StepKind.PREFILL, group, [0] * len(group), [list(r.prompt) for r in group], None
        )

    def _decode_group_size(self) -> int:
        """Return how many ready requests decode next; 0 to wait for others to join them.

        The requests that can decode are split evenly, and no more groups than that are in flight,
        so that groups that shrink merge.
        """
        ready = len(self._ready)
        decodable = ready + self._rows_in_rounds + self._joining
        num_groups = self._num_groups(decodable)
        if ready == 0 or self._rounds >= num_groups:
            return 0
        size, self._fewest_rows = -(-decodable // num_groups), decodable // num_groups
        # Before the first tokens of a batch, or where they would double the group, prompts in
        # flight are worth waiting for: a smaller group costs a whole step of its own.
        fresh = all(len(request.output) == 1 for request in self._ready)
        if ready < size and self._joining > 0 and (fresh or self._joining >= ready):
            return 0
        return min(ready, size)

    def _num_groups(self, decodable: int) -> int:
        """Return into how many groups the decoding requests are split.

        As few as the plan's micro-batch allows; but where the plan keeps several stages at work
        with a full batch, fewer requests go on doing so: D groups of v/D take no longer than one
        group of v that visits D stages in turn.
        """
        limits = self.limits
        planned = -(-limits.num_slots // limits.decode_microbatch)
        at_work = min(limits.num_stages, planned, decodable)
        return max(-(-decodable // limits.decode_microbatch), at_work)

    def _take(self, size: int) -> list[Request]:
        """Take the next rows to decode; those that are drafted for do not mix with others."""
        first = self._ready[0]
        alone = all(self._drafted_like(first, request) for request in self._ready)
        if alone and not self.fused_rounds:
            return self._take_together(size)
        alike: list[Request] = []
        others: deque[Request] = deque()
        for request in self._ready:
            joins = self._drafted_like(first, request) and len(alike) < size
            (alike if joins else others).append(request)
        self._ready = others
        return alike

    def _drafted_like(self, one: Request, other: Request) -> bool:
        """Whether two requests may decode in one group."""
        if self.fused_rounds and one.drafts_plainly != other.drafts_plainly:
            return False
        return self._drafter is None or one.may_draft == other.may_draft

    def _take_together(self, size: int) -> list[Request]:
        """Take rows that decoded together last, where an even split allows.

        A row of the group issued last would make the whole group wait for that group's tokens.
        """
        group = [self._ready.popleft()]
        together = self._group_of.get(group[0].id)
        while len(group) < size:
            joins = self._group_of.get(self._ready[0].id) == together
            if not joins and len(group) >= self._fewest_rows:
                break
            group.append(self._ready.popleft())
        return group

    def _start_round(self, requests: list[Request]) -> MicroBatch:
        self._filling = False
        self._num_groups_started += 1
        self._group_of |= {request.id: self._num_groups_started for request in requests}
        gamma = 0
        if self._drafter is not None and all(request.may_draft for request in requests):
            gamma = self._drafter.gamma(requests)
        if self.fused_rounds and requests[0].drafts_plainly:
            return self._start_whole_round(Round(requests, gamma, drafts_done=gamma))
        gamma = min(gamma, max(request.remaining for request in requests) - 1)
        round_ = Round(requests, gamma)
        self._rounds += 1
        self._rows_in_rounds += len(requests)
        if gamma > 0 and self._drafter is not None:
            self._propose(round_, self._drafter)
        return self._continue_round(round_)

    def _start_whole_round(self, round_: Round) -> MicroBatch:
        """Issue drafts and verify as one step; rows with another round behind may follow at once.

        A row whose rounds under way bring all its tokens, one each at least, is not issued again.
        """
        tokens, starts = [], []
        for request in round_.requests:
            known = request.in_flight == 0
            tokens.append([request.output[-1] if known else PENDING_TOKEN])
            starts.append(request.num_cached if known else PENDING_TOKEN)
            request.in_flight += 1
            if request.remaining > request.in_flight:
                self._ready.append(request)
        return self._issue(StepKind.ROUND, round_.requests, starts, tokens, round_)

    def _propose(self, round_: Round, drafter: Drafter) -> None:
        """Take drafts that need no model; a group without any decodes plainly."""
        modelless = False
        for request in round_.requests:
            proposed = drafter.propose(request, min(round_.gamma, request.remaining - 1))
            if proposed is not None:
                modelless = True
                request.drafts.extend(proposed)
        if modelless:
            round_.gamma = max(len(request.drafts) for request in round_.requests)
            round_.drafts_done = round_.gamma

    def _continue_round(self, round_: Round) -> MicroBatch:
        kind, requests = round_.next_kind, round_.requests
        if kind is StepKind.DRAFT:
            requests = [r for r in requests if r.remaining - 1 > round_.drafts_done]
            tokens = [[r.drafts[-1] if r.drafts else r.output[-1]] for r in requests]
            starts = [r.num_cached + round_.drafts_done for r in requests]
        else:
            tokens = [[r.output[-1], *r.drafts] for r in requests]
            starts = [r.num_cached for r in requests]
        return self._issue(kind, requests, starts, tokens, round_)

    def _issue(
        self,
        kind: StepKind,
        requests: list[Request],
        starts: list[int],
        tokens: list[list[int]],
        round_: Round | None,
    ) -> MicroBatch:
        self._seq += 1
        return MicroBatch(self._seq, kind, requests, starts, tokens, round_)

    def _append(self, request: Request, new: Sequence[int]) -> bool:
        """Append tokens up to the first stop or the limit; free the slot if the request ended."""
        if request.aborted:
            self._end(request, "abort")
            return True
        for token in new:
            request.output.append(token)
            self.generated_tokens += 1
            if len(request.output) > request.min_new and (
                token in request.stop_ids
                or (
                    request.stop_texts
                    and self._ends_in_stop_text is not None
                    and self._ends_in_stop_text(request)
                )
            ):
                self._end(request, "stop")
                return True
            if request.remaining == 0:
                self._end(request, "length")
                return True
        return False

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Free the slot of a running request."""
        request.finish_reason = reason
        self._group_of.pop(request.id, None)
        heappush(self._free_slots, request.slot)
        request.slot = -1
