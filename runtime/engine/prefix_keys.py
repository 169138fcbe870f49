"""Keys under which full KV blocks are found again: chained hashes of all tokens up to a block.

A key says what a block holds: the tokens from the request's first on, since keys and values of a
token depend on all before it, and what the chain was begun with (model, KV precision, a salt).
Standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from llmpq.sizes.kv_format import BLOCK_TOKENS

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
