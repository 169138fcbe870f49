"""Prometheus metrics under vLLM's names and labels, so that its dashboards work.

Counts of requests and tokens are kept here as answers pass; what the engine holds is asked when
somebody scrapes. What no other engine has (a stage's share of work) is under `llmpq:` always.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from llmpq.runtime.report import engine_metrics
from llmpq.runtime.report.engine_metrics import metrics_of
from llmpq.runtime.requests.request import FinishReason
from llmpq.runtime.requests.request_output import CompletionDelta
from llmpq.runtime.serve.gate import ARRIVED_S

SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
DELIVERY = (
    0.00025,
    0.0005,
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
)
"""Upper bounds of buckets in seconds: of whole requests, between tokens, of sending a token."""
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Upper bounds of buckets in tokens."""
_OF_REQUESTS = {
    "request_queue_time_seconds": ("From a request's arrival to its first step.", SECONDS),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", SECONDS),
    "request_decode_time_seconds": ("From a request's first token to its last.", SECONDS),
    "request_inference_time_seconds": ("From a request's first step to its last token.", SECONDS),
    "request_max_num_generation_tokens": ("Tokens of a prompt's longest answer.", LENGTHS),
    "request_params_n": ("Answers that a prompt asks for.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Tokens that an answer may have.", LENGTHS),
}
"""Histograms of requests that vLLM's dashboards draw: name -> help text, buckets."""
LABELS = ("model_name", "engine")
STAGE_LABELS = ("engine", "stage", "device", "node")


