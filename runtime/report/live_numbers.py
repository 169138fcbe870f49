"""What a run does, at the moment and over time, made of the counters that the engine gives.

Shares of work, times of steps and rates are those between two counts; when a job ends is said by
the tokens that its requests still want at the rate so far. Knows nothing of how it is shown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmpq.runtime.requests.request import Progress


@dataclass(frozen=True, kw_only=True)
class StageNow:
    """One stage between two counts."""

    device: str
    layers: tuple[int, int]
    """The first, and the one behind the last."""
    busy_share: float | None = None
    """Of the time between the counts; None after a single count."""
    kind: str | None = None
    """The kind of steps that took most of that time; None where there was none."""
    step_s: float | None = None
    """The mean time of those."""
    planned_s: float | None = None
    """What the plan says of a step of that kind."""


@dataclass(frozen=True, kw_only=True)
class RunNow:
    """A run between two counts."""

    stages: Sequence[StageNow]
    """Empty while stages are started anew."""
    running: int
    waiting: int
    tokens_per_s: float | None
    blocks: int
    """Of the KV cache's pool on each stage."""
    blocks_held: int
    recoveries: Sequence[Mapping[str, Any]]
    """Stages that were lost, as reports have them."""


@dataclass
class LiveCounts:
    """Counts of a run, of which each is compared with the one before."""

    _before: tuple[float, Mapping[str, Any]] | None = None

    def add(self, stats: Mapping[str, Any], now_s: float) -> RunNow:
        """Take what `LLM.live_stats` gives at a time; return what became of the last count."""
        passed_s, old = 0.0, None
        if self._before is not None:
            passed_s, old = now_s - self._before[0], self._before[1]
        self._before = now_s, stats
        gauges = stats.get("gauges", {})
        rate = None
        if old is not None and passed_s > 0:
            rate = max(0, stats["generated_tokens"] - old["generated_tokens"]) / passed_s
        then = old["stages"] if old is not None else ()
        known = len(then) == len(stats["stages"])
        return RunNow(
            stages=[
                _stage_now(stage, then[place] if known else None, passed_s)
                for place, stage in enumerate(stats["stages"])
            ],
            running=stats["running"],
            waiting=stats["waiting"],
            tokens_per_s=rate,
            blocks=gauges.get("blocks", 0),
            blocks_held=gauges.get("blocks_held", 0),
            recoveries=stats["recoveries"],
        )


def _stage_now(
    stage: Mapping[str, Any], before: Mapping[str, Any] | None, passed_s: float
) -> StageNow:
    now = StageNow(device=stage["device"], layers=(stage["layers"][0], stage["layers"][1]))
    if before is None or passed_s <= 0 or stage["busy_s"] < before["busy_s"]:
        return now  # the first count, or another process than before
    spent: dict[str, tuple[float, int]] = {}
    for kind, total in stage["kinds"].items():
        old = before["kinds"].get(kind, {"busy_s": 0.0, "steps": 0})
        steps = total["steps"] - old["steps"]
        if steps > 0:
            spent[kind] = total["busy_s"] - old["busy_s"], steps
    share = min(1.0, (stage["busy_s"] - before["busy_s"]) / passed_s)
    if not spent:
        return StageNow(device=now.device, layers=now.layers, busy_share=share)
    kind = max(spent, key=lambda name: spent[name][0])
    planned = stage["predicted"].get(kind)
    return StageNow(
        device=now.device,
        layers=now.layers,
        busy_share=share,
        kind=kind,
        step_s=spent[kind][0] / spent[kind][1],
        planned_s=None if planned is None else planned["seconds"],
    )


@dataclass
class TokensLeft:
    """How long the open requests of a job will take, by the tokens that they may still want.

    Those that have ended say which share of what they might have they take.
    """

    most: int
    """Tokens that all requests may generate together."""
    _ended_most: int = 0
    _ended: int = 0
    _first: tuple[float, int] | None = None

    def end(self, tokens: int, most: int) -> None:
        """Note a request that has ended."""
        self._ended += tokens
        self._ended_most += most

    def left_s(self, generated: int, now_s: float) -> float | None:
        """Return the seconds that are left, None before there is a rate."""
        if self._first is None:
            if generated > 0:
                self._first = now_s, generated
            return None
        passed_s, made = now_s - self._first[0], generated - self._first[1]
        if passed_s <= 0 or made <= 0:
            return None
        taken = self._ended / self._ended_most if self._ended_most else 1.0
        wanted = self._ended + taken * (self.most - self._ended_most)
        return max(0.0, wanted - generated) * passed_s / made


MOST_SAMPLES = 240
"""Samples of a job; of a longer one every other is dropped, and the next ones are rarer."""
SAMPLE_S = 0.1
"""Time between two samples, at first."""


@dataclass(frozen=True, slots=True)
class _Sample:
    t_s: float
    tokens: int
    progress: Progress


@dataclass
class JobSamples:
    """Samples of one job; `add` takes the engine's counters as often as it likes."""

    _found: list[_Sample] = field(default_factory=list)
    _began_s: float = field(default_factory=lambda: time.monotonic())
    _every_s: float = SAMPLE_S

    def add(self, progress: Progress, *, last: bool = False) -> None:
        """Take the counters, unless the last ones are too young; `last`: in any case."""
        now_s = time.monotonic() - self._began_s
        if self._found and not last and now_s - self._found[-1].t_s < self._every_s:
            return
        if len(self._found) >= MOST_SAMPLES:
            self._found = self._found[::2]
            self._every_s *= 2
        self._found.append(_Sample(now_s, progress.generated_tokens, progress))

    def as_report(self) -> list[dict[str, Any]]:
        """Return them as JSON data: the rate is that since the sample before."""
        rows = []
        for before, now in zip(self._found, self._found[1:], strict=False):
            gauges, passed_s = now.progress.gauges, now.t_s - before.t_s
            if passed_s <= 0:
                continue
            rows.append(
                {
                    "t_s": round(now.t_s, 3),
                    "tokens_per_s": round((now.tokens - before.tokens) / passed_s, 2),
                    "running": now.progress.running,
                    "waiting": now.progress.waiting,
                    "blocks_held": gauges.get("blocks_held"),
                    "blocks": gauges.get("blocks"),
                }
            )
        return rows
