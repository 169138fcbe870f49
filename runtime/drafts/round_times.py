"""Measured times of rounds: seconds a token with drafts and without, by the host's clock.

A cost model knows steps of a device. What else a round costs (the host waiting for what was kept,
proposals, graphs captured on the way) only the clock shows, so that is what decides in the end
whether drafting goes on. Pure: a clock is handed in, samples are taken between calls.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

PLAIN_FIRST = 6
"""Plain rounds that a size of group begins with: what drafts are measured against."""
DROPPED = 2
"""Rounds after a change that belong to neither: one more is under way, graphs are captured."""
KEPT = 16
"""Samples of each kind, whose median counts."""
CLEARLY = 1.2
"""Times a plain round's seconds a token: two samples are enough to stop."""
FEWEST = 5
"""Samples after which any loss is one."""
SHARE_LOST = 0.01
"""Of the time that trying may cost: so long is the rest after drafts that lost."""
SHORTEST_REST, LONGEST_REST = 64, 8192
"""Plain rounds."""


class RoundTimes:
    """Of groups of one size; `allows` is called before every round, `add` with what one yielded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._tokens = 0
        self._drafted: bool | None = None
        self._rows = 1
        self._in_a_row = 0
        self._samples: dict[bool, deque[float]] = {
            kind: deque(maxlen=KEPT) for kind in (False, True)
        }
        self._rest = PLAIN_FIRST
        self._lost = 0.0
        """Rounds' worth of time that drafts have cost since the last rest."""

    def add(self, tokens: int) -> None:
        """Count tokens that a round yielded."""
        self._tokens += tokens

    def gain(self) -> float | None:
        """Return the measured speed-up of drafting; None before both kinds were measured."""
        plain, drafting = self._samples[False], self._samples[True]
        if not plain or not drafting:
            return None
        return statistics.median(plain) / statistics.median(drafting)

    def allows(self) -> bool:
        """Whether the next round may draft; ends the sample of the round before."""
        self._take_sample()
        if self._rest > 0:
            self._rest -= 1
            return False
        if self._loses():
            self._rest = int(min(max(SHORTEST_REST, self._lost / SHARE_LOST), LONGEST_REST))
            self._lost = 0.0
            self._samples[True].clear()
            return False
        return True

    @property
    def rests(self) -> bool:
        """Whether many plain rounds are to come."""
        return self._rest > PLAIN_FIRST

    def started(self, *, drafting: bool, rows: int) -> None:
        """Say how the round that starts now decodes."""
        self._in_a_row = self._in_a_row + 1 if drafting is self._drafted else 0
        self._drafted = drafting
        self._since = self._clock()
        self._tokens = 0
        self._rows = rows

    def forget_time(self) -> None:
        """Leave the time since the last round out: other steps went between."""
        self._since = None

    def _take_sample(self) -> None:
        if self._since is None or self._drafted is None:
            return
        took, plain = self._clock() - self._since, self._samples[False]
        # Plain steps outside rounds do not report: each row got one token.
        tokens = self._tokens or (0 if self._drafted else self._rows)
        if self._drafted and plain:
            self._lost += took / (statistics.median(plain) * self._rows) - tokens / self._rows
            self._lost = max(0.0, self._lost)
        if tokens and self._in_a_row >= DROPPED:
            self._samples[self._drafted].append(took / tokens)

    def _loses(self) -> bool:
        gain, count = self.gain(), len(self._samples[True])
        if gain is None or count < 2:
            return False
        return gain < 1 / CLEARLY or (count >= FEWEST and gain < 1)
