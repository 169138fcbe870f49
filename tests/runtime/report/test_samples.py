"""What a report has of a job's course: few samples however long it is, and the first steps."""

from __future__ import annotations

import pytest

from llmpq.runtime.report import live_numbers as module
from llmpq.runtime.report.job_report import MOST_BARS, timeline_data
from llmpq.runtime.report.live_numbers import MOST_SAMPLES, JobSamples
from llmpq.runtime.requests.request import Progress
from llmpq.runtime.steps.trace import StageRecord, TraceEvent

pytestmark = pytest.mark.cpu


def test_samples_are_few_and_their_rates_add_up_to_the_tokens(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    job = JobSamples()
    for tick in range(20_001):
        now[0] = tick * 0.05
        gauges = {"blocks": 9, "blocks_held": tick % 9}
        counters = Progress(running=2, waiting=1, generated_tokens=3 * tick, gauges=gauges)
        job.add(counters, last=tick == 20_000)
    rows = job.as_report()
    assert 50 < len(rows) <= MOST_SAMPLES
    at, tokens = 0.0, 0.0
    for row in rows:
        tokens += row["tokens_per_s"] * (row["t_s"] - at)
        at = row["t_s"]
        assert row["blocks"] == 9 and row["running"] == 2
    assert at == 1000 and tokens == pytest.approx(60_000, rel=1e-3)


def test_a_timeline_begins_with_the_first_step_of_all() -> None:
    def record(offset: float, count: int) -> StageRecord:
        events = [
            TraceEvent("decode", i, 4, 1, 100 + offset + i, 100.5 + offset + i)
            for i in range(count)
        ]
        return StageRecord(totals={}, events=events)

    found = timeline_data([record(0.25, 3), record(0.0, 1)])
    assert [len(steps) for steps in found] == [3, 1]
    assert found[1][0] == {"kind": "decode", "rows": 4, "start_s": 0, "end_s": 0.5, "ms": 500}
    assert found[0][2]["start_s"] == 2.25
    many = timeline_data([record(0.0, 1000)] * 100)
    assert sum(map(len, many)) == MOST_BARS
    assert timeline_data([]) == []
