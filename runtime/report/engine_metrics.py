"""What an engine counts, under vLLM's names: `LLM.get_metrics`, and what a server's /metrics asks.

Types are shaped as those of `vllm.v1.metrics.reader`. A server adds times of requests
(runtime/serve/metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from llmpq.runtime.steps.trace import STEP_TOKENS


@dataclass(frozen=True)
class Metric:
    """One number, or several, with their labels."""

    name: str
    about: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """It only grows."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """What is so now."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """How often something was at most so large."""

    count: int
    sum: float
    buckets: Mapping[str, int]
    """Upper bound -> how often it was no more."""


def metrics_of(
    stats: Mapping[str, Any], labels: Mapping[str, str], *, prefix: str = "vllm"
) -> list[Metric]:
    """Return what an engine counts; `stats` are those of `LLM.live_stats`, empty while it loads."""
    held = stats.get("gauges", {})
    found: list[Metric] = [
        Gauge(f"{prefix}:{name}", about, labels, float(value))
        for name, about, value in (
            ("num_requests_running", "Requests that hold memory.", stats.get("running", 0)),
            ("num_requests_waiting", "Requests that wait for memory.", stats.get("waiting", 0)),
            ("kv_cache_usage_perc", "Share of the KV memory in use.", kv_usage(held)),
        )
    ]
    found += [
        Counter(f"{prefix}:{name}", about, labels, int(held.get(key, 0)))
        for name, about, key in (
            ("prefix_cache_queries", "Prompt tokens looked up.", "prefix_queries"),
            ("prefix_cache_hits", "Prompt tokens found.", "prefix_hits"),
            ("num_preemptions", "Requests set aside for others.", "preemptions"),
        )
    ]
    found += _steps(stats, labels, prefix)
    if "cache" in stats:
        kept = {**labels, **{key: str(value) for key, value in stats["cache"].items()}}
        about = "How keys and values are kept."
        found.append(Gauge(f"{prefix}:cache_config_info", about, kept, 1.0))
    return found


def token_counters(stats: Mapping[str, Any], labels: Mapping[str, str]) -> list[Metric]:
    """Return what requests have had, where no server counts it."""
    prompts = stats.get("gauges", {}).get("prefix_queries", 0)  # those that were found, too
    return [
        Counter(f"vllm:{name}", about, labels, int(value))
        for name, about, value in (
            ("prompt_tokens", "Tokens of all prompts.", prompts),
            ("generation_tokens", "Tokens of all answers.", stats.get("generated_tokens", 0)),
            ("request_success", "Answers that ended.", stats.get("finished", 0)),
        )
    ]


def kv_usage(held: Mapping[str, int]) -> float:
    """Return the share of the pool's blocks that requests hold."""
    return held.get("blocks_held", 0) / max(1, held.get("blocks", 0))


def _steps(stats: Mapping[str, Any], labels: Mapping[str, str], prefix: str) -> Iterator[Metric]:
    """Yield how many tokens the engine's steps have had: the first stage knows."""
    stages = stats.get("stages", ())
    if not stages or "steps_by_tokens" not in stages[0]:
        return
    totals = [*accumulate(stages[0]["steps_by_tokens"])]
    yield Histogram(
        f"{prefix}:iteration_tokens_total",
        "Tokens of a step of the engine, of prompts and answers.",
        labels,
        count=totals[-1],
        sum=float(stages[0]["tokens"]),
        buckets=dict(zip([*map(str, map(float, STEP_TOKENS)), "+Inf"], totals, strict=True)),
    )
