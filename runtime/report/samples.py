"""A job over time: tokens, requests and KV blocks, a few hundred samples at most."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from llmpq.runtime.request import Progress

MOST = 240
"""Samples of a job; of a longer one every other is dropped, and the next ones are rarer."""
LEAST_S = 0.1
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
    _every_s: float = LEAST_S

    def add(self, progress: Progress, *, last: bool = False) -> None:
        """Take the counters, unless the last ones are too young; `last`: in any case."""
        now_s = time.monotonic() - self._began_s
        if self._found and not last and now_s - self._found[-1].t_s < self._every_s:
            return
        if len(self._found) >= MOST:
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
