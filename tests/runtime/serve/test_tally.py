"""Histograms of what every token adds to, beside those of Prometheus' own client."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from llmpq.runtime.serve.metrics import (
    DELIVERY,
    GAPS,
    LENGTHS,
    AnswerClock,
    Metrics,
    Tally,
)

pytestmark = pytest.mark.cpu
LABELS = {"model_name": "demo-7m", "engine": "0"}


def lines(registry: CollectorRegistry) -> list[str]:
    """Return what a scrape tells, but for when a histogram was made."""
    return [line for line in generate_latest(registry).decode().split("\n")
            if "_created" not in line]  # fmt: skip


def of_both(bounds, observed) -> tuple[list[str], list[str]]:
    """Return what both tell of values, each so many times."""
    about = "How long: a 'quoted' \\ sentence."
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    wanted = Histogram("vllm:time_s", about, [*LABELS], buckets=bounds, registry=theirs)
    tally = Tally("vllm:time_s", about, LABELS, bounds)
    ours.register(tally)
    own = wanted.labels(**LABELS)
    for value, count in observed:
        tally.observe(value, count)
        for _ in range(count):
            own.observe(value)
    return lines(ours), lines(theirs)


@pytest.mark.parametrize("bounds", [GAPS, DELIVERY, LENGTHS])
def test_it_tells_what_prometheus_own_histogram_does(bounds):
    rng = random.Random(0)
    # Sixteenths add up without rounding, in whatever order.
    observed = [(rng.randrange(1, 64) / 16, rng.randrange(1, 9)) for _ in range(200)]
    observed += [(0.0, 1), (2.0**17, 3), *((bound, 0) for bound in bounds)]
    ours, theirs = of_both(bounds, observed)
    assert ours == theirs


@pytest.mark.parametrize("bounds", [GAPS, DELIVERY, LENGTHS])
def test_a_value_on_a_bound_is_in_its_bucket(bounds):
    for bound in bounds:
        ours, theirs = of_both(bounds, [(bound, 1)])
        assert ours == theirs


def test_one_of_nothing_tells_noughts():
    ours, theirs = of_both(GAPS, [])
    assert ours == theirs and any('le="+Inf"' in line for line in ours)


def test_an_answer_has_as_many_gaps_as_tokens_less_one_however_they_come_together():
    for counts in ((1, 1, 1, 1), (2, 0, 2), (4,), (3, 1)):
        metrics = Metrics("demo-7m", "vllm", dict)
        clock = AnswerClock(metrics, 5)
        for count in counts:
            clock.tokens(count)
        assert (metrics.sums["tokens"], metrics.sums["gaps"]) == (4, 3)
        (sample,) = [
            line
            for line in metrics.text().decode().split("\n")
            if line.startswith("vllm:inter_token_latency_seconds_count")
        ]
        assert sample.endswith(" 3.0")
