"""Block tables of running requests, and the prefix cache over them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmpq.runtime.engine.block_pool import BlockPool, PrefixKeys, StateSnapshots, chain_root
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.request_table import NEVER, RequestTable
from llmpq.runtime.engine.window_tables import WindowTable, WindowTables
from llmpq.runtime.requests.request import Ints, PagedRow, Request
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, pool_blocks

WATERMARK = 0.01
"""Share of the pool that stays free when a request is admitted beside others."""


class _Counter:
    """An attribute of a request that stands in its row of the table."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, req: RunningRequest, owner: type) -> int:
        return int(getattr(req.table, self._name)[req.row])

    def __set__(self, req: RunningRequest, value: int) -> None:
        getattr(req.table, self._name)[req.row] = value


@dataclass(eq=False)
class RunningRequest:
    """A request, its block table and how far it has come."""

    num_computed = _Counter()
    num_sampled = _Counter()
    in_flight = _Counter()
    newest = _Counter()
    last_step = _Counter()
    admission = _Counter()
    """As `RequestTable` says."""

    request: Request
    order: tuple[int, int]
    """Lower runs first: priority, then arrival."""
    keys: PrefixKeys
    table: RequestTable
    row: int
    """Its row of the table."""
    blocks: list[int] = field(default_factory=list)
    window: WindowTable = field(default_factory=WindowTable)
    """Its blocks of the layers with a window, where those have a pool of their own."""
    num_sent: int = 0
    """Blocks of the table that were sent to the stages."""
    num_registered: int = 0
    resumes: bool = False
    offloaded: list[int] = field(default_factory=list)
    """Host slots that hold its first blocks since it was preempted."""
    num_offloaded: int = 0
    """Tokens in these."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, block) pairs to copy back with its next row."""
    load_state: int = -1
    """The snapshot of recurrent states that it begins from, until it has; -1: none."""
    snapshot_at: int = 0
    """Tokens behind which its recurrent state is kept; 0: nowhere."""
    round: DraftRound | None = None
    """The round of drafts by the model that it is in."""
    num_to_draft: int = 0
    """Tokens that the model drafts for it in that round."""
    drafts: list[int] = field(default_factory=list)
    """Those of them that are there."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        request = self.request
        return len(request.prompt) + len(request.output)

    @property
    def remaining(self) -> int:
        """Tokens that are there to be computed."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, end: int) -> list[int]:
        """Return a range of its tokens."""
        prompt, output = self.request.prompt, self.request.output
        split = len(prompt)
        if start >= split:
            return output[start - split : end - split]
        return [*prompt[start:end], *output[max(0, start - split) : max(0, end - split)]]

    @property
    def longest(self) -> int:
        """How many of its tokens are ever cached."""
        return len(self.request.prompt) + self.request.max_new - 1

    def take_news(
        self,
        *,
        samples: bool = True,
        drafts: Sequence[int] = (),
        drafts_wanted: int = -1,
        saves_state: int = -1,
    ) -> PagedRow | None:
        """Return what a step says of its row, and of blocks that stages do not have yet.

        None where there is nothing to say but its tokens. See `PagedRow`.
        """
        if not self.table.has_news[self.row]:
            if samples and not drafts and drafts_wanted < 0 and saves_state < 0:
                return None
            row = self.new_row()
        else:
            row = self.new_row()
            _, row.new_window_blocks = self.window.take_unsent()
            row.new_blocks = tuple(self.blocks[self.num_sent :])
            row.resumes, row.loads = self.resumes, tuple(self.loads)
            row.loads_state = self.load_state
            self.num_sent, self.resumes = len(self.blocks), False
            self.table.has_news[self.row] = False
        row.samples, row.drafts = samples, tuple(drafts)
        row.drafts_wanted, row.saves_state = drafts_wanted, saves_state
        return row

    def new_row(self) -> PagedRow:
        """Return a row of a step that says nothing."""
        return PagedRow(
            slot=self.request.slot,
            first_block=self.num_sent,
            first_window_block=self.window.num_sent,
        )

    def __lt__(self, other: RunningRequest) -> bool:
        return self.order < other.order


