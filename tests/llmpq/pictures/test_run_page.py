"""The page of a run: each number is the report's, long runs stay small, notebooks have the same."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from browser import browser, faults_in_every_look, needs_browser
from llmpq.pictures.html_page import Picture
from llmpq.pictures.run_page import run_page, timeline_page
from llmpq.plans.plan import Plan
from llmpq.units import format_size

pytestmark = pytest.mark.pure
ROOT = Path(__file__).resolve().parents[3]


def a_stage(name: str, steps: int) -> dict[str, Any]:
    totals = {"count": steps, "rows": 3 * steps, "busy_s": 0.0125 * steps, "mean_s": 0.0125}
    return {
        "device": name,
        "node": "here",
        "layers": [3, 11],
        "precisions": "w8a16 x8",
        "memory": {"weights_bytes": 7_000_001, "kv_bytes": 90_001, "measured_bytes": 7_090_002,
                   "predicted_bytes": 7_654_321, "limit_bytes": 10**9},
        "runner": "CpuStageRunner",
        "load_s": 1.25,
        "predicted_prefill_s": 0.0345,
        "predicted_decode_s": 0.0111,
        "busy_share": 0.43,
        "idle_share": 0.57,
        "sending_share": 0.0,
        "steps": {"prefill": totals, "decode": {**totals, "mean_s": 0.0167}},
    }  # fmt: skip


def a_report(*, requests: int = 7, stages: int = 2, steps: int = 5) -> dict[str, Any]:
    names = [f"dev-{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(stages)]
    bars = [
        {"kind": ("prefill", "decode", "verify")[i % 3], "rows": 3, "start_s": 0.02 * i,
         "end_s": 0.02 * i + 0.0125, "ms": 12.5}
        for i in range(steps)
    ]  # fmt: skip
    samples = [
        {"t_s": 0.5 * i, "tokens_per_s": 31.5 + i, "running": 4, "waiting": 2, "blocks_held": i,
         "blocks": 61}
        for i in range(1, min(240, requests))
    ]  # fmt: skip
    lost = {"reason": "stage 1 was lost: killed", "phase": "decode", "stage": 1,
            "action": "restart", "began": "then", "attempts": 2, "predicted_s": 4.125,
            "measured_s": 5.375, "pause_s": 6.625, "plan": None}  # fmt: skip
    return {
        "model": "demo",
        "cluster": "box",
        "completed": requests,
        "failed": 3,
        "total_input_tokens": 701,
        "total_output_tokens": 809,
        "startup_s": 2.345,
        "predicted_of_run": {"prefill_s": 0.111, "decode_s": 0.222, "total_s": 0.333},
        "measured": {"prefill_s": 0.121, "decode_s": 0.232, "total_s": 0.353},
        "output_throughput": 123.4,
        **{f"{which}_{name}_ms": 10.25 + i for i, (which, name) in enumerate(
            (which, name) for which in ("mean", "median", "p99") for name in ("ttft", "tpot"))},
        "speculation": {"mode": "ngram", "verifies": 77, "acceptance": 0.66, "gamma": 3,
                        "tokens_per_verify": 2.98, "plain": {"speedup": 1.37}},
        "recoveries": [lost],
        "errors": [{"row": 19, "message": "the prompt <has> no tokens"}],
        "samples": samples,
        "timeline": [bars for _ in names],
        "stages": [a_stage(name, steps) for name in names],
    }  # fmt: skip


class Texts(HTMLParser):
    """Texts of a page but for scripts and styles; the data in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.shown, self.data, self._tag = "", "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self._tag = tag

    def handle_data(self, data):
        if self._tag == "script":
            self.data = data if data.startswith("{") else self.data
        elif self._tag not in ("style", "footer"):
            self.shown += data + "\n"


def known(report: dict[str, Any]) -> set[str]:
    """Every number of a report as a page may write it."""
    found: set[str] = {"99"}  # the percentile
    found.update(str(len(steps)) for steps in report["timeline"])

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for inner in node.values():
                walk(inner)
        elif isinstance(node, list):
            for inner in node:
                walk(inner)
        elif isinstance(node, str):
            found.update(re.findall(r"\d+", node))
        elif isinstance(node, (int, float)):
            value = 1e3 * node
            found.update((str(node), f"{node:.1f}", f"{node:.2f}", f"{node:.3f} s"))
            found.update((f"{node:.1f} ms", f"{node:.2f} ms", f"{node:.0%}", format_size(node)))
            found.add(f"{value:.1f} ms" if value >= 10 else f"{value:.3g} ms")

    walk(report)
    for stage in report["stages"]:
        found.add(str(stage["layers"][1] - 1))
    return found


