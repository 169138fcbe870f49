"""Passes many rounds of decoding at once: no request arrives, ends or is admitted in them.

Most steps of a simulation are such: between an arrival and an end the same rows go through the same
stages again and again, and only their caches grow. A round is one step of each group of rows. The
seconds of a step (step_times.py) are piecewise linear in the tokens of its caches: where they are
linear from the first round to the last, rounds are a recursion over the stages, without scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmpq.runtime.requests.request import Ints, MicroBatch, StepKind
from llmpq.runtime.simulate.step_scheduler import StepScheduler
from llmpq.runtime.simulate.step_times import StepRows, TimedStage

LEAST = 3
"""Fewest steps that are passed at once: fewer are as quick to simulate one by one."""
MOST_GROUPS = 64
"""Most steps of a round that is looked for."""
STRAIGHT = 1e-12
"""Relative deviation from a straight line up to which seconds count as linear."""


@dataclass
class Clock:
    """When the first stage goes on, stages and links are free, and steps under way are done."""

    now: float
    """Of the first stage's loop, in seconds, as all times here."""
    free: list[float]
    """Of each stage and of the link behind it, by turns."""
    done: deque[float]
    """Of steps under way, the oldest first."""


class SteadySteps:
    """The latest decode steps, each issued as the oldest one ended, with nothing else between.

    Rounds are found in them: groups of rows that come again and again, by the scheduler's word, or
    the same groups, in the same order, twice.
    """

    def __init__(self) -> None:
        self._members: list[bytes] = []
        self._rows: list[Ints] = []
        self._ended: MicroBatch | None = None

    def note(
        self, micro_batches: Sequence[MicroBatch], *, ended: MicroBatch, goes_on: bool
    ) -> None:
        """Note the steps issued between two ends of steps.

        `ended`: the step that ended then; `goes_on`: whether no request ended with it.
        """
        one = micro_batches[0] if len(micro_batches) == 1 else None
        if one is None or one.kind is not StepKind.DECODE or not goes_on:
            self.clear()
            return
        self._ended = ended
        self._members.append(one.members_B.tobytes())
        self._rows.append(one.members_B)

    def clear(self) -> None:
        """Forget all steps: something else happened."""
        self._members.clear()
        self._rows.clear()

    def round(
        self, scheduler: StepScheduler, under_way: deque[tuple[MicroBatch, float]]
    ) -> list[Ints]:
        """Return the table's rows of each step of a round, the next first; none if none is known.

        Each running request is in one of the steps.
        """
        members, ended = self._members, self._ended
        if not members or ended is None:
            return []
        steps = [ended, *(one for one, _ in under_way)]
        if all(one.kind is StepKind.DECODE for one in steps):
            rows = [one.members_B for one in steps]
            if scheduler.repeats(rows):
                return rows if scheduler.limits.tokens_ahead == 1 else rows[:1]
        if len(members) <= len(under_way):
            return []
        most = min(len(members) // 2, MOST_GROUPS)
        length = next((n for n in range(1, most + 1) if members[-1 - n] == members[-1]), 0)
        if not length or members[-length:] != members[-2 * length : -length]:
            return []
        rows = self._rows[-length:]
        return rows if sum(map(len, rows)) == scheduler.num_running else []


@dataclass(frozen=True)
class _Step:
    """One step of a round, stage by stage."""

    first_s: tuple[float, ...]
    """Seconds in the first round."""
    more_s: tuple[float, ...]
    """Seconds by which each round takes longer than the one before."""
    host_s: tuple[float, ...]
    """Seconds for which its messages occupy the core that computes; 0 on a GPU."""
    hops: tuple[tuple[float, float], ...]
    """(occupied, total) seconds of the link behind the stage."""


def _steps(
    stages: Sequence[TimedStage], caches: Sequence[Sequence[int]], rounds: int, within_s: float
) -> tuple[list[_Step], int]:
    """Return the steps of a round, and for how many of `rounds` they hold.

    `caches`: of each step the tokens that its rows have cached; `within_s`: in which all begin.
    """
    of_steps = [StepRows([], own, len(own)) for own in caches]
    firsts = [[stage.seconds(rows) for stage in stages] for rows in of_steps]
    busiest_s = max(map(sum, zip(*firsts, strict=True)))
    if within_s < rounds * busiest_s:
        rounds = min(rounds, int(within_s / busiest_s) + 2)
    found: list[_Step] = []
    for for_rows, first in zip(of_steps, firsts, strict=True):
        rounds, more = _straight(stages, for_rows, first, rounds)
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
    stages: Sequence[TimedStage], rows: StepRows, first: Sequence[float], rounds: int
) -> tuple[int, tuple[float, ...]]:
    """Return for how many rounds a step's seconds are linear, and by how much they grow a round.

    `first`: its seconds in the first round, of each stage.
    """
    while rounds > 1:
        last, middle = rounds - 1, (rounds - 1) // 2
        at_last, at_middle = rows.later(last), rows.later(middle)
        more = tuple(
            (stage.seconds(at_last) - one) / last for stage, one in zip(stages, first, strict=True)
        )
        between = [stage.seconds(at_middle) for stage in stages]
        if all(
            abs(one + middle * slope - own) <= STRAIGHT * own
            for one, slope, own in zip(first, more, between, strict=True)
        ):
            return rounds, more
        rounds = middle
    return 1, (0.0,) * len(first)


