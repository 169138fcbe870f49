"""Rounds in which every running request decodes a token, and nothing else happens, at once.

Most steps of a simulation are such: between an arrival and an end the same rows go through the same
stages again and again, and only their caches grow. A round is a step of each group of rows. What
the steps take is straight in the tokens of the caches (`stage_times`), piece by piece: where it is
so between the first round and the last, rounds are a recursion over the stages, without scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import Ints, MicroBatch, StepKind
from llmpq.runtime.simulate.step_times import StepRows, TimedStage

LEAST = 3
"""Rounds that are passed at once, at least: fewer are simulated step by step as soon."""
MOST_GROUPS = 64
"""Steps of a round, at most."""
STRAIGHT = 1e-12
"""Relative distance from a straight line, of what is taken for one."""


@dataclass
class Clock:
    """When the first stage goes on, stages and links are free, and steps under way are done."""

    now: float
    free: list[float]
    """Of each stage and of the link behind it, by turns."""
    done: deque[float]
    """Of steps under way, the oldest first."""

    def copy(self) -> Clock:
        """Return another one that is there, too."""
        return Clock(self.now, list(self.free), deque(self.done))


class SteadySteps:
    """The steps since something else happened than that one was issued as another one ended."""

    def __init__(self) -> None:
        self._members: list[bytes] = []
        self._rows: list[Ints] = []

    def note(self, micro_batches: Sequence[MicroBatch], *, goes_on: bool) -> None:
        """Note what was issued; `goes_on`: whether then the oldest step ended, and no request."""
        one = micro_batches[0] if len(micro_batches) == 1 else None
        if one is None or one.kind is not StepKind.DECODE or not goes_on:
            self.clear()
            return
        self._members.append(one.members_B.tobytes())
        self._rows.append(one.members_B)

    def clear(self) -> None:
        """Know of no steps."""
        self._members.clear()
        self._rows.clear()

    def round(self, under_way: int, running: int) -> list[Ints]:
        """Return the rows of each step of a round, the next one first; none if no round is known.

        `under_way`: steps that are; `running`: requests that run, each of which is to be in one.
        """
        members = self._members
        if not members or len(members) <= under_way:
            return []
        most = min(len(members) // 2, MOST_GROUPS)
        length = next((n for n in range(1, most + 1) if members[-1 - n] == members[-1]), 0)
        if not length or members[-length:] != members[-2 * length : -length]:
            return []
        rows = self._rows[-length:]
        return rows if sum(map(len, rows)) == running else []


@dataclass(frozen=True)
class _Step:
    """A step of a round on each stage: seconds of the first round, and more of each further one."""

    first_s: tuple[float, ...]
    more_s: tuple[float, ...]
    host_s: tuple[float, ...]
    """Beside, of a core that computes."""
    hops: tuple[tuple[float, float], ...]
    """(occupied, total) seconds of the link behind."""


def _steps(
    stages: Sequence[TimedStage], caches: Sequence[Sequence[int]], rounds: int
) -> tuple[list[_Step], int]:
    """Return the steps of a round, by the caches of their rows, and of how many rounds they are."""
    found: list[_Step] = []
    for own in caches:
        for_rows = _rows(own, 0)
        first = [stage.seconds(for_rows) for stage in stages]
        rounds, more = _straight(stages, own, first, rounds)
        found.append(
            _Step(
                first_s=tuple(first),
                more_s=more,
                host_s=tuple(stage.host_s(for_rows) for stage in stages),
                hops=tuple(stage.hop(for_rows) for stage in stages),
            )
        )
    return found, rounds


def _straight(
    stages: Sequence[TimedStage], caches: Sequence[int], first: Sequence[float], rounds: int
) -> tuple[int, tuple[float, ...]]:
    """Return how many rounds a step's times are straight for, and how much more each takes."""
    while rounds >= LEAST:
        last, middle = rounds - 1, (rounds - 1) // 2
        more = tuple(
            (stage.seconds(_rows(caches, last)) - one) / last
            for stage, one in zip(stages, first, strict=True)
        )
        between = [stage.seconds(_rows(caches, middle)) for stage in stages]
        if all(
            abs(one + middle * slope - own) <= STRAIGHT * own
            for one, slope, own in zip(first, more, between, strict=True)
        ):
            return rounds, more
        rounds = middle
    return 0, ()


def _rows(caches: Sequence[int], more: int) -> StepRows:
    return StepRows(chunks=[], caches=[n + more for n in caches], samples=len(caches))


def pass_rounds(
    scheduler: Scheduler,
    stages: Sequence[TimedStage],
    steady: SteadySteps,
    under_way: deque[tuple[MicroBatch, float]],
    clock: Clock,
    *,
    host_s: float,
    until_s: float,
    token: int,
) -> tuple[Clock, int]:
    """Pass rounds whose steps all begin before a time; return the clock then, and their steps.

    `clock`: without what is under way. Where no round is known, or fewer than LEAST can be passed,
    nothing changes.
    """
    groups = steady.round(len(under_way), scheduler.num_running)
    rounds = scheduler.rounds_ahead() if groups else 0
    if rounds < LEAST:
        return clock, 0
    steps, rounds = _steps(stages, [scheduler.next_caches(rows) for rows in groups], rounds)
    if rounds < LEAST:
        return clock, 0
    at = replace(clock, free=list(clock.free), done=deque(done for _, done in under_way))
    reached, passed = at.copy(), 0
    while passed < rounds and _pass_round(at, stages, steps, passed, host_s, until_s):
        reached, passed = at.copy(), passed + 1
    if not passed:
        return clock, 0
    micro_batches = [one for one, _ in under_way]
    scheduler.pass_rounds(passed, passed * len(groups), micro_batches, token)
    under_way.clear()
    under_way.extend(zip(micro_batches, reached.done, strict=True))
    return reached, passed * len(groups)


def _pass_round(
    at: Clock,
    stages: Sequence[TimedStage],
    steps: Sequence[_Step],
    number: int,
    host_s: float,
    until_s: float,
) -> bool:
    """Move a clock on by a round; whether all its steps begin before a time."""
    free = at.free
    for step in steps:
        if at.now >= until_s:
            return False
        at.now += host_s
        arrives = at.now
        for place, stage in enumerate(stages):
            seconds = step.first_s[place] + number * step.more_s[place]
            arrives = max(arrives, free[2 * place]) + seconds
            free[2 * place] = arrives + step.host_s[place]
            if place == 0 and stage.is_cpu:
                at.now = free[0]
            occupied, total = step.hops[place]
            begin = max(arrives, free[2 * place + 1])
            free[2 * place + 1] = begin + occupied
            arrives = begin + total
        at.done.append(arrives)
        at.now = max(at.now, at.done.popleft())
    return True
