"""What a run came to: predicted beside measured, per stage and for the whole job.

The names of the throughput and latency fields are those of vLLM's benchmarks.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmpq.file_form import replace_text
from llmpq.pictures.html_page import Picture
from llmpq.pictures.run_page import run_page, timeline_page
from llmpq.plans.plan import Plan, StagePlan
from llmpq.plans.shared_run import predicted_of
from llmpq.plans.topology import Topology
from llmpq.runtime.requests.request_output import CompletionOutput, RequestOutput
from llmpq.runtime.steps.trace import REPORTED_EVENTS, LoadReport, StageRecord
from llmpq.units import format_size
from llmpq.version import __version__

MOST_BARS = 3000
"""Steps of all stages together that a report has; the beginning of longer runs."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """Everything the report is made of."""

    plan: Plan
    loads: Sequence[LoadReport]
    records: Sequence[StageRecord]
    outputs: Sequence[RequestOutput]
    num_failed: int
    startup_s: float
    speculation: dict[str, Any] | None = None
    """What came of the drafts."""
    places: Sequence[Mapping[str, Any]] = ()
    """Host, address and device of every stage, as it reported them."""
    plain: Sequence[RequestOutput] | None = None
    """The same requests, served again by the same stages without drafts."""
    recoveries: Sequence[Mapping[str, Any]] = ()
    """What was done each time that a stage was lost, predicted beside measured."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Rates, requests and KV blocks over time."""
    took_s: float | None = None
    """Of the job, where its requests were not all submitted at once."""

    @property
    def finished(self) -> list[CompletionOutput]:
        """All answers."""
        return _answers(self.outputs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def wall_s(self) -> float:
        """Time from the submission of the first request to the end of the last one."""
        return _wall_s(self.finished) if self.took_s is None else self.took_s

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers, without those that they went on from."""
        return _num_tokens(self.finished)


def _answers(outputs: Sequence[RequestOutput]) -> list[CompletionOutput]:
    return [answer for output in outputs for answer in output.outputs]


def _wall_s(finished: Sequence[CompletionOutput]) -> float:
    return max((request.total_s for request in finished), default=0.0)


def _num_tokens(finished: Sequence[CompletionOutput]) -> int:
    return sum(len(request.token_ids) - request.num_before for request in finished)


class JobReport(dict[str, Any]):
    """A report as JSON data; a notebook shows it as a page."""

    def __init__(self, data: Mapping[str, Any], plan: Plan) -> None:
        super().__init__(data)
        self._plan = plan

    def page(self) -> str:
        """Return the page of the run, one HTML file."""
        return run_page(self, self._plan)

    def plot(self) -> Picture:
        """Return the page as a notebook shows it; `save` writes the file."""
        return Picture(self.page())

    def plot_timeline(self) -> Picture:
        """Return what each stage did when, as a notebook shows it."""
        return Picture(timeline_page(self), height=150 + 60 * len(self["stages"]))

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_()


def build_report(job: JobResult) -> JobReport:
    """Return the report as JSON data; times in seconds unless the name says milliseconds."""
    return JobReport(_report_data(job), job.plan)


def _report_data(job: JobResult) -> dict[str, Any]:
    plan, wall_s = job.plan, job.wall_s
    # With more requests than run at once prompts and tokens are interleaved: no two phases.
    fixed = len(job.finished) <= plan.workload.batch
    prefill_s = max((r.first_token_s for r in job.finished), default=0.0) if fixed else None
    decode_s = wall_s - prefill_s if prefill_s is not None else None
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    predicted = plan.predicted.model_dump(mode="json") if plan.predicted is not None else None
    return {
        "schema": 1,
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "workload": plan.workload.model_dump(mode="json"),
        "prefill_microbatch": plan.prefill_microbatch,
        "decode_microbatch": plan.decode_microbatch,
        "completed": len(job.finished),
        "failed": job.num_failed,
        "total_input_tokens": job.prompt_tokens,
        "total_output_tokens": job.generated_tokens,
        "versions": versions(),
        "plan": plan.model_dump(mode="json", by_alias=True),
        "startup_s": job.startup_s,
        "predicted": predicted,
        "predicted_of_run": predicted_of_run(plan, job),
        "measured": {"prefill_s": prefill_s, "decode_s": decode_s, "total_s": wall_s},
        "request_throughput": len(job.finished) * per_s,
        "output_throughput": job.generated_tokens * per_s,
        "total_token_throughput": (job.generated_tokens + job.prompt_tokens) * per_s,
        **_latencies(job.finished),
        "speculation": _speculation(job),
        "recoveries": list(job.recoveries),
        "samples": list(job.samples),
        "timeline": timeline_data(job.records),
        "stages": [
            {**_stage(stage, load, record, wall_s), **place}
            for stage, load, record, place in zip(
                plan.places,
                job.loads,
                job.records,
                job.places or [{}] * len(plan.places),
                strict=True,
            )
        ],
    }


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """What one of several engines did of a job that they shared."""

    report: JobReport | None
    """None of one that was lost."""
    ended_s: float
    """When it ended its last row, since the job began."""
    taken_over: int
    """Rows that it took over from others."""
    lost: str | None
    """Why it was lost, if it was."""


def engines_report(
    topology: Topology,
    results: Sequence[EngineResult],
    outputs: Sequence[RequestOutput],
    *,
    num_failed: int,
    startup_s: float,
    samples: Sequence[Mapping[str, Any]] = (),
) -> JobReport:
    """Return the report of a job that several engines shared: of all, and under `engines` of each.

    `results`: of each engine of the topology, in order.
    """
    finished = _answers(outputs)
    wall_s = max((result.ended_s for result in results), default=0.0)
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    tokens, prompts = _num_tokens(finished), sum(len(o.prompt_token_ids) for o in outputs)
    engines = [
        {
            "engine": number,
            "planned_rows": share.rows,
            "rows": sum(output.engine == number for output in outputs),
            "taken_over": result.taken_over,
            "ended_s": result.ended_s,
            "lost": result.lost,
            "output_tokens": sum(_num_tokens(o.outputs) for o in outputs if o.engine == number),
            "report": None if result.report is None else without_timeline(result.report),
        }
        for number, (share, result) in enumerate(zip(topology.engines, results, strict=True))
    ]
    present = [(n, result.report) for n, result in enumerate(results) if result.report is not None]

    def of_all(key: str) -> list[Any]:
        return [{"engine": number, **one} for number, part in present for one in part[key]]

    predicted = topology.predicted
    share = len(finished) / topology.workload.batch
    data = {
        "schema": 1,
        "model": topology.model.name,
        "cluster": topology.cluster.name,
        "workload": topology.workload.model_dump(mode="json"),
        "completed": len(finished),
        "failed": num_failed,
        "total_input_tokens": prompts,
        "total_output_tokens": tokens,
        "versions": versions(),
        "plan": topology.model_dump(mode="json", by_alias=True),
        "startup_s": startup_s,
        "predicted": None if predicted is None else predicted.model_dump(mode="json"),
        "predicted_of_run": None if predicted is None else {"total_s": share * predicted.total_s},
        "measured": {"prefill_s": None, "decode_s": None, "total_s": wall_s},
        "request_throughput": len(finished) * per_s,
        "output_throughput": tokens * per_s,
        "total_token_throughput": (tokens + prompts) * per_s,
        **_latencies(finished),
        "speculation": None,
        "recoveries": of_all("recoveries"),
        "samples": list(samples),
        "timeline": [steps for _, part in present for steps in part["timeline"]],
        "stages": of_all("stages"),
        "engines": engines,
    }
    return JobReport(data, topology.engines[0].plan)


def timeline_data(records: Sequence[StageRecord]) -> list[list[dict[str, Any]]]:
    """Return the first steps of every stage, in seconds since the first of all began."""
    most = min(REPORTED_EVENTS, MOST_BARS // max(1, len(records)))
    kept = [record.events[:most] for record in records]
    origin_s = min((event.start_s for events in kept for event in events), default=0.0)
    return [
        [
            {
                "kind": event.kind,
                "rows": event.rows,
                "start_s": round(event.start_s - origin_s, 6),
                "end_s": round(event.end_s - origin_s, 6),
                "ms": round(1e3 * (event.end_s - event.start_s), 3),
            }
            for event in events
        ]
        for events in kept
    ]


def without_timeline(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report without what is for pictures only: as it is printed."""
    return {key: value for key, value in report.items() if key not in ("timeline", "samples")}


def write_report(path: str, report: Mapping[str, Any], plan: Plan) -> None:
    """Write a report to a file: a page if its name ends in .html, else JSON."""
    if path.lower().endswith((".html", ".htm")):
        text = run_page(report, plan)
    else:
        text = json.dumps(report, indent=1) + "\n"
    replace_text(Path(path), text)


def predicted_of_run(plan: Plan, job: JobResult) -> dict[str, float] | None:
    """Return the plan's times for as many requests and tokens as ran, None where it has none."""
    return predicted_of(
        plan,
        completed=len(job.finished),
        prompt_tokens=job.prompt_tokens,
        output_tokens=job.generated_tokens,
    )


def versions() -> dict[str, str]:
    """Return the versions of llmpq, Python and what it computes with, where installed."""
    found = {"llmpq": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "ray"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _speculation(job: JobResult) -> dict[str, Any] | None:
    """Add to what came of the drafts how the stages' working time was spent."""
    if job.speculation is None:
        return None
    busy_s: dict[str, float] = {}
    for record in job.records:
        for kind, totals in record.totals.items():
            busy_s[kind] = busy_s.get(kind, 0.0) + totals.busy_s
    whole_s = sum(busy_s.values()) or 1.0
    return job.speculation | {
        "draft_bytes": sum(load.draft_bytes for load in job.loads),
        "time_share": {kind: seconds / whole_s for kind, seconds in busy_s.items()},
        "plain": None if job.plain is None else plain_comparison(job.outputs, job.plain),
    }


def plain_comparison(
    outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]
) -> dict[str, Any]:
    """Return the speed-up of answers with drafts over those of the same prompts without."""
    tokens = {output.request_id: list(output.outputs[0].token_ids) for output in plain}
    plain_s, with_drafts_s = _wall_s(_answers(plain)), _wall_s(_answers(outputs))
    plain_rate = _num_tokens(_answers(plain)) / plain_s if plain_s > 0 else 0.0
    rate = _num_tokens(_answers(outputs)) / with_drafts_s if with_drafts_s > 0 else 0.0
    return {
        "total_s": plain_s,
        "output_throughput": plain_rate,
        "speedup": rate / plain_rate if plain_rate > 0 else None,
        "rows_with_the_same_tokens": sum(
            tokens[o.request_id] == list(o.outputs[0].token_ids) for o in outputs
        ),
    }


def _latencies(finished: Sequence[CompletionOutput]) -> dict[str, float]:
    """Return time to first token, per further token and end to end, in milliseconds."""
    samples = {
        "ttft": [1e3 * r.first_token_s for r in finished],
        "tpot": [1e3 * r.per_token_s for r in finished if r.per_token_s is not None],
        "e2el": [1e3 * r.total_s for r in finished],
    }
    fields = {}
    for name, values in samples.items():
        if values:
            fields[f"mean_{name}_ms"] = statistics.fmean(values)
            fields[f"median_{name}_ms"] = statistics.median(values)
            fields[f"p99_{name}_ms"] = sorted(values)[int(0.99 * (len(values) - 1))]
    return fields


def _stage(
    stage: StagePlan, load: LoadReport, record: StageRecord, wall_s: float
) -> dict[str, Any]:
    memory, predicted = stage.memory, None
    # A run may be without prefixes; what it keeps of them beyond the plan is beside it.
    prefix = 0 if memory is None else min(memory.prefix_bytes, load.prefix_bytes)
    if memory is not None:
        predicted = memory.weights_bytes + memory.embedding_bytes + memory.kv_bytes + prefix
    return {
        "device": stage.device,
        "node": stage.node,
        "layers": list(stage.layers),
        "precisions": precision_runs(stage),
        "memory": {
            "weights_bytes": load.weights_bytes,
            "kv_bytes": load.kv_bytes,
            "prefix_bytes": load.prefix_bytes,
            "beside_plan_bytes": load.prefix_bytes - prefix,
            "measured_bytes": load.weights_bytes + load.kv_bytes - load.prefix_bytes + prefix,
            "predicted_bytes": predicted,
            "limit_bytes": memory.limit_bytes if memory is not None else None,
        },
        "runner": load.runner,
        "load_s": load.seconds,
        "predicted_prefill_s": stage.prefill_s,
        "predicted_decode_s": stage.decode_s,
        "busy_share": record.busy_s / wall_s if wall_s > 0 else None,
        "idle_share": max(0.0, 1 - record.busy_s / wall_s) if wall_s > 0 else None,
        "sending_share": record.sending_s / wall_s if wall_s > 0 else None,
        "steps": {
            kind: {
                "count": totals.steps,
                "rows": totals.rows,
                "busy_s": totals.busy_s,
                "mean_s": totals.mean_s,
            }
            for kind, totals in record.totals.items()
        },
    }


def precision_runs(stage: StagePlan) -> str:
    """Return the precisions of a stage as runs: `w8a16 x3, w4a16 x2`."""
    return ", ".join(
        f"{precision.value} x{len(list(run))}" for precision, run in groupby(stage.precisions)
    )


_SHARES = ("busy", "idle", "sending")
"""Computing and not computing; messages travel from GPU to GPU beside either."""


def print_summary(report: Mapping[str, Any], console: Console) -> None:
    """Print the report for a person: one table of stages, one of the job."""
    table = Table(title="stages (predicted / measured)", title_justify="left")
    if "engines" in report:
        print_engines(report["engines"], console)
    columns = ("stage", "layers", "precision", "weights+KV", "prefill ms", "decode ms")
    shown = _SHARES if any(stage["sending_share"] for stage in report["stages"]) else _SHARES[:1]
    for column in (*columns, *shown):
        table.add_column(column, justify="left" if column in ("stage", "precision") else "right")
    for stage in report["stages"]:
        memory, steps = stage["memory"], stage["steps"]
        shares = [stage[f"{name}_share"] for name in shown]
        table.add_row(
            stage["device"] if "engine" not in stage else f"{stage['engine']}: {stage['device']}",
            "{}-{}".format(stage["layers"][0], stage["layers"][1] - 1),
            stage["precisions"],
            _pair(memory["predicted_bytes"], memory["measured_bytes"], format_size),
            _pair(stage["predicted_prefill_s"], _mean(steps, "prefill"), _ms),
            _pair(stage["predicted_decode_s"], _mean(steps, "decode"), _ms),
            *("-" if share is None else f"{share:.0%}" for share in shares),
        )
    console.print(table)
    kept = [
        f"{stage['device']} {format_size(stage['memory']['beside_plan_bytes'])}"
        for stage in report["stages"]
        if stage["memory"]["beside_plan_bytes"]
    ]
    if kept:
        console.print(f"beside the plan, for prefixes found again: {', '.join(kept)}")
    predicted, measured = report["predicted_of_run"] or {}, report["measured"]
    parts = [
        f"{name} {_pair(predicted.get(key), measured[key], _seconds)}"
        for name, key in (("prefill", "prefill_s"), ("decode", "decode_s"), ("total", "total_s"))
    ]
    requests = f"{report['completed']} request{'s' * (report['completed'] != 1)}"
    whose = "predicted for their tokens / measured"
    console.print(f"time of {requests} ({whose}): " + ", ".join(parts))
    for line in speculation_lines(report):
        console.print(line)
    if report["recoveries"]:
        console.print(_recoveries_line(report["recoveries"]))
    console.print(
        f"{report['completed']} rows done, {report['failed']} failed; "
        f"{report['total_output_tokens']} tokens generated, "
        f"{report['output_throughput']:.0f} tokens/s"
    )


def print_engines(engines: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print what each of several engines did."""
    table = Table(title="engines", title_justify="left")
    for column in ("engine", "rows (planned)", "rows", "taken over", "tokens", "ended after"):
        table.add_column(column, justify="right")
    for one in engines:
        table.add_row(
            str(one["engine"]),
            str(one["planned_rows"]),
            str(one["rows"]),
            str(one["taken_over"]),
            str(one["output_tokens"]),
            "lost" if one["lost"] is not None else _seconds(one["ended_s"]),
        )
    console.print(table)


def _recoveries_line(recoveries: Sequence[Mapping[str, Any]]) -> str:
    """Return how often stages were lost, and how long others took to take over."""
    seconds = {
        key: sum(one[f"{key}_s"] or 0.0 for one in recoveries) for key in ("predicted", "measured")
    }
    count = f"{len(recoveries)} recover{'y' if len(recoveries) == 1 else 'ies'}"
    times = _pair(seconds["predicted"], seconds["measured"], _seconds)
    return f"{count} from lost stages (predicted / measured): {times} in all"


def speculation_lines(report: Mapping[str, Any]) -> list[str]:
    """Return what came of the drafts, of each engine where there are several."""
    lines = [] if report["speculation"] is None else [_speculation_line(report["speculation"])]
    for one in report.get("engines", ()):
        seen = None if one["report"] is None else one["report"]["speculation"]
        if seen is not None:
            lines.append(f"engine {one['engine']}: {_speculation_line(seen)}")
    return lines


def _speculation_line(seen: Mapping[str, Any]) -> str:
    if not seen["verifies"]:
        return f"speculation {seen['mode']}: off throughout, it would not have paid"
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in seen["time_share"].items())
    line = (
        f"speculation {seen['mode']}, gamma {seen['gamma']}: {seen['acceptance']:.0%} of drafted "
        f"tokens accepted, {seen['tokens_per_verify']:.2f} tokens a verify; time: {shares}"
    )
    plain = seen["plain"]
    return line if plain is None else f"{line}; {plain['speedup']:.2f}x plain decoding"


def _mean(steps: Mapping[str, Mapping[str, float]], kind: str) -> float | None:
    return steps[kind]["mean_s"] if kind in steps else None


def _pair(predicted: float | None, measured: float | None, show: Any) -> str:
    left = "-" if predicted is None else show(predicted)
    return f"{left} / {'-' if measured is None else show(measured)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"