class Tally:
    """A histogram that every token is added to, for which prometheus_client's is too slow.

    Equal values are added together, all in one thread.
    """

    def __init__(
        self, name: str, about: str, labels: Mapping[str, str], bounds: Sequence[float]
    ) -> None:
        """`bounds` rise; what is above the last is counted, too."""
        self._name = name
        self._about = about
        self._labels = labels
        self._bounds, self._sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, count: int) -> None:
        """Add a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram, for a scrape."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        totals = accumulate(self._counts)
        made = HistogramMetricFamily(self._name, self._about, labels=[*self._labels])
        made.add_metric([*self._labels.values()], [*zip(names, totals, strict=True)], self._sum)
        yield made


class Metrics:
    """The counters of one server."""

    def __init__(
        self,
        model: str,
        prefix: str,
        gauges: Callable[[], Mapping[str, Any]],
        engine: str = "0",
    ) -> None:
        """`gauges` says what the engine holds now, as `LLM.stats` does; empty while it loads."""
        self.registry = CollectorRegistry()
        self.registry.register(_OwnProcess(engine))
        self._labels = {"model_name": model, "engine": engine}
        self.prefix, self._gauges = prefix, gauges
        self.registry.register(_EngineState(self))

        histogram = self._histogram

        def counter(name: str, about: str, more: tuple[str, ...] = ()) -> Counter:
            return Counter(f"{prefix}:{name}", about, (*LABELS, *more), registry=self.registry)

        self.first_token_s = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS
        )
        self.gap_s = self._tally(
            "inter_token_latency_seconds", "Between two tokens of an answer.", GAPS
        )
        self.delivery_s = self._tally(
            "token_delivery_seconds",
            "From a streamed token's being read from the stages to its bytes' being sent.",
            DELIVERY,
        )
        self.per_token_s = histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first.", GAPS
        )
        self.total_s = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", SECONDS
        )
        self.prompt_lengths = histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTHS)
        self.answer_lengths = histogram(
            "request_generation_tokens", "Tokens of an answer.", LENGTHS
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of all prompts.").labels(
            **self._labels
        )
        self.answer_tokens = counter("generation_tokens", "Tokens of all answers.").labels(
            **self._labels
        )
        self.of_requests = {name: histogram(name, *bounds) for name, bounds in _OF_REQUESTS.items()}
        self.sums: dict[str, float] = dict.fromkeys(
            ("requests", "tokens", "first_token_s", "first_tokens", "gap_s", "gaps"), 0.0
        )
        """What the page draws, since the start."""
        self._ended = counter("request_success", "Answers that ended.", ("finished_reason",))
        for reason in get_args(FinishReason):  # a rate of the first one needs the 0 before it
            self._ended.labels(**self._labels, finished_reason=reason)
        self._responses = Counter(
            "llmpq:http_responses", "HTTP answers by status.", ("status",), registry=self.registry
        )

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(
            f"{self.prefix}:{name}", about, LABELS, buckets=buckets, registry=self.registry
        )
        return made.labels(**self._labels)

    def _tally(self, name: str, about: str, bounds: tuple[float, ...]) -> Tally:
        made = Tally(f"{self.prefix}:{name}", about, self._labels, bounds)
        self.registry.register(made)
        return made

    def asked(self, n: int, max_tokens: int | None) -> None:
        """Count a prompt by the answers, and the tokens of each, that it asks for."""
        self.of_requests["request_params_n"].observe(n)
        if max_tokens is not None:
            self.of_requests["request_params_max_tokens"].observe(max_tokens)

    def longest(self, num_tokens: int) -> None:
        """Count the longest answer of a prompt."""
        self.of_requests["request_max_num_generation_tokens"].observe(num_tokens)

    def ended(self, reason: str) -> None:
        """Count an answer that ended."""
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def answered(self, status: int) -> None:
        """Count an HTTP answer."""
        self._responses.labels(status=str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def state(self) -> tuple[Mapping[str, Any], dict[str, str]]:
        """Return what the engine holds, and the labels that go with it."""
        return self._gauges(), self._labels


class AnswerClock:
    """The times of one answer, from the arrival of its request on."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, *, streamed: bool = False) -> None:
        """`streamed`: each token is `sent`, and the first one's time ends there."""
        self._streamed = streamed
        self._metrics, self._began_s = metrics, ARRIVED_S.get() or time.perf_counter()
        self._last_s: float | None = None
        self._first_s = 0.0
        self.num_tokens = 0
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.prompt_lengths.observe(prompt_tokens)

    def tokens(self, count: int) -> None:
        """Note tokens that came; several at once share the time since the last.

        Those that come with the first one come no later: so many gaps as tokens, less one.
        """
        if count == 0:
            return
        now_s, sums = time.perf_counter(), self._metrics.sums
        sums["tokens"] += count
        gaps, gap_s = count, 0.0
        if self._last_s is None:
            self._first_s, gaps = now_s, count - 1
            if not self._streamed:
                self._first(now_s)
        else:
            gap_s = now_s - self._last_s
        if gaps:
            sums["gap_s"] += gap_s
            sums["gaps"] += gaps
            self._metrics.gap_s.observe(gap_s / gaps, gaps)
        self._last_s = now_s
        self.num_tokens += count
        self._metrics.answer_tokens.inc(count)

    def sent(self, new: CompletionDelta) -> None:
        """Note that what is new of a stream has been handed to the connection."""
        now_s = time.perf_counter()
        if self.num_tokens and self.num_tokens == len(new.token_ids):
            self._first(now_s)
        self._metrics.delivery_s.observe(now_s - new.heard_s, len(new.token_ids))

    def _first(self, now_s: float) -> None:
        self._metrics.sums["first_token_s"] += now_s - self._began_s
        self._metrics.sums["first_tokens"] += 1
        self._metrics.first_token_s.observe(now_s - self._began_s)

    def end(self, last: CompletionDelta) -> None:
        """Note the answer's end."""
        for name, value_s in (
            ("queue", last.queue_s),
            ("prefill", last.first_token_s - last.queue_s),
            ("decode", last.total_s - last.first_token_s),
            ("inference", last.total_s - last.queue_s),
        ):
            self._metrics.of_requests[f"request_{name}_time_seconds"].observe(value_s)
        self._end(last.finish_reason or "abort")

    def abort(self) -> None:
        """Count the answer as aborted: its client is gone."""
        self._end("abort")

    def _end(self, reason: str) -> None:
        now_s = time.perf_counter()
        self._metrics.total_s.observe(now_s - self._began_s)
        self._metrics.answer_lengths.observe(self.num_tokens)
        if self.num_tokens > 1 and self._last_s is not None:
            mean_s = (self._last_s - self._first_s) / (self.num_tokens - 1)
            self._metrics.per_token_s.observe(mean_s)
        self._metrics.sums["requests"] += 1
        self._metrics.ended(reason)


class _OwnProcess:
    """The server's process (CPU time, memory, open files): one for each engine, by its number."""

    def __init__(self, engine: str) -> None:
        self._engine, self._process = engine, ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield prometheus_client's metrics of a process, each with the engine's number."""
        for metric in self._process.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "engine": self._engine})
                for sample in metric.samples
            ]
            yield metric


class _EngineState:
    """What is asked of the engine at every scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        stats, labels = self._metrics.state()
        held = stats.get("gauges", {})
        yield from map(_family, metrics_of(stats, labels, prefix=self._metrics.prefix))
        yield from _of_stages(stats.get("stages", ()), labels["engine"], held)
        yield from _of_recoveries(stats.get("recoveries", ()), labels["engine"])


