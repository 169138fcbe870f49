"""The blocks of the KV pool and what finds them again: keys, counts, snapshots. Pure Python.

A block is a number; every stage stores the same tokens of a request under it. A block is in one of
three states: in use by one request or more (its reference count), free, or cached: no request uses
it, but its key finds it until it is evicted, the least recently used first.

A key says what a block holds, as a chained hash: the tokens from the request's first on, since keys
and values of a token depend on all before it, and what the chain was begun with (model, KV
precision, a salt).

A found prefix also needs what recurrent layers carry behind its last block. The state behind the
last full block of each prompt is kept: with as many bytes, more places a prompt find less
(6ed750af:benchmarks/state_snapshots.py).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from llmpq.sizes.kv_format import BLOCK_TOKENS


class BlockPool:
    """Blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks with a key that no request uses, least recently used first."""
        self._ref_counts = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `take` can still hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks that no request uses and that can be found again."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """Return blocks with a reference count of one; the caller has checked `num_available`."""
        if count > self.num_available:
            raise ValueError(f"{count} blocks were asked for, {self.num_available} are available")
        return [self._take_one() for _ in range(count)]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the first keys, up to the first that is not known."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """Return how many of the blocks `share` would take out of what is available."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that were found."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a request's references; its last block is evicted first."""
        for block in reversed(blocks):
            if self._ref_counts[block] == 0:
                raise ValueError(f"block {block} was released more often than it was taken")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, key: bytes) -> None:
        """Let a held block be found by a key; the first block of a key stays the one found."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless these tables are all references and no block is lost.

        For tests: after every step of a schedule.
        """
        uses = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._ref_counts):
            assert uses[block] == count, f"block {block}: {uses[block]} references, not {count}"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not (free | cached) & uses.keys()
        assert len(free) + len(cached) + len(uses) == self.num_blocks, "a block is lost"
        assert cached <= self._key_of.keys() and not free & self._key_of.keys()
        assert {key: block for block, key in self._key_of.items()} == self._block_of

    def _take_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._ref_counts[block] = 1
        return block


_DIGEST_BYTES = 16


def chain_root(*parts: object) -> bytes:
    """Return what a chain begins with: equal parts, equal keys."""
    return _digest(repr(parts).encode())


class PrefixKeys:
    """The keys of one request's blocks, made as its tokens become known.

    Block m counts as full `tail` tokens after its last: a packed block comes with the 16-bit
    tokens behind it, which a prefix hit needs, too (TAIL_TOKENS, llmpq/sizes/kv_format.py).
    """

    def __init__(self, root: bytes, *, tail: int = 0) -> None:
        self._chain, self._tail = [root], tail
        self._keys: list[bytes] = []

    def upto(
        self, tokens: Callable[[int, int], Sequence[int]], num_tokens: int, count: int
    ) -> list[bytes]:
        """Return the keys of the first blocks that the tokens fill, `count` of them at most.

        `tokens(start, end)` returns a range of the request's first `num_tokens`.
        """
        full = max(0, num_tokens - self._tail) // BLOCK_TOKENS
        for block in range(len(self._keys), min(count, full)):
            end = (block + 1) * BLOCK_TOKENS
            link = _digest(self._chain[-1] + _bytes(tokens(end - BLOCK_TOKENS, end)))
            self._chain.append(link)
            behind = tokens(end, end + self._tail)
            self._keys.append(_digest(link + _bytes(behind)) if behind else link)
        return self._keys[: min(count, full)]


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


class StateSnapshots:
    """Snapshots 0 .. count - 1, by the key of the block that they stand behind."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._of: OrderedDict[bytes, int] = OrderedDict()
        """Key -> snapshot, least recently used first."""
        self._pinned: Counter[int] = Counter()
        """Those that a request has yet to begin from."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._of

    def pin(self, key: bytes) -> int:
        """Return a prefix's snapshot, which stays until a request has begun from it."""
        self._of.move_to_end(key)
        self._pinned[self._of[key]] += 1
        return self._of[key]

    def unpin(self, snapshot: int) -> None:
        """Say that a request has begun from a snapshot, or will not."""
        self._pinned[snapshot] -= 1

    def take(self, key: bytes, *, is_cached: Callable[[bytes], bool]) -> int:
        """Return where a prefix's state is to be kept; -1 where it is already, or nowhere.

        Those go first whose blocks were evicted (`is_cached`), then the least recently used.
        """
        if key in self._of:
            self._of.move_to_end(key)
            return -1
        if not self._free:
            loose = [own for own, number in self._of.items() if not self._pinned[number]]
            if not loose:
                return -1
            evicted = next((own for own in loose if not is_cached(own)), loose[0])
            self._free.append(self._of.pop(evicted))
        self._of[key] = self._free.pop()
        return self._of[key]

    def check(self) -> None:
        """Raise `AssertionError` if a snapshot is lost, had twice or pinned for ever; for tests."""
        assert sorted([*self._free, *self._of.values()]) == list(range(self.count))
        assert min(self._pinned.values(), default=0) >= 0
