"""Traces stages: totals for the report, and events for a Chrome/Perfetto trace.

Standard library only. Times are seconds since the epoch, so that processes of one host line up.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmpq.file_form import replace_text
from llmpq.runtime.requests.request import StepKind

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds by which steps are counted: tokens that they compute."""
MAX_EVENTS = 200_000
"""Events one stage keeps for a trace; later ones only count in the totals."""
REPORTED_EVENTS = 300
"""Events one stage keeps without a trace: the beginning of a run, for its report."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One micro-batch on one stage."""

    kind: str
    seq: int
    rows: int
    q_len: int
    start_s: float
    end_s: float
    requests: Sequence[int] = ()
    """Whose rows they are: the first stage knows, the others' events have the same `seq`."""


@dataclass(slots=True)
class KindTotals:
    """Sums over the micro-batches of one kind."""

    steps: int = 0
    rows: int = 0
    busy_s: float = 0.0

    @property
    def mean_s(self) -> float | None:
        """Mean time of one micro-batch, None if there was none."""
        return self.busy_s / self.steps if self.steps else None


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a stage allocated."""

    weights_bytes: int
    """Layers, and embedding and head where the stage has them."""
    kv_bytes: int
    seconds: float
    prefix_bytes: int = 0
    """Of the cache, what only found prefixes need."""
    draft_bytes: int = 0
    """What drafts hold beyond the above."""
    layers_s: float = 0.0
    """Of `seconds`, what reading and quantising took."""
    num_held: int = 0
    """Layers that the device had already, from the stage before on it."""
    compiled_s: float = 0.0
    """What compiling kernels took that were not there."""
    warm_s: float = 0.0
    """What running and capturing steps to come took, beside that."""
    runner: str = ""
    """Class that computes the stage's steps: which engine it is, read off."""


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """Everything one stage recorded, as the driver gets it."""

    totals: Mapping[str, KindTotals]
    events: Sequence[TraceEvent] = ()
    sending_s: float = 0.0
    """Time its messages were on their way from device to device, beside its computing."""

    @property
    def busy_s(self) -> float:
        """Time the stage computed."""
        return sum(total.busy_s for total in self.totals.values())

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StageRecord:
        """Return the record of its fields as JSON data."""
        return cls(
            totals={kind: KindTotals(**total) for kind, total in data["totals"].items()},
            events=[TraceEvent(**event) for event in data["events"]],
            sending_s=data["sending_s"],
        )


def joined(first: StageRecord, then: StageRecord) -> StageRecord:
    """Return two records of one stage as one."""
    totals = {kind: replace(total) for kind, total in first.totals.items()}
    for kind, more in then.totals.items():
        own = totals.setdefault(kind, KindTotals())
        own.steps, own.rows = own.steps + more.steps, own.rows + more.rows
        own.busy_s += more.busy_s
    return StageRecord(
        totals=totals,
        events=[*first.events, *then.events],
        sending_s=first.sending_s + then.sending_s,
    )


