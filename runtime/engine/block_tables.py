"""Requests over a pool of blocks: what each holds, and what of it others can find. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmpq.runtime.engine.block_pool import BlockPool
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.prefix_keys import PrefixKeys, chain_root
from llmpq.runtime.engine.window_tables import WindowTable, WindowTables
from llmpq.runtime.request import PagedRow, Request
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, pool_blocks

WATERMARK = 0.01
"""Share of the pool that stays free when a request is let in beside others."""


@dataclass(eq=False)
class Holder:
    """A request and what it holds."""

    request: Request
    order: tuple[int, int]
    """Lower runs first: priority, then arrival."""
    keys: PrefixKeys
    blocks: list[int] = field(default_factory=list)
    window: WindowTable = field(default_factory=WindowTable)
    """Its blocks of the layers with a window, where those have a pool of their own."""
    num_told: int = 0
    """Blocks of the table that stages know."""
    num_registered: int = 0
    num_computed: int = 0
    """Tokens whose KV has been issued."""
    num_sampled: int = 0
    """Tokens of the output that were asked for."""
    in_flight: int = 0
    """Of these, how many are not known yet."""
    last_step: int = 0
    """Number of the step it was in last."""
    admission: int = 0
    """How often it was let in."""
    resumes: bool = False
    kept: list[int] = field(default_factory=list)
    """Under which numbers hosts keep its first blocks, since it was preempted."""
    num_kept: int = 0
    """Tokens of these."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Numbers of `kept` and the blocks that they are to go to with its next row."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        request = self.request
        return len(request.prompt) + len(request.output)

    @property
    def remaining(self) -> int:
        """Tokens that are there to be computed."""
        request = self.request
        return len(request.prompt) + len(request.output) - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether it has nothing left to compute but its newest token."""
        return self.remaining <= 1 and self.num_sampled > 0

    def tokens(self, start: int, end: int) -> list[int]:
        """Return a range of its tokens."""
        prompt, output = self.request.prompt, self.request.output
        split = len(prompt)
        if start >= split:
            return output[start - split : end - split]
        return [*prompt[start:end], *output[max(0, start - split) : max(0, end - split)]]

    def row(self, *, samples: bool, drafts: Sequence[int]) -> PagedRow:
        """Return what a step says of it, and count its blocks as told."""
        first_window_block, new_window_blocks = self.window.tell()
        row = PagedRow(
            slot=self.request.slot,
            samples=samples,
            drafts=tuple(drafts) if drafts else (),
            first_block=self.num_told,
            new_blocks=tuple(self.blocks[self.num_told :]),
            first_window_block=first_window_block,
            new_window_blocks=new_window_blocks,
            resumes=self.resumes,
            loads=tuple(self.loads),
            sample_step=self.num_sampled,
            admission=self.admission,
        )
        self.num_told, self.resumes = len(self.blocks), False
        return row

    def __lt__(self, other: Holder) -> bool:
        return self.order < other.order


class BlockTables:
    """Gives blocks to requests and takes them back: of one pool, or of one for each kind of layer.

    A request has what it needs of both pools or waits.
    """

    def __init__(self, limits: PoolLimits, salt: str) -> None:
        self.pool, self._limits = BlockPool(limits.num_blocks), limits
        self._plain = limits.tail == 0
        self._root = chain_root(limits.kv.value, salt)
        self._watermark = max(1, int(WATERMARK * limits.num_blocks))
        self.windows = WindowTables(limits, self._watermark) if limits.window else None
        """Of the layers with a window; None where all layers share the pool."""
        self._free_numbers = list(range(limits.host_blocks))
        """Under which hosts keep nothing."""
        self.saves: list[tuple[int, int]] = []
        """Blocks and numbers, that stages are to be told with the next step."""
        self.prefix_queries = self.prefix_hits = 0
        """Tokens of prompts let in, and how many of them were found in the prefix cache."""

    def holder(self, request: Request, arrival: int) -> Holder:
        """Return a request that holds nothing yet."""
        own = request.cache_salt
        root = self._root if own is None else chain_root(self._root, own)
        keys = PrefixKeys(root, tail=self._limits.tail)
        return Holder(request, (request.priority, arrival), keys)

    def blocks(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return pool_blocks(self._limits.kv, tokens)

    def holds(self, holder: Holder, tokens: int) -> bool:
        """Whether a request has the blocks of so many tokens, and none to give back."""
        return self.windows is None and self.blocks(tokens) <= len(holder.blocks)

    def lacks(self, holder: Holder, tokens: int) -> int:
        """Return how many blocks more than are available a request of so many tokens needs."""
        lacks = self.blocks(tokens) - len(holder.blocks) - self.pool.num_available
        return max(lacks, self.windows.lacks(holder.window, tokens)) if self.windows else lacks

    def pass_windows(self, holder: Holder) -> None:
        """Give back the blocks that a request's next tokens do not see through a window."""
        if self.windows:
            self.windows.pass_by(holder.window, holder.num_computed)

    def grow(self, holder: Holder, tokens: int) -> None:
        """Give a request the blocks of so many tokens."""
        needed = self.blocks(tokens) - len(holder.blocks)
        if needed > 0:
            holder.blocks += self.pool.take(needed)
        if self.windows:
            self.windows.grow(holder.window, tokens)

    def fits(self, holder: Holder, running: Sequence[Holder]) -> bool:
        """Whether all that a request is now fits above the watermark.

        What prompts that were let in have yet to take is not counted as free. The watermark is for
        growth that may not fit: where all may grow to their limits, none is kept.
        """
        whole = self._most(holder) + sum(map(self._most, running)) <= self.pool.num_blocks
        if whole and self.windows is None:
            return True
        hits = self._found(holder)
        if self.windows and not self.windows.fits(
            [(s.window, s.num_tokens, _longest(s)) for s in running],
            num_tokens=holder.num_tokens,
            longest=_longest(holder),
            keys=self._keys(holder)[: len(hits)],
        ):
            return False
        if whole:
            return True
        needed = self.blocks(holder.num_tokens) - len(hits) + self.pool.num_unheld(hits)
        promised = sum(max(0, self.blocks(s.num_tokens) - len(s.blocks)) for s in running)
        return self.pool.num_available - promised - self._watermark >= needed

    def begin(self, holder: Holder) -> None:
        """Give a request the blocks that hold its first tokens already."""
        hits = self._found(holder)
        self.pool.share(hits)
        if self.windows:
            self.windows.begin(holder.window, self._keys(holder)[: len(hits)])
        holder.blocks, holder.num_told, holder.num_registered = hits, 0, len(hits)
        holder.num_computed = len(hits) * BLOCK_TOKENS + self._limits.tail if hits else 0
        holder.resumes = bool(hits)
        if holder.num_kept > holder.num_computed:
            rest = self.pool.take(self.blocks(holder.num_kept) - len(hits))
            holder.loads = list(zip(holder.kept[len(hits) :], rest, strict=True))
            holder.blocks = [*hits, *rest]
            holder.num_computed = holder.num_kept
        if holder.admission == 0:
            holder.request.num_prefix_hits = holder.num_computed
            self.prefix_queries += len(holder.request.prompt)
            self.prefix_hits += holder.num_computed
        holder.admission += 1

    def release(self, holder: Holder) -> None:
        """Take all blocks of a request."""
        self.pool.release(holder.blocks)
        if self.windows:
            self.windows.release(holder.window)
        holder.blocks, holder.num_computed = [], 0

    def keep(self, holder: Holder) -> None:
        """Have hosts keep what a request has computed, if there is room, before it is released."""
        if holder.loads:  # not there yet: hosts still keep it
            holder.loads = []
            return
        self.forget(holder)
        count = self.blocks(holder.num_computed)
        if 0 < count <= len(self._free_numbers):
            holder.kept, holder.num_kept = self._free_numbers[:count], holder.num_computed
            del self._free_numbers[:count]
            self.saves += zip(holder.blocks, holder.kept, strict=False)

    def forget(self, holder: Holder) -> None:
        """Let hosts keep nothing of a request any more."""
        self._free_numbers += holder.kept
        holder.kept, holder.num_kept, holder.loads = [], 0, []

    def register(self, holder: Holder, end: int) -> None:
        """Let the blocks that the tokens before `end` fill be found by others."""
        count = end // BLOCK_TOKENS if self._plain else self.blocks(end)
        if not self._limits.prefix_cache or count <= holder.num_registered:
            return
        keys = holder.keys.upto(holder.tokens, end, count)
        for index in range(holder.num_registered, len(keys)):
            self.pool.register(holder.blocks[index], keys[index])
        holder.num_registered = len(keys)
        if self.windows:
            self.windows.register(holder.window, keys)

    def check(self, holders: Iterable[Holder]) -> None:
        """Raise `AssertionError` if a block is lost, owned twice or held for nothing; for tests."""
        several = list(holders)
        numbers = [number for holder in several for number in holder.kept] + self._free_numbers
        assert sorted(numbers) == list(range(self._limits.host_blocks)), "a number is lost"
        self.pool.check(holder.blocks for holder in several)
        if self.windows:
            self.windows.check((holder.window, holder.num_computed) for holder in several)
        for holder in several:
            # A row of drafts may have got a block that the tokens it kept do not reach.
            most = self.blocks(holder.num_tokens + HOLDBACK_TOKENS)
            assert self.blocks(holder.num_computed) <= len(holder.blocks) <= most

    def _most(self, holder: Holder) -> int:
        """Return how many blocks a request may come to hold."""
        return self.blocks(_longest(holder))

    def _found(self, holder: Holder) -> list[int]:
        """Return the cached blocks that a request can start from; a token is left to compute."""
        rules = holder.request.rules
        if not self._limits.prefix_cache or (rules and rules.prompt_logprobs is not None):
            return []  # whose tokens are all to be scored has to compute them
        hits = self.pool.find(self._keys(holder))
        if self.windows and hits:
            del hits[self.windows.usable(self._keys(holder)[: len(hits)]) :]
        return hits

    def _keys(self, holder: Holder) -> list[bytes]:
        """Return the keys of the blocks that a request could start from, all of them found."""
        most = (holder.num_tokens - 1 - self._limits.tail) // BLOCK_TOKENS
        return holder.keys.upto(holder.tokens, holder.num_tokens, max(0, most))


def _longest(holder: Holder) -> int:
    """Return how many tokens of a request are ever cached."""
    return len(holder.request.prompt) + holder.request.max_new - 1