@dataclass(eq=False)
class DraftRound:
    """Decoding requests that the model drafts for: a step for each draft, then their verify."""

    members: list[RunningRequest] = field(default_factory=list)
    num_drafted: int = 0

    def add(self, req: RunningRequest, num_to_draft: int) -> None:
        """Take in a request that is to get so many drafts."""
        self.members.append(req)
        req.round, req.num_to_draft, req.drafts = self, num_to_draft, []

    def remove(self, req: RunningRequest) -> None:
        """Let a request go, its drafts lost."""
        self.members.remove(req)
        req.round, req.num_to_draft, req.drafts = None, 0, []

    @property
    def drafting(self) -> list[RunningRequest]:
        """Members that the next step drafts for; none when all of them can be verified."""
        return [req for req in self.members if req.num_to_draft > self.num_drafted]


class BlockTables:
    """Allocates blocks to requests and frees them: of one pool, or of one for each kind of layer.

    A request has what it needs of both pools or waits.
    """

    def __init__(self, limits: PoolLimits, salt: str) -> None:
        self.pool, self._limits = BlockPool(limits.num_blocks), limits
        self.counters = RequestTable()
        """Of all requests."""
        self._plain = limits.tail == 0
        self._most_of_running = 0
        """Blocks that the running requests may come to hold."""
        self._root = chain_root(limits.kv.value, salt)
        self._watermark = max(1, int(WATERMARK * limits.num_blocks))
        self.windows = WindowTables(limits, self._watermark) if limits.window else None
        """Of the layers with a window; None where all layers share the pool."""
        self.snapshots = StateSnapshots(limits.snapshots)
        """Of recurrent layers, behind blocks of prefixes."""
        self._free_host_slots = list(range(limits.host_blocks))
        """Host slots that hold no block."""
        self.saves: list[tuple[int, int]] = []
        """(block, host slot) pairs to offload with the next step."""
        self.prefix_queries = self.prefix_hits = 0
        """Tokens of admitted prompts, and how many of them the prefix cache had."""

    def forget_prefixes(self) -> None:
        """Find nothing for requests to come of what was computed up to now.

        Requests under way go on; their blocks and the cached ones are evicted as others are.
        """
        self._root = chain_root(self._root, "reset")

    def new_request(self, request: Request, arrival: int) -> RunningRequest:
        """Return a request without blocks."""
        own, table = request.cache_salt, self.counters
        root = self._root if own is None else chain_root(self._root, own)
        keys = PrefixKeys(root, tail=self._limits.tail)
        row = table.add(
            arrival=arrival,
            number=request.id,
            num_prompt=len(request.prompt),
            max_new=request.max_new,
        )
        table.num_sampled[row] = len(request.output)
        table.newest[row] = request.output[-1] if request.output else -1
        table.ends_in_text[row] = bool(request.stop_texts)
        table.publishes[row] = request.stream or request.recorded
        table.streams[row] = request.stream
        return RunningRequest(request, (request.priority, arrival), keys, table, row)

    def blocks(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return pool_blocks(self._limits.kv, tokens)

    def holds(self, req: RunningRequest, tokens: int) -> bool:
        """Whether a request has the blocks of so many tokens, and none to give back."""
        return self.windows is None and self.blocks(tokens) <= len(req.blocks)

    def hold_more(self, rows: Ints, tokens: int) -> bool:
        """Whether there are blocks for so many more tokens of each of some requests.

        `rows`: theirs in the table. Not said where layers with a window have a pool of their own.
        """
        if self.windows is not None:
            return False
        table = self.counters
        behind = np.maximum(0, table.num_computed[rows] + tokens - self._reach(0))
        lacks = -(-behind // BLOCK_TOKENS) - table.num_blocks[rows]
        return int(np.maximum(0, lacks).sum()) <= self.pool.num_available

    def lacks(self, req: RunningRequest, tokens: int) -> int:
        """Return how many blocks more than are available a request of so many tokens needs."""
        lacks = self.blocks(tokens) - len(req.blocks) - self.pool.num_available
        return max(lacks, self.windows.lacks(req.window, tokens)) if self.windows else lacks

    def pass_windows(self, req: RunningRequest) -> None:
        """Give back the blocks that a request's next tokens do not see through a window."""
        if self.windows:
            self.windows.pass_by(req.window, req.num_computed)
            self._note_blocks(req)

    def grow(self, req: RunningRequest, tokens: int) -> None:
        """Give a request the blocks of so many tokens."""
        needed = self.blocks(tokens) - len(req.blocks)
        if needed > 0:
            req.blocks += self.pool.take(needed)
        if self.windows:
            self.windows.grow(req.window, tokens)
        self._note_blocks(req)

    def _note_blocks(self, req: RunningRequest) -> None:
        """Enter in the table how far a request's blocks reach, and whether stages lack some."""
        table, row = self.counters, req.row
        table.num_blocks[row] = len(req.blocks)
        reach = self._reach(len(req.blocks))
        if self.windows:
            reach = min(reach, self._reach(req.window.end), self.windows.passes_at(req.window))
        table.needs_blocks_at[row] = reach
        if len(req.blocks) > req.num_sent or req.window.end > req.window.num_sent:
            table.has_news[row] = True

    def _reach(self, num_blocks: int) -> int:
        """Return how many tokens go with so many blocks: of packed ones some are in a ring."""
        behind = 0 if self._plain else BLOCK_TOKENS + HOLDBACK_TOKENS
        return num_blocks * BLOCK_TOKENS + behind

    def fits(self, req: RunningRequest, running: Sequence[RunningRequest], rows: Ints) -> bool:
        """Whether all that a request is now fits above the watermark.

        Blocks that admitted prompts have yet to take do not count as free. The watermark is room to
        grow; without it where all requests fit at their longest. `rows`: the running ones' in the
        table.
        """
        whole = self._most(req) + self._most_of_running <= self.pool.num_blocks
        if whole and self.windows is None:
            return True
        hits = self._found(req)
        if self.windows and not self.windows.fits(
            [(s.window, s.num_tokens, s.longest) for s in running],
            num_tokens=req.num_tokens,
            longest=req.longest,
            keys=self._keys(req)[: len(hits)],
        ):
            return False
        if whole:
            return True
        needed = self.blocks(req.num_tokens) - len(hits) + self.pool.num_unheld(hits)
        table = self.counters
        tokens = table.num_tokens(rows, self._limits.tokens_ahead)
        behind = self._reach(0)
        lacks = -(-np.maximum(0, tokens - behind) // BLOCK_TOKENS) - table.num_blocks[rows]
        promised = int(np.maximum(0, lacks).sum())
        return self.pool.num_available - promised - self._watermark >= needed

    def begin(self, req: RunningRequest) -> None:
        """Give a request the blocks that hold its first tokens already."""
        hits = self._found(req)
        self.pool.share(hits)
        if self.windows:
            self.windows.begin(req.window, self._keys(req)[: len(hits)])
        req.blocks, req.num_sent, req.num_registered = hits, 0, len(hits)
        req.num_computed = len(hits) * BLOCK_TOKENS + self._limits.tail if hits else 0
        req.resumes = bool(hits)
        if self._limits.snapshots:
            if hits:
                req.load_state = self.snapshots.pin(self._keys(req)[len(hits) - 1])
            at = (req.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            req.snapshot_at = at if self._limits.prefix_cache else 0
        if req.num_offloaded > req.num_computed:
            rest = self.pool.take(self.blocks(req.num_offloaded) - len(hits))
            req.loads = list(zip(req.offloaded[len(hits) :], rest, strict=True))
            req.blocks = [*hits, *rest]
            req.num_computed = req.num_offloaded
        self._most_of_running += self._most(req)
        self.counters.has_news[req.row] = True
        self._note_blocks(req)
        self._note_registered(req)
        if req.admission == 0:
            req.request.num_prefix_hits = req.num_computed
            self.prefix_queries += len(req.request.prompt)
            self.prefix_hits += req.num_computed
        req.admission += 1

    def cut(self, req: RunningRequest, count: int) -> int:
        """Return how many of the next tokens go together: none beyond where its state is kept."""
        ahead = req.snapshot_at - req.num_computed
        return ahead if 0 < ahead < count else count

    def snapshot(self, req: RunningRequest, end: int) -> int:
        """Return the snapshot that a row up to `end` fills, -1 for none."""
        if not req.snapshot_at or end != req.snapshot_at:
            return -1
        key = req.keys.upto(req.tokens, end, end // BLOCK_TOKENS)[-1]
        return self.snapshots.take(key, is_cached=lambda own: bool(self.pool.find([own])))

    def state_loaded(self, req: RunningRequest) -> None:
        """Let the snapshot go that a request begins from."""
        if req.load_state >= 0:
            self.snapshots.unpin(req.load_state)
            req.load_state = -1

    def release(self, req: RunningRequest) -> None:
        """Take all blocks of a request."""
        self.state_loaded(req)
        self.pool.release(req.blocks)
        if self.windows:
            self.windows.release(req.window)
        req.blocks, req.num_computed = [], 0
        self.counters.num_blocks[req.row] = 0
        self._most_of_running -= self._most(req)

    def forget(self, req: RunningRequest) -> None:
        """Drop a request that has ended and holds nothing."""
        self.drop_offloaded(req)
        self.counters.remove(req.row)

    def offload(self, req: RunningRequest) -> None:
        """Offload a request's blocks to the hosts, if they have room, before it is released."""
        if req.loads:  # not copied back yet: hosts still have them
            req.loads = []
            return
        self.drop_offloaded(req)
        count = self.blocks(req.num_computed)
        if 0 < count <= len(self._free_host_slots):
            req.offloaded, req.num_offloaded = self._free_host_slots[:count], req.num_computed
            del self._free_host_slots[:count]
            self.saves += zip(req.blocks, req.offloaded, strict=False)

    def drop_offloaded(self, req: RunningRequest) -> None:
        """Free the host slots of a request."""
        self._free_host_slots += req.offloaded
        req.offloaded, req.num_offloaded, req.loads = [], 0, []

    def _note_registered(self, req: RunningRequest) -> None:
        """Enter in the table which token fills a block that others cannot find yet."""
        end = (req.num_registered + 1) * BLOCK_TOKENS + self._limits.tail
        self.counters.fills_block_at[req.row] = end - 1 if self._limits.prefix_cache else NEVER

    def register(self, req: RunningRequest, end: int) -> None:
        """Enter the blocks that the tokens before `end` fill into the prefix cache."""
        if end <= self.counters.fills_block_at[req.row]:
            return
        count = (end - self._limits.tail) // BLOCK_TOKENS
        keys = req.keys.upto(req.tokens, end, count)
        for index in range(req.num_registered, len(keys)):
            self.pool.register(req.blocks[index], keys[index])
        req.num_registered = len(keys)
        self._note_registered(req)
        if self.windows:
            self.windows.register(req.window, keys)

    def check(self, reqs: Iterable[RunningRequest]) -> None:
        """Raise `AssertionError` if a block is lost, owned twice or held for nothing; for tests."""
        several = list(reqs)
        numbers = [number for req in several for number in req.offloaded] + self._free_host_slots
        assert sorted(numbers) == list(range(self._limits.host_blocks)), "a host slot is lost"
        self.pool.check(req.blocks for req in several)
        self.snapshots.check()
        table = self.counters
        assert sorted(req.row for req in several) == np.flatnonzero(table.arrival >= 0).tolist()
        for req in several:
            assert table.num_blocks[req.row] == len(req.blocks)
            assert table.slot[req.row] == req.request.slot
            assert req.num_sampled - req.in_flight == len(req.request.output)
        if self.windows:
            self.windows.check((req.window, req.num_computed) for req in several)
        for req in several:
            # A row of drafts may have a block that its accepted tokens do not reach.
            most = self.blocks(req.num_tokens + HOLDBACK_TOKENS)
            assert self.blocks(req.num_computed) <= len(req.blocks) <= most

    def _most(self, req: RunningRequest) -> int:
        """Return how many blocks a request may come to hold."""
        return self.blocks(req.longest)

    def _found(self, req: RunningRequest) -> list[int]:
        """Return the cached blocks that a request can start from; a token is left to compute."""
        rules = req.request.rules
        if not self._limits.prefix_cache or (rules and rules.prompt_logprobs is not None):
            return []  # whose tokens are all to be scored has to compute them
        hits = self.pool.find(self._keys(req))
        if self._limits.snapshots:
            keys = self._keys(req)
            while hits and keys[len(hits) - 1] not in self.snapshots:
                hits.pop()
        if self.windows and hits:
            del hits[self.windows.usable(self._keys(req)[: len(hits)]) :]
        return hits

    def _keys(self, req: RunningRequest) -> list[bytes]:
        """Return the keys of the blocks that a request could start from, all of them found."""
        most = (req.num_tokens - 1 - self._limits.tail) // BLOCK_TOKENS
        return req.keys.upto(req.tokens, req.num_tokens, max(0, most))
