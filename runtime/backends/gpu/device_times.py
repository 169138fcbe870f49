"""Steps as the device timed them: the host only knows when it issued them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from llmpq.runtime.requests.request import StepKind
from llmpq.runtime.steps.trace import MAX_EVENTS, KindTotals

_T = TypeVar("_T")


class DeviceTimes:
    """Events around steps of a stage on a GPU; nothing where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._timed: list[tuple[StepKind, int, torch.cuda.Event, torch.cuda.Event]] = []

    def of(self, kind: StepKind, rows: int, run: Callable[[], _T]) -> _T:
        """Return what a step of so many rows gives, timed."""
        if not self._on:
            return run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = run()
        end.record()
        if len(self._timed) < MAX_EVENTS:
            self._timed.append((kind, rows, start, end))
        return result

    def goes_on(self) -> None:
        """Count what the last step has been given since `of` returned, too."""
        if self._timed:
            self._timed[-1][-1].record()

    def forget(self) -> None:
        """Begin anew."""
        self._timed.clear()

    def totals(self) -> dict[str, KindTotals]:
        """Return the steps so far by kind, and forget them."""
        totals: dict[str, KindTotals] = {}
        for kind, rows, start, end in self._timed:
            end.synchronize()
            total = totals.setdefault(kind.name.lower(), KindTotals())
            total.steps += 1
            total.rows += rows
            total.busy_s += start.elapsed_time(end) / 1e3
        self.forget()
        return totals