def _of_recoveries(recoveries: Sequence[Mapping[str, Any]], engine: str) -> Iterator[Metric]:
    """Yield how often lost stages were recovered, how long that took, and whether it is done."""
    over = [one for one in recoveries if one["measured_s"] is not None]
    names = ("engine", "action")
    actions = sorted({str(one["action"]) for one in over}) or ["restart"]
    for name, about, key in (
        ("recoveries", "Recoveries from lost stages.", None),
        ("recovery_seconds", "Seconds that recoveries took.", "measured_s"),
        ("recovery_predicted_seconds", "Seconds that recoveries were to take.", "predicted_s"),
    ):
        counter = CounterMetricFamily(f"llmpq:{name}", about, labels=names)
        for action in actions:
            own = [one for one in over if one["action"] == action]
            total = len(own) if key is None else sum(one[key] or 0.0 for one in own)
            counter.add_metric((engine, action), float(total))
        yield counter
    about = "Whether lost stages are being recovered."
    gauge = GaugeMetricFamily("llmpq:recovering", about, labels=("engine",))
    gauge.add_metric((engine,), float(len(over) < len(recoveries)))
    yield gauge


def _family(metric: engine_metrics.Metric) -> Metric:
    """Return an engine's metric as Prometheus has it."""
    names, values = [*metric.labels], [*metric.labels.values()]
    if isinstance(metric, engine_metrics.Histogram):
        made = HistogramMetricFamily(metric.name, metric.about, labels=names)
        made.add_metric(values, [*metric.buckets.items()], metric.sum)
        return made
    if isinstance(metric, engine_metrics.Counter):
        counter = CounterMetricFamily(metric.name, metric.about, labels=names)
        counter.add_metric(values, float(metric.value))
        return counter
    assert isinstance(metric, engine_metrics.Gauge), "there are three kinds"
    gauge = GaugeMetricFamily(metric.name, metric.about, labels=names)
    gauge.add_metric(values, metric.value)
    return gauge


def _of_stages(
    stages: Sequence[Mapping[str, Any]], engine: str, held: Mapping[str, int]
) -> Iterator[Metric]:
    """Yield what each stage holds, and how long it has computed: what no other engine tells."""
    yield from _step_times(stages, engine)
    names = STAGE_LABELS
    for name, about in (
        ("weights_bytes", "Bytes of weights on a stage."),
        ("kv_bytes", "Bytes of KV memory on a stage."),
    ):
        gauge = GaugeMetricFamily(f"llmpq:stage_{name}", about, labels=names)
        for index, stage in enumerate(stages):
            gauge.add_metric((engine, str(index), stage["device"], stage["node"]), stage[name])
        yield gauge
    # Every stage has its layers' part of each of the pool's blocks.
    for name, about, key in (
        ("kv_blocks", "Blocks of a stage's KV pool.", "blocks"),
        ("kv_blocks_held", "Blocks of a stage's KV pool that requests hold.", "blocks_held"),
    ):
        gauge = GaugeMetricFamily(f"llmpq:stage_{name}", about, labels=names)
        for index, stage in enumerate(stages):
            labels = (engine, str(index), stage["device"], stage["node"])
            gauge.add_metric(labels, float(held.get(key, 0)))
        yield gauge
    about = "Seconds that a stage has computed; its rate is the stage's busy share."
    busy = CounterMetricFamily("llmpq:stage_busy_seconds", about, labels=names)
    for index, stage in enumerate(stages):
        busy.add_metric((engine, str(index), stage["device"], stage["node"]), stage["busy_s"])
    yield busy


def _step_times(stages: Sequence[Mapping[str, Any]], engine: str) -> Iterator[Metric]:
    """Yield how long each stage's steps took, and what the plan promised of them."""
    labels = (*STAGE_LABELS, "kind")
    for name, about, key in (
        ("step_seconds", "Seconds that a stage has computed, by kind of step.", "busy_s"),
        ("steps", "Steps of a stage, by kind; step_seconds by steps is a step's time.", "steps"),
        ("step_rows", "Requests in a stage's steps, by kind of step.", "rows"),
    ):
        measured = CounterMetricFamily(f"llmpq:stage_{name}", about, labels=labels)
        for index, stage in enumerate(stages):
            for kind, total in stage["kinds"].items():
                own = (engine, str(index), stage["device"], stage["node"], kind)
                measured.add_metric(own, total[key])
        yield measured
    for name, about, key in (
        ("predicted_step_seconds", "Seconds that the plan promised of a stage's step.", "seconds"),
        ("predicted_step_rows", "Requests in the step whose seconds the plan promised.", "rows"),
    ):
        promised = GaugeMetricFamily(f"llmpq:stage_{name}", about, labels=labels)
        for index, stage in enumerate(stages):
            for kind, predicted in stage["predicted"].items():
                own = (engine, str(index), stage["device"], stage["node"], kind)
                promised.add_metric(own, predicted[key])
        yield promised
