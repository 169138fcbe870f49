"""What drafts, verifies and plain steps take on this very device: timed at the start, for `auto`.

A cost model knows kinds of devices and layers on their own; whether drafting pays is decided by
differences of a few percent. Steps are timed as the engine runs them (replayed graphs), at two
context lengths and some numbers of positions; between those, times are straight lines.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from llmpq.runtime.cuda_graphs import DecodeGraphs
from llmpq.runtime.cuda_speculate import CudaSpeculation
from llmpq.runtime.message import StepMessage
from llmpq.runtime.request import StepKind
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.speculation import MAX_GAMMA

POSITIONS = (1, 2, 4, 6, MAX_GAMMA + 1)
"""New tokens a row at which verifies are timed."""
REPEATS = 8

Line = tuple[tuple[float, float], ...]
"""Points (x, seconds), x ascending."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """`StepTimes` of a device: a line over the context for each number of rows (and positions)."""

    draft: Mapping[int, Line] = field(default_factory=dict)
    verify: Mapping[tuple[int, int], Line]
    """(rows, positions) -> line."""

    def decode_s(self, rows: int, context: float) -> float:
        """One plain step of an engine that drafts: its cache may have a copy to keep up to date."""
        return self.verify_s(rows, context, 1)

    def draft_s(self, rows: int, context: float) -> float:
        """One draft step; 0 where drafts need no model."""
        if not self.draft:
            return 0.0
        return on_line(self.draft[_next_above(rows, self.draft)], context)

    def verify_s(self, rows: int, context: float, q_len: int) -> float:
        """One verify of `q_len` positions a request."""
        known = _next_above(rows, [r for r, _ in self.verify])
        points = sorted(
            (q, on_line(line, context)) for (r, q), line in self.verify.items() if r == known
        )
        return on_line(tuple(points), q_len)


def measure(
    speculation: CudaSpeculation, rows: Sequence[int], contexts: tuple[int, int]
) -> MeasuredTimes:
    """Time the steps of a stage whose slots are free; what they write is overwritten later."""

    def line(graphs: DecodeGraphs, num_rows: int, q_len: int) -> Line:
        def at(context: int) -> float:
            message = step_message(num_rows, context, q_len)
            return seconds_of(lambda: graphs.run(message, None))

        return tuple((float(context), at(context)) for context in sorted(set(contexts)))

    draft = speculation.draft_graphs
    return MeasuredTimes(
        draft={} if draft is None else {r: line(draft, r, 1) for r in rows},
        verify={(r, q): line(speculation.verify_graphs(q), r, q) for r in rows for q in POSITIONS},
    )


@torch.inference_mode()
def seconds_of(step: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median device time of a step that has run before."""
    for _ in range(2):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    pairs = zip(events[:-1], events[1:], strict=True)
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3


def on_line(points: Line, x: float) -> float:
    """Return the value at x: straight between points, along the outer pieces beyond them."""
    if len(points) == 1:
        return points[0][1]
    upper = next((i for i, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(upper, 1) - 1 : max(upper, 1) + 1]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _next_above(rows: int, known: Sequence[int] | Mapping[int, Line]) -> int:
    """Return the least known number of rows that holds `rows`, or the largest."""
    return min((r for r in known if r >= rows), default=max(known))


def step_message(rows: int, context: int, q_len: int) -> StepMessage:
    """Return the message of a step through the slots from 0 on."""
    return StepMessage(
        kind=StepKind.VERIFY,
        slots=range(rows),
        starts=[context] * rows,
        num_new=[q_len] * rows,
        sample_steps=[1] * rows,
        sampling=[SamplingParams()] * rows,
        tokens=[[1] * q_len] * rows,
    )
