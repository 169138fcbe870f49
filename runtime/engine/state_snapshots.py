"""Which prefixes' recurrent states are kept, and under which number. Pure Python.

A found prefix needs what recurrent layers carry behind its last block. The state behind the last
full block of each prompt is kept: with as many bytes, more places a prompt find less
(benchmarks/state_snapshots.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable


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
