"""Finds the stage whose device has come to take longer than before: thermal limits, other work.

All stages compute the same steps, so what a stage takes is compared with what the others take, and
that with what it was when the plan began to run. A load that slows all alike changes nothing, nor
does one of a few seconds: a stage is slow once it has been outside the band for a minute.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmpq.child import CallFailed
from llmpq.errors import LlmpqError
from llmpq.plans.plan import Plan
from llmpq.runtime.elastic.elastic import DeviceChange, Elastic
from llmpq.runtime.launch.engine_thread import EngineThread
from llmpq.runtime.launch.failures import named_stage

EVERY_S = 5.0
"""How often stages are asked how long they have computed."""
BAND = 1.3
"""So many times as long as before is slow."""
LEARNT, SLOW = 6, 12
"""Times in a row that say what is usual, and that a stage must be slow: 30 and 60 s."""
LEAST_STEPS = 8
"""Fewer in `EVERY_S` say nothing."""
_log = logging.getLogger("llmpq.run")


class SlowStages:
    """What stages took beside the others, and which one takes longer than it did."""

    def __init__(self) -> None:
        self._before: Sequence[Mapping[str, Any]] = ()
        self._usual: list[list[float]] = []
        """By time: each stage's seconds by those of the others."""
        self._slow: list[list[float]] = []
        """Of times in a row that were outside the band: each stage's share of its usual one."""

    def found(self, work: Sequence[Mapping[str, Any]]) -> tuple[int, float] | None:
        """Return a stage that is slow, and how many times as long as before it takes.

        `work`: how long each stage has computed so far (`LLM.stage_work`).
        """
        before, self._before = self._before, work
        if len(before) != len(work) or len(work) < 2:
            self._usual, self._slow = [], []
            return None
        steps = [_steps(now) - _steps(was) for was, now in zip(before, work, strict=True)]
        taken = [now["busy_s"] - was["busy_s"] for was, now in zip(before, work, strict=True)]
        if min(steps) < 0:  # other stages in their place
            self._usual, self._slow = [], []
        if min(steps) < LEAST_STEPS or min(taken) <= 0:
            return None
        each_s = [own / count for own, count in zip(taken, steps, strict=True)]
        beside = [
            own / statistics.median(each_s[:i] + each_s[i + 1 :]) for i, own in enumerate(each_s)
        ]
        if len(self._usual) < LEARNT:
            self._usual.append(beside)
            return None
        usual = [statistics.median(column) for column in zip(*self._usual, strict=True)]
        factors = [now / was for now, was in zip(beside, usual, strict=True)]
        if max(factors) <= BAND:
            self._slow = []
            return None
        if self._slow and _slowest(self._slow[-1]) != _slowest(factors):
            self._slow = []
        self._slow.append(factors)
        if len(self._slow) < SLOW:
            return None
        index = _slowest(factors)
        factor = statistics.median(one[index] for one in self._slow)
        self._usual, self._slow = [], []  # what it is now is what is usual
        return index, factor


def _slowest(factors: Sequence[float]) -> int:
    return max(range(len(factors)), key=lambda index: factors[index])


def _steps(work: Mapping[str, Any]) -> int:
    return sum(total["steps"] for total in work["kinds"].values())


def may_watch(plan: Plan) -> bool:
    """Whether a plan's stages are watched: several on CPUs, whose hosts time their steps.

    A GPU's steps are timed on the device, for reports.
    """
    alone = len(plan.workers) == len(plan.stages)
    return alone and len(plan.stages) > 1 and all(stage.is_cpu for stage in plan.stages)


class SlowWatch:
    """A thread that asks the stages, and has layers moved away from a slow one if that pays."""

    def __init__(self, elastic: Elastic, engine: Callable[[], EngineThread]) -> None:
        self._elastic, self._engine = elastic, engine
        self._over = threading.Event()
        self._stages = SlowStages()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="llmpq slow stages")
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self._look()
            except (LlmpqError, ValueError, RuntimeError, CallFailed, OSError) as error:
                _log.debug("stages are not compared now: %s", error)

    def _look(self) -> None:
        thread = self._engine()
        client = thread.client
        if thread.recovery is not None or not may_watch(client.plan):
            self._stages = SlowStages()
            return
        found = self._stages.found(client.work())
        if found is None or thread.client is not client:
            return
        index, factor = found
        named = named_stage(client.plan, index, client.stage_pids()[index])
        reason = f"{named} takes {factor:.2f} times as long as before beside the others"
        _log.warning("%s", self._moved(index, factor, reason).text)

    def _moved(self, index: int, factor: float, reason: str) -> DeviceChange:
        try:
            return self._elastic.move_from_slow({index: factor}, reason)
        except LlmpqError as error:
            return DeviceChange(done=False, text=f"{reason}; nothing is moved: {error}")
