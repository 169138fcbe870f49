"""Which replica gets a request: the one that is predicted to end it first.

A request's work is its answer's tokens and, at a fraction of these, its prompt's; what a replica
has answered before begins with the same text needs no computing there: its prefix cache has it.
Text is compared as the bytes of the body, in blocks, so nothing is parsed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

BLOCK_BYTES = 256
"""Of a body, compared at a time."""
MOST_BLOCKS = 16_384
"""Blocks that are remembered of a replica: the latest."""
BYTES_A_TOKEN = 4
PROMPT_WORK = 1 / 16
"""Work of a prompt's token, in tokens of answers."""
USUAL_TOKENS, MOST_TOKENS = 256, 4096
"""Tokens of an answer that does not say, and the most that are believed."""
_ASKED = re.compile(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,9})')


@dataclass(frozen=True)
class RequestWork:
    """What a request's body tells of its work."""

    tokens: float
    """Of the answer, as far as the body says."""
    prompt: float
    """Of its prompt, in the same unit."""
    blocks: tuple[int, ...]
    """A hash of each prefix of whole blocks, the shortest first."""

    @classmethod
    def of(cls, body: bytes) -> RequestWork:
        """Read a body."""
        asked = _ASKED.search(body)
        tokens = USUAL_TOKENS if asked is None else min(MOST_TOKENS, max(1, int(asked[1])))
        found, chain = [], 0
        most = min(len(body), MOST_BLOCKS * BLOCK_BYTES)
        for start in range(0, most - BLOCK_BYTES + 1, BLOCK_BYTES):
            chain = hash((chain, body[start : start + BLOCK_BYTES]))
            found.append(chain)
        return cls(
            tokens=float(tokens),
            prompt=len(body) / BYTES_A_TOKEN * PROMPT_WORK,
            blocks=tuple(found),
        )


@dataclass
class ReplicaLoad:
    """The work under way on a replica, and the prefixes that it has seen."""

    under_way: float = 0.0
    """In tokens of answers."""
    _seen: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def of(self, work: RequestWork) -> float:
        """Return the work of a request here, without what the prefix cache should have."""
        known = 0
        for block in work.blocks:
            if block not in self._seen:
                break
            known += 1
        return work.tokens + work.prompt * (1 - known / max(1, len(work.blocks)))

    def finish(self, work: RequestWork, speed: float) -> float:
        """Return when a request would end here, in units of time that replicas share."""
        return (self.under_way + self.of(work)) / speed

    def begin(self, work: RequestWork) -> float:
        """Note a request; return its work, which `end` takes off again."""
        own = self.of(work)
        self.under_way += own
        for block in work.blocks:
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > MOST_BLOCKS:
            self._seen.popitem(last=False)
        return own

    def end(self, own: float) -> None:
        """Note that a request has ended."""
        self.under_way = max(0.0, self.under_way - own)

    def forget(self) -> None:
        """Forget all prefixes: the replica is another process."""
        self._seen.clear()
