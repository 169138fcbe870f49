"""Blocks of layers that see a window only: given back as the window leaves them. Pure Python.

Such layers have a pool of their own. A request holds the blocks that the window of its next token
reaches, under the same numbers of blocks as in its table of all tokens: block m has the tokens from
m * 128 on. What left the window is found again by its key until it is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmpq.runtime.engine.block_pool import BlockPool
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.sizes.kv_format import BLOCK_TOKENS, first_seen_block, pool_blocks, spanned_blocks


@dataclass(eq=False)
class WindowTable:
    """The blocks that a request holds: numbers `first` to `end` - 1."""

    first: int = 0
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0
    """Up to which number stages know them."""
    num_registered: int = 0
    """Up to which number others can find them."""

    @property
    def end(self) -> int:
        """Number behind its last block."""
        return self.first + len(self.blocks)

    def take_unsent(self) -> tuple[int, tuple[int, ...]]:
        """Return the number of the first block that stages do not know, and those from it on."""
        first, self.num_sent = self.num_sent, self.end
        return first, tuple(self.blocks[first - self.first :])


class WindowTables:
    """Gives blocks of the window layers' pool to requests and takes them back."""

    def __init__(self, limits: PoolLimits, watermark: int) -> None:
        """`watermark`: blocks that stay free when a request is admitted beside others."""
        self.pool = BlockPool(limits.window_blocks)
        self._limits = limits
        self._watermark = watermark

    def pass_by(self, table: WindowTable, position: int) -> None:
        """Give back what the query at a position, and all behind it, no longer see."""
        first = first_seen_block(position, self._limits.window)
        passed = first - table.first
        if passed > 0:
            self.pool.release(table.blocks[:passed])
            del table.blocks[:passed]
            table.first = first

    def passes_at(self, table: WindowTable) -> int:
        """Return the position from which on a query no longer sees the first block."""
        return (table.first + 1) * BLOCK_TOKENS + self._limits.window - 1

    def lacks(self, table: WindowTable, tokens: int) -> int:
        """Return how many blocks more than are available a request of so many tokens needs."""
        return self._blocks(tokens) - table.end - self.pool.num_available

    def grow(self, table: WindowTable, tokens: int) -> None:
        """Give a request the blocks of so many tokens."""
        needed = self._blocks(tokens) - table.end
        if needed > 0:
            table.blocks += self.pool.take(needed)

    def usable(self, keys: Sequence[bytes]) -> int:
        """Return the longest prefix, in blocks, of which all that its next token sees is cached."""
        best = run = 0
        for number, key in enumerate(keys, start=1):
            run = run + 1 if self.pool.find([key]) else 0
            if run >= number - first_seen_block(number * BLOCK_TOKENS, self._limits.window):
                best = number
        return best

    def begin(self, table: WindowTable, keys: Sequence[bytes]) -> None:
        """Give a request the cached blocks that the token behind `keys` sees; `keys`: `usable`."""
        first = first_seen_block(len(keys) * BLOCK_TOKENS, self._limits.window) if keys else 0
        table.first = table.num_sent = first
        table.blocks = self.pool.find(keys[first:])
        table.num_registered = table.end
        self.pool.share(table.blocks)

    def release(self, table: WindowTable) -> None:
        """Take all blocks of a request."""
        self.pool.release(table.blocks)
        table.blocks, table.first = [], 0

    def register(self, table: WindowTable, keys: Sequence[bytes]) -> None:
        """Let the blocks of these keys that the request still holds be found by others."""
        for number in range(max(table.first, table.num_registered), len(keys)):
            self.pool.register(table.blocks[number - table.first], keys[number])
        table.num_registered = max(table.num_registered, len(keys))

    def fits(
        self,
        running: Sequence[tuple[WindowTable, int, int]],
        *,
        num_tokens: int,
        longest: int,
        keys: Sequence[bytes],
    ) -> bool:
        """Whether a request's blocks fit above the watermark, beside what others have yet to take.

        `running`: of each request its table, its tokens now and at most. `keys`: of blocks found.
        """
        most = [self._most(limit) for _, _, limit in running]
        if self._most(longest) + sum(most) <= self.pool.num_blocks:
            return True
        first = first_seen_block(len(keys) * BLOCK_TOKENS, self._limits.window) if keys else 0
        found = self.pool.find(keys[first:])
        needed = self._most(num_tokens) - len(found) + self.pool.num_unheld(found)
        promised = sum(max(0, self._most(now) - len(t.blocks)) for t, now, _ in running)
        return self.pool.num_available - promised - self._watermark >= needed

    def check(self, tables: Iterable[tuple[WindowTable, int]]) -> None:
        """Raise `AssertionError` if a block is lost or a table has gaps; for tests.

        `tables`: each with the tokens of its request that are computed.
        """
        several = list(tables)
        self.pool.check(table.blocks for table, _ in several)
        for table, num_computed in several:
            assert table.end >= self._blocks(num_computed)
            assert table.first <= first_seen_block(num_computed, self._limits.window)

    def _most(self, tokens: int) -> int:
        """Return how many blocks a request of so many tokens holds at most."""
        spanned = spanned_blocks(self._limits.window, self._limits.row_tokens)
        return min(self._blocks(tokens), spanned)

    def _blocks(self, tokens: int) -> int:
        return pool_blocks(self._limits.kv, tokens)
