"""The highest rate that lasts, of one engine and of several that are tried beside each other.

Rates that are tried are powers of one number, so that engines have the same rate wherever the
search for it began. Knows nothing of engines and simulators.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.service_measures import ATTAINMENT

MAY_MISS = 1 - ATTAINMENT
"""Share of the requests that may be beyond the limits at a rate that is kept."""
RATE_STEP = 0.05
"""Relative distance of the rates that are tried."""
MOST_TRIES = 18
"""Rates that are tried before one is found that lasts, or one that does not."""
FARTHEST = 56
"""Steps from one rate to the next at most: 0.06 times as much."""
LEAST_SHARE = 3e-3
"""What a smaller share of requests beyond the limits counts as."""

Tried = tuple[int, float]
"""The number of a rate, and the share of the requests that is beyond the limits at it."""


def lasts(missed: float) -> bool:
    """Whether a rate at which such a share of the requests is beyond the limits is kept."""
    return missed <= MAY_MISS + 1e-9


def rate_of_number(number: float) -> float:
    """Return one of the rates that are tried."""
    return float((1 - RATE_STEP) ** -number)


def rate_number(rate: float) -> int:
    """Return the number of the highest of the rates that are tried that is not above a rate."""
    return math.floor(-math.log(rate) / math.log(1 - RATE_STEP) + 1e-6)


class RateSearch(ABC):
    """What is known of the rates of an engine, and which one is to be tried next.

    `missed`, `most` and `kept_apart` say how it serves; any may raise `TimeoutError`.
    """

    def __init__(self) -> None:
        self.tried: dict[int, float] = {}
        """Number of a rate -> share of the requests beyond the limits, in the order tried."""
        self.low: int | None = None
        """The highest that lasts."""
        self.high: int | None = None
        """The lowest that does not."""

    @abstractmethod
    def missed(self, rate: float) -> float:
        """Return the share of the requests that is beyond the limits at a rate."""

    @abstractmethod
    def most(self) -> float:
        """Return a rate above which none lasts; asked where one was found that seems to."""

    @abstractmethod
    def kept_apart(self, rate: float) -> bool:
        """Whether requests far further apart than at a rate are within the limits."""

    def lasts(self, number: int) -> bool:
        """Whether a rate lasts: what is below one that does does, too."""
        if self.low is not None and number <= self.low:
            return True
        if self.high is not None and number >= self.high:
            return False
        share = max(self.missed(rate_of_number(number)), LEAST_SHARE)
        self.tried.pop(number, None)
        self.tried[number] = share
        if not lasts(share):
            self.high = number
            return False
        top = rate_number(self.most())
        self.low = min(number, top)
        if number > top:
            self.high = top + 1
        return number <= top

    def open_at(self, first: int) -> bool:
        """Look for a rate that lasts beside one that does not, from one on; whether any lasts."""
        if self.low is None and not self.kept_apart(rate_of_number(first)):
            return False
        self._walk(first)
        return self.low is not None

    def close(self, first: int) -> bool:
        """Find the highest rate that lasts, from one on; whether any does."""
        if not self.open_at(first):
            return False
        while not self.is_closed:
            self.lasts(self.next_number())
        return True

    def rise(self) -> None:
        """Look for a rate that does not last, above one that does."""
        assert self.low is not None, "there is one"
        self._walk(self.low)

    def _walk(self, first: int) -> None:
        at = first
        for _ in range(MOST_TRIES):
            self.lasts(at)
            if self.low is not None and self.high is not None:
                break
            at = self.next_number()

    @property
    def is_closed(self) -> bool:
        """Whether the highest is known."""
        return self.low is not None and self.high is not None and self.high - self.low <= 1

    def next_number(self, above: int | None = None) -> int:
        """Return the rate to try next; `above`: of those that are higher, with one too high known.

        A straight line of the logarithms of rate and share through the last two says where as many
        miss the limits as may be. Where both last, or both do not, it leads from the last one on,
        at most twice as far as from one to the other; with rates on either side the middle is as
        good then.
        """
        low, high = self.low, self.high
        if above is not None and (low is None or low < above):
            assert high is not None, "a rate is known that does not last"
            return max(above + 1, (above + high) // 2)
        (at, share), before = list(self.tried.items())[-1], self._before_last
        below = lasts(share)
        alike = before is not None and lasts(before[1]) is below
        if low is not None and high is not None:
            part = 0.5
            if not alike and low in self.tried and high in self.tried:
                line = _line((low, self.tried[low]), (high, self.tried[high]), MAY_MISS)
                part = min(0.75, max(0.25, (line - low) / (high - low)))
            return min(high - 1, max(low + 1, round(low + part * (high - low))))
        if before is None:
            step = math.log(share / MAY_MISS) * (0.25 if below else 0.5)
            step = abs(step / math.log(1 - RATE_STEP))
        else:
            aim = MAY_MISS * (1.05 if below else 0.95)
            rises = share > before[1] if below else share < before[1]
            most = 2 * abs(at - before[0])
            step = min(most, abs(_line(before, (at, share), aim) - at)) if rises else most
        return at + (1 if below else -1) * min(FARTHEST, max(1, round(step)))

    @property
    def _before_last(self) -> Tried | None:
        others = list(self.tried.items())[:-1]
        return others[-1] if others else None

    @property
    def too_high_share(self) -> float:
        """How many requests are beyond the limits at the lowest rate that does not last."""
        return 1.0 if self.high is None else self.tried.get(self.high, 1.0)


def _line(one: Tried, other: Tried, share: float) -> float:
    """Return where a share is on the line through two that were tried."""
    (x, y), (x_other, y_other) = ((at, math.log(own)) for at, own in (one, other))
    return x + (x_other - x) * (math.log(share) - y) / (y_other - y)


@dataclass
class BestOf:
    """Which of some engines keeps the highest rate; none is looked into further than that takes.

    One engine's highest rate is found between one that lasts and one that does not; at the latter
    all others are tried first, and the one that misses fewest requests, or lasts, goes on. The
    others are tried just above what it keeps, if that is not known to be too high for them.
    """

    searches: Sequence[RateSearch]
    offsets: Sequence[int]
    """How many steps higher each one's rate has to be, to be worth as much as without."""
    best: int = 0
    """The highest rate that one of them keeps, less its offset."""
    winner: int | None = None
    """Which one does; None before any."""
    cut: bool = False
    """Whether the time was over before the others were tried."""

    def find(self, first: int, above: int | None = None) -> None:
        """Find it, from one of the rates on; of interest are those higher than `above` alone.

        `TimeoutError` where the time is over before any is found.
        """
        try:
            if self._begin(first, above):
                self._first_too_high()
                self._go_on()
        except TimeoutError:
            if self.winner is None:
                raise
            self.cut = True

    def _lasts(self, one: int, at: int) -> bool:
        if not self.searches[one].lasts(at + self.offsets[one]):
            return False
        self.winner, self.best = one, at
        return True

    def _is_open(self, one: int) -> bool:
        high = self.searches[one].high
        return high is None or high - self.offsets[one] > self.best + 1

    def _begin(self, first: int, above: int | None) -> bool:
        """Find one that keeps any rate that is of interest; whether one does."""
        for one, (search, offset) in enumerate(zip(self.searches, self.offsets, strict=True)):
            if above is not None:
                if self._lasts(one, above + 1):
                    return True
            elif search.open_at(first + offset) and search.low is not None:
                self.winner, self.best = one, search.low - offset
                return True
        return False

    def _first_too_high(self) -> None:
        """Try the others where the best does not last any more; again with those that do there."""
        tried = set[int]()
        while self.winner is not None and self.winner not in tried:
            first = self.winner
            tried.add(first)
            search = self.searches[first]
            search.rise()
            assert search.low is not None, "one lasts"
            self.best = search.low - self.offsets[first]
            if search.high is None or not self._is_open(first):
                return
            at = search.high - self.offsets[first]
            for one in range(len(self.searches)):
                if one not in tried and self._is_open(one) and self._lasts(one, at):
                    break

    def _go_on(self) -> None:
        """Raise the best until none is known that may be better."""
        while open_ := [one for one in range(len(self.searches)) if self._is_open(one)]:
            lead = min(open_, key=lambda one: self.searches[one].too_high_share)
            search, offset = self.searches[lead], self.offsets[lead]
            at = self.best + 1
            if search.high is not None and (lead == self.winner or len(open_) > 1):
                at = search.next_number(self.best + offset) - offset
            elif lead == self.winner:
                at = search.next_number() - offset
            self._lasts(lead, at)