@dataclass
class Recorder:
    """Records the micro-batches of one stage; used by one thread, read by others."""

    max_events: int = 0
    """Events that are kept; later ones count in the totals only."""
    totals: dict[str, KindTotals] = field(default_factory=dict)
    events: list[TraceEvent] = field(default_factory=list)
    current: tuple[str, float, int] | None = None
    """Kind and start of the micro-batch being computed, and by how many stages; None if there is
    none."""
    num_begun: int = 0
    """Micro-batches begun, also those that a device has yet to compute."""
    busy_s: float = 0.0
    """Time the stage computed, by the host's clock, since it was made."""
    tokens: int = 0
    """Tokens of all steps, of prompts and answers; on the first stage only."""
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    """How many steps had so many tokens; the last ones more than all bounds."""
    _epoch_s: float = field(default_factory=lambda: time.time() - time.perf_counter())

    @contextmanager
    def step(
        self, kind: StepKind, seq: int, rows: int, q_len: int, requests: Sequence[int] = ()
    ) -> Iterator[None]:
        """Record the block as one micro-batch; `requests`: of its rows, where they are known."""
        name = kind.name.lower()
        start_s = time.perf_counter()
        self.current = (name, start_s, 1)
        self.num_begun += 1
        yield
        end_s = time.perf_counter()
        self.current = None
        total = self.totals.setdefault(name, KindTotals())
        total.steps += 1
        total.rows += rows
        total.busy_s += end_s - start_s
        self.busy_s += end_s - start_s
        if len(self.events) < self.max_events:
            start_s, end_s = start_s + self._epoch_s, end_s + self._epoch_s
            self.events.append(TraceEvent(name, seq, rows, q_len, start_s, end_s, requests))

    def count_tokens(self, count: int) -> None:
        """Note how many tokens a step computes."""
        self.tokens += count
        self.steps_by_tokens[bisect_left(STEP_TOKENS, count)] += 1

    def work(self) -> dict[str, Any]:
        """Return how long the stage has computed, and its steps by kind; for metrics."""
        kinds = {kind: asdict(total) for kind, total in tuple(self.totals.items())}
        tokens = {"tokens": self.tokens, "steps_by_tokens": [*self.steps_by_tokens]}
        return {"busy_s": self.busy_s, "kinds": kinds, **tokens}

    @contextmanager
    def waiting(self, kind: StepKind, num_stages: int = 1) -> Iterator[None]:
        """Count the block as a step of so many stages that may be stuck, but not as work."""
        self.current = (kind.name.lower(), time.perf_counter(), num_stages)
        yield
        self.current = None

    def stuck_s(self) -> float:
        """Return how long the micro-batch being computed has been running on one stage, on average.

        0 if there is none.
        """
        current = self.current
        return 0.0 if current is None else (time.perf_counter() - current[1]) / current[2]

    def record(
        self, device_totals: Mapping[str, KindTotals] | None = None, *, sending_s: float = 0.0
    ) -> StageRecord:
        """Return what was recorded since the last call.

        A device that works on its own has its own totals, and links that do their own times.
        """
        found = StageRecord(
            totals=dict(device_totals or self.totals),
            events=tuple(self.events),
            sending_s=sending_s,
        )
        self.totals.clear()
        self.events.clear()
        return found


_COLOURS = {
    "prefill": "thread_state_running",
    "decode": "rail_response",
    "mixed": "rail_idle",
    "draft": "rail_animation",
    "verify": "rail_load",
    "round": "rail_load",
}


def chrome_trace(
    stage_names: Sequence[str],
    records: Sequence[StageRecord],
    request_names: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return the trace as Chrome's JSON object format: one track per stage.

    Every stage's event tells whose rows it computed: by `request_names`, else by number.
    """
    named = request_names or {}
    whose = {
        event.seq: [named.get(number, number) for number in event.requests]
        for record in records
        for event in record.events
        if event.requests
    }
    starts = [event.start_s for record in records for event in record.events]
    origin_s = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (name, record) in enumerate(zip(stage_names, records, strict=True)):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        events.append(
            {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        )
        events += [
            {
                "name": f"{event.kind} x{event.rows}",
                "cat": event.kind,
                "cname": _COLOURS.get(event.kind, "generic_work"),
                "ph": "X",
                "pid": pid,
                "tid": 0,
                "ts": round((event.start_s - origin_s) * 1e6, 3),
                "dur": round((event.end_s - event.start_s) * 1e6, 3),
                "args": {
                    "micro_batch": event.seq,
                    "rows": event.rows,
                    "q_len": event.q_len,
                    "requests": whose.get(event.seq, []),
                },
            }
            for event in record.events
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(
    path: str | Path,
    stage_names: Sequence[str],
    records: Sequence[StageRecord],
    request_names: Mapping[int, str] | None = None,
) -> None:
    """Write the trace for chrome://tracing or ui.perfetto.dev, whole or not at all."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_text(Path(path), json.dumps(chrome_trace(stage_names, records, request_names)))