NUMBER = re.compile(r"(?<![\w.,])\d+(?:\.\d+)?(?:%| (?:B|KiB|MiB|GiB|ms|s)\b)?")


def test_every_number_shown_is_the_reports() -> None:
    report = a_report()
    page = Texts(run_page(report))
    numbers = {n.replace("\n", "") for n in NUMBER.findall(page.shown)}
    assert len(numbers) > 30
    assert numbers - known(report) == set()
    assert json.loads(page.data)["report"] == report
    assert "<has>" in page.shown and "stage 1 was lost: killed" in page.shown


def test_a_number_that_is_not_the_reports_is_found() -> None:
    report = a_report()
    shown = Texts(run_page(report).replace("123.4", "123.5")).shown
    assert "123.5" in set(NUMBER.findall(shown)) - known(report)


def test_charts_are_of_the_report() -> None:
    report = a_report()
    charts = json.loads(Texts(run_page(report)).data)["charts"]
    for kind in ("prefill", "decode"):
        rows = charts[f"{kind}-steps"]["data"]["values"]
        for row in rows:
            (stage,) = (s for s in report["stages"] if s["device"] == row["stage"])
            means = {"predicted": stage[f"predicted_{kind}_s"]}
            means["measured"] = stage["steps"][kind]["mean_s"]
            assert row["ms"] == 1e3 * means[row["which"]]
    bars = charts["timeline"]["data"]["values"]
    given = [bar for bars_of in report["timeline"] for bar in bars_of]
    assert [{k: bar[k] for k in ("start_s", "end_s", "ms")} for bar in bars] == [
        {k: bar[k] for k in ("start_s", "end_s", "ms")} for bar in given
    ]
    values = charts["tokens-over-time"]["data"]["values"]
    assert [v["value"] for v in values] == [s["tokens_per_s"] for s in report["samples"]]


def test_the_numbers_of_a_real_run_are_its_reports() -> None:
    report = json.loads((ROOT / "docs/run.json").read_text())
    plan = Plan.model_validate_json(json.dumps(report["plan"]))
    page = Texts(run_page(report))
    assert {n.replace("\n", "") for n in NUMBER.findall(page.shown)} - known(report) == set()
    held = json.loads(Texts(run_page(report, plan)).data)
    assert held["report"] == report and held["plan"] == json.loads(plan.dump_json())


def test_a_long_run_over_many_stages_is_a_small_file() -> None:
    report = a_report(requests=10_000, stages=64, steps=46)
    report["errors"] = [{"row": i, "message": "x" * 80} for i in range(1000)]
    assert len(run_page(report)) < 3_000_000


def test_a_run_of_nothing_has_a_page() -> None:
    nothing = a_report() | {
        "completed": 0, "predicted_of_run": None, "speculation": None, "recoveries": [],
        "samples": [], "timeline": [], "stages": [], "errors": [],
        "measured": {"prefill_s": None, "decode_s": None, "total_s": 0.0},
    }  # fmt: skip
    assert json.loads(Texts(run_page(nothing)).data)["charts"] == {}
    assert "nothing ran" in timeline_page(nothing)


def test_notebooks_show_the_same() -> None:
    plan = Plan.load(ROOT / "docs/plan.json")
    assert plan._repr_html_() == (ROOT / "docs/plan.svg").read_text()
    frame = plan.plot()._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and frame.count("<iframe") == 1
    assert "&lt;!doctype html&gt;" in frame


def test_a_picture_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "pages" / "timeline.html"
    picture = Picture(timeline_page(a_report()))
    picture.save(path)
    assert "<h1>demo on box: a run</h1>" in path.read_text()
    with pytest.raises(ValueError, match="cannot write '.*': it is a directory"):
        picture.save(tmp_path)
    with pytest.raises(ValueError, match="cannot write '.*/x.html': '.*' is not a directory"):
        picture.save(path / "x.html")


@needs_browser
def test_a_browser_draws_it_without_a_network(tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(run_page(a_report(), Plan.load(ROOT / "docs/plan.json")))
    with browser() as page:
        page.size(390)
        page.open(file.as_uri())
        drawn = "document.querySelectorAll('.chart svg').length"
        page.until(f"{drawn} === document.querySelectorAll('.chart').length")
        assert page.run(f"return {drawn}") == 6
        assert {"The run", "Lost stages", "Over time"} <= set(page.names("heading"))
        assert {"Save report.json", "Save as SVG"} <= set(page.names("button"))
        assert "stages: weights and KV cache, mean times of a step, share of the time" in " ".join(
            page.names("table")
        )
        assert faults_in_every_look(page) == []
        assert page.run("return performance.getEntriesByType('resource').length") == 0
        assert page.complaints() == []