def pass_rounds(
    scheduler: StepScheduler,
    stages: Sequence[TimedStage],
    steady: SteadySteps,
    under_way: deque[tuple[MicroBatch, float]],
    clock: Clock,
    *,
    host_s: float,
    until_s: float,
    token: int,
) -> tuple[Clock, int]:
    """Pass the rounds whose steps all begin before `until_s`; return the clock and their steps.

    `clock.done` is not read: `under_way` says when steps are done. `token`: what every row gets.
    Where no round is known, or fewer than LEAST steps may be passed, nothing changes.
    """
    groups = steady.round(scheduler, under_way)
    rounds = scheduler.rounds_ahead() if groups else 0
    if rounds == 0 or rounds * len(groups) < LEAST:
        return clock, 0
    caches = [scheduler.next_caches(rows) for rows in groups]
    steps, rounds = _steps(stages, caches, rounds, until_s - clock.now)
    if rounds * len(groups) < LEAST:
        return clock, 0
    at = replace(clock, free=list(clock.free), done=deque(done for _, done in under_way))
    passed = _move_on(at, stages, steps, rounds, host_s, until_s)
    if not passed:
        return clock, 0
    micro_batches = [one for one, _ in under_way]
    scheduler.pass_rounds(passed, passed * len(groups), micro_batches, token)
    under_way.clear()
    under_way.extend(zip(micro_batches, at.done, strict=True))
    return at, passed * len(groups)


def _move_on(
    at: Clock,
    stages: Sequence[TimedStage],
    steps: Sequence[_Step],
    rounds: int,
    host_s: float,
    until_s: float,
) -> int:
    """Move a clock on by whole rounds whose steps all begin before `until_s`; return how many.

    Each step does what `SimulatedEngine` does for one: it is issued, goes from stage to stage, and
    the loop waits for the oldest step under way. A round that is not whole leaves the clock as it
    was before it.
    """
    now, free, done = at.now, at.free, at.done
    in_loop = stages[0].is_cpu
    parts = [
        [
            (2 * place, first_s, more_s, host, occupied, total)
            for place, (first_s, more_s, host, (occupied, total)) in enumerate(
                zip(step.first_s, step.more_s, step.host_s, step.hops, strict=True)
            )
        ]
        for step in steps
    ]
    for number in range(rounds):
        before = now, free[:], done.copy()
        for of_stages in parts:
            if now >= until_s:
                at.now, at.free, at.done = before
                return number
            now += host_s
            arrives = now
            for stage, first_s, more_s, stage_host_s, occupied, total in of_stages:
                if free[stage] > arrives:
                    arrives = free[stage]
                arrives += first_s + number * more_s
                free[stage] = arrives + stage_host_s
                if in_loop and stage == 0:
                    now = free[0]
                link = stage + 1
                if free[link] > arrives:
                    arrives = free[link]
                free[link] = arrives + occupied
                arrives += total
            done.append(arrives)
            oldest = done.popleft()
            if oldest > now:
                now = oldest
    at.now = now
    return rounds
