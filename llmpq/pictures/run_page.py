"""A run as one HTML file: predicted beside measured, what stages did when, what went wrong.

Everything is of the report of the run (report.json), and of its plan where that is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmpq.pictures.charts import over_time, pairs, timeline
from llmpq.pictures.html_page import HtmlPage, numbers, table
from llmpq.pictures.plan_cards import ms
from llmpq.pictures.plan_page import cards, note
from llmpq.units import format_size

if TYPE_CHECKING:
    from llmpq.plans.plan import Plan

Report = Mapping[str, Any]
"""A report as `LLM.job_report` returns it."""


def run_page(report: Report, plan: Plan | None = None) -> str:
    """Return the page of a run."""
    page = _new_page(report, plan)
    page.section("The run", _headline(report), note(_job_text(report)))
    page.section("Rows with errors", _errors(report))
    page.section("Lost stages", _recoveries(report))
    page.section("Predicted and measured", _job_table(report), _stage_table(report))
    page.section("Time of a step", *_step_charts(page, report), _steps_table(report))
    page.section("What the stages did", measured_timeline(page, report))
    page.section("Over time", *_over_time(page, report))
    page.section("Times of requests", _latencies(report))
    page.section("Drafts", _drafts(report))
    if plan is not None and plan.stages:
        page.section("Devices as planned", cards(plan))
    return page.text()


def timeline_page(report: Report) -> str:
    """Return a page with the timeline only."""
    page = _new_page(report, None)
    page.section("What the stages did", measured_timeline(page, report) or note(NO_STEPS))
    return page.text()


NO_STEPS = "The report has no steps: nothing ran."


def _new_page(report: Report, plan: Plan | None) -> HtmlPage:
    data: dict[str, Any] = {"report": dict(report)}
    if plan is not None:
        data["plan"] = json.loads(plan.dump_json())
    return HtmlPage(title=f"{report['model']} on {report['cluster']}: a run", data=data)


def _headline(report: Report) -> str:
    named = {
        "tokens/s": f"{report['output_throughput']:.1f}",
        "requests done": str(report["completed"]),
        "rows failed": str(report["failed"]),
        "time": f"{report['measured']['total_s']:.3f} s",
    }
    if "median_ttft_ms" in report:
        named["first token, median"] = f"{report['median_ttft_ms']:.1f} ms"
    if "median_tpot_ms" in report:
        named["further tokens, median"] = f"{report['median_tpot_ms']:.2f} ms"
    return numbers(named)


def _job_text(report: Report) -> str:
    return (
        f"{report['total_input_tokens']} prompt tokens, {report['total_output_tokens']} new ones; "
        f"loaded in {report['startup_s']:.3f} s"
    )


def _job_table(report: Report) -> str:
    predicted, measured = report["predicted_of_run"] or {}, report["measured"]
    rows = [
        [name, _seconds(predicted.get(key)), _seconds(measured.get(key))]
        for name, key in (("prefill", "prefill_s"), ("decode", "decode_s"), ("all", "total_s"))
    ]
    return table(
        ("phase", "predicted", "measured"),
        rows,
        caption="the whole job; - where prompts and tokens were mixed, or nothing was predicted",
        left=("phase",),
    )


def _stage_table(report: Report) -> str:
    rows = []
    for stage in report["stages"]:
        memory, steps = stage["memory"], stage["steps"]
        rows.append(
            [
                stage["device"],
                f"{stage['layers'][0]}-{stage['layers'][1] - 1}",
                stage["precisions"],
                _bytes(memory["predicted_bytes"]),
                _bytes(memory["measured_bytes"]),
                _ms(stage["predicted_prefill_s"]),
                _ms(_mean(steps, "prefill")),
                _ms(stage["predicted_decode_s"]),
                _ms(_mean(steps, "decode")),
                "-" if stage["busy_share"] is None else f"{stage['busy_share']:.0%}",
            ]
        )
    columns = (
        "stage",
        "layers",
        "bits",
        "memory, predicted",
        "measured",
        "prefill, predicted",
        "measured ",
        "decode, predicted",
        "measured  ",
        "busy",
    )
    caption = (
        "stages: weights and KV cache, mean times of a step, share of the time that it computed"
    )
    drawn = table(columns, rows, caption=caption, left=("stage", "layers", "bits"))
    kept = [
        f"{stage['device']} {format_size(stage['memory']['beside_plan_bytes'])}"
        for stage in report["stages"]
        if stage["memory"].get("beside_plan_bytes")
    ]
    return drawn + (
        note(f"beside the plan, for prefixes found again: {', '.join(kept)}") if kept else ""
    )


def _step_charts(page: HtmlPage, report: Report) -> list[str]:
    found = []
    for kind in ("prefill", "decode"):
        rows = []
        for stage in report["stages"]:
            values = {
                "predicted": stage[f"predicted_{kind}_s"],
                "measured": _mean(stage["steps"], kind),
            }
            rows += [
                {"stage": stage["device"], "which": which, "ms": 1e3 * seconds}
                for which, seconds in values.items()
                if seconds is not None
            ]
        if rows:
            title = f"ms of a {kind} step"
            caption = f"Mean time of a {kind} step, predicted and measured."
            found.append(page.chart(f"{kind}-steps", pairs(rows, title=title), caption))
    return found


def _steps_table(report: Report) -> str:
    rows = [
        [
            stage["device"],
            kind,
            str(totals["count"]),
            str(totals["rows"]),
            _ms(totals["mean_s"]),
            _seconds(totals["busy_s"]),
        ]
        for stage in report["stages"]
        for kind, totals in stage["steps"].items()
    ]
    columns = ("stage", "kind", "steps", "rows", "mean", "in all")
    return table(columns, rows, caption="steps by kind", left=("stage", "kind"))


def measured_timeline(page: HtmlPage, report: Report) -> str:
    """Return when each stage computed which step; the first steps of a long run."""
    bars = [
        {
            "stage": stage["device"],
            "kind": step["kind"],
            "start_s": step["start_s"],
            "end_s": step["end_s"],
            "ms": step["ms"],
            "what": f"{step['kind']}, {step['rows']} rows",
        }
        for stage, steps in zip(report["stages"], report.get("timeline", ()), strict=False)
        for step in steps
    ]
    if not bars:
        return ""
    counts = [sum(t["count"] for t in stage["steps"].values()) for stage in report["stages"]]
    longest = max(len(steps) for steps in report["timeline"])
    shown = "all steps" if longest >= max(counts) else f"the first {longest} steps of each stage"
    caption = f"A bar is a step of a stage, by the host's clock; shown are {shown}."
    names = [stage["device"] for stage in report["stages"]]
    return page.chart("timeline", timeline(names, bars), caption, zooms=True)


def _over_time(page: HtmlPage, report: Report) -> list[str]:
    samples: Sequence[Mapping[str, Any]] = report.get("samples", ())
    if len(samples) < 2:
        return []
    found = [
        page.chart(
            "tokens-over-time",
            over_time(samples, {"tokens_per_s": "tokens/s"}, title="tokens/s"),
            "Tokens generated in a second.",
        ),
        page.chart(
            "requests-over-time",
            over_time(samples, {"running": "running", "waiting": "waiting"}, title="requests"),
            "Requests that run and that wait.",
        ),
    ]
    if any(sample.get("blocks") for sample in samples):
        lines = {"blocks_held": "held", "blocks": "in the pool"}
        chart = over_time(samples, lines, title="KV blocks")
        found.append(page.chart("kv-over-time", chart, "Blocks of KV cache that requests hold."))
    return found


def _latencies(report: Report) -> str:
    named = {
        "ttft": "first token",
        "tpot": "each further token",
        "e2el": "whole answer",
    }
    rows = [
        [text, *(f"{report[f'{which}_{name}_ms']:.2f} ms" for which in ("mean", "median", "p99"))]
        for name, text in named.items()
        if f"mean_{name}_ms" in report
    ]
    columns = ("time to", "mean", "median", "99th percentile")
    return table(columns, rows, caption="latencies", left=("time to",))


def _drafts(report: Report) -> str:
    seen = report["speculation"]
    if seen is None:
        return ""
    named = {"drafts by": str(seen["mode"]), "verifies": str(seen["verifies"])}
    if seen["verifies"]:
        named["drafted tokens accepted"] = f"{seen['acceptance']:.0%}"
        named["tokens a verify"] = f"{seen['tokens_per_verify']:.2f}"
    plain = seen.get("plain")
    if plain is not None and plain["speedup"] is not None:
        named["times as fast as without"] = f"{plain['speedup']:.2f}"
    return numbers(named)


def _recoveries(report: Report) -> str:
    rows = [
        [
            one["began"],
            one["reason"],
            one["action"],
            str(one["attempts"]),
            _seconds(one["predicted_s"]),
            _seconds(one["measured_s"]),
            _seconds(one["pause_s"]),
        ]
        for one in report.get("recoveries", ())
    ]
    columns = ("began", "what was lost", "then", "attempts", "predicted", "took", "pause of tokens")
    left = ("began", "what was lost", "then")
    return table(columns, rows, caption="recoveries from lost stages", left=left)


def _errors(report: Report) -> str:
    errors: Sequence[Mapping[str, Any]] = report.get("errors", ())
    rows = [[str(one["row"]), one["message"]] for one in errors]
    more = report["failed"] - len(rows)
    caption = f"rows that failed, of {report['failed']}" if more > 0 else "rows that failed"
    return table(("row", "why"), rows, caption=caption, left=("why",))


def _mean(steps: Mapping[str, Mapping[str, Any]], kind: str) -> float | None:
    return steps[kind]["mean_s"] if kind in steps else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else ms(seconds)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


def _bytes(size: float | None) -> str:
    return "-" if size is None else format_size(size)
