"""The page of a plan: each number is the plan's, nothing is loaded, large plans stay small."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from browser import browser, faults_in_every_look, needs_browser
from llmpq.pictures.html_page import SCRIPTS
from llmpq.pictures.memory_parts import device_bytes, layer_runs, memory_parts
from llmpq.pictures.plan_cards import cards_svg
from llmpq.pictures.plan_page import Beside, plan_page
from llmpq.pictures.predicted_steps import predicted_steps
from llmpq.pictures.stage_links import link_loads
from llmpq.pictures.text_pictures import memory_bars
from llmpq.planner.__main__ import main
from llmpq.plans.plan import Plan
from llmpq.units import format_size, shown_loss

pytestmark = pytest.mark.pure
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "llmpq/pictures/vega"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.load(ROOT / "docs/plan.json")


class Shown(HTMLParser):
    """What a page shows without its charts, and the data that it holds."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.data = ""
        self._in: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link"):
            self._in.append(tag)
        self.texts += [value for name, value in attrs if name == "aria-label"]

    def handle_endtag(self, tag):
        assert self._in.pop() == tag, f"</{tag}> ends what is not open"

    def handle_data(self, data):
        if self._in and self._in[-1] == "script":
            self.data = data if data.startswith("{") else self.data
        elif self._in and self._in[-1] not in ("style", "footer"):
            self.texts.append(data)


NUMBER = re.compile(r"(?<![\w.,-])\d+(?:\.\d+)?(?:e-?\d+)?(?: (?:B|KiB|MiB|GiB|ms|s|%))?(?![\w.])")


def known(plan: Plan) -> set[str]:
    """Every number of a plan as a page may write it, from its file alone."""
    data = json.loads(plan.dump_json())
    found: set[str] = {"0", "4"}  # no loss, and that of "every layer at 4 bits"
    work, model = data["workload"], data["inputs"]["model"]

    def add(value: float) -> None:
        found.add(format_size(value))
        found.update((f"{value}", f"{value:.1f}", f"{value:.3f} s", f"{value:.4g}"))
        thousandth = 1e3 * value
        found.update((f"{thousandth:.1f} ms", f"{thousandth:.3g} ms"))

    def walk(node: object) -> None:
        if isinstance(node, dict):
            for inner in node.values():
                walk(inner)
        elif isinstance(node, list):
            for inner in node:
                walk(inner)
        elif isinstance(node, (int, float)) and not isinstance(node, bool):
            add(node)

    walk({key: value for key, value in data.items() if key != "inputs"})
    found.update(shown_loss(data["predicted"][f"{which}_omega"]) for which in ("sum", "all_4bit"))
    row = model["hidden"] * {"float32": 4}.get(work["dtype"], 2)
    prompt = min(work["prompt_len"], data["prefill_chunk"] or work["prompt_len"])
    counts = [data["prefill_microbatch"] * prompt * row, data["decode_microbatch"] * row]
    counts += [data["prefill_microbatch"] * 8, data["decode_microbatch"] * 8]
    for link in data["inputs"]["links"]:
        for size in counts:
            add(size)
            add(link["delay_s"] + link["handshake_s"] + link["per_byte_s"] * size)
    everything = [p for stage in data["stages"] for p in stage["precisions"]]
    for precision in set(everything):
        found.add(str(everything.count(precision)))
        found.update(re.findall(r"\d+", precision))
    for index, stage in enumerate(data["stages"]):
        found.update(str(n) for n in (index, stage["layers"][1] - stage["layers"][0]))
        found.update(str(n) for n in range(*stage["layers"]))
        runs, last = [], None
        for precision in stage["precisions"]:
            runs = [*runs[:-1], runs[-1] + 1] if precision == last else [*runs, 1]
            last = precision
        found.update(str(n) for n in runs)
        memory = stage["memory"]
        found.add(format_size(memory["limit_bytes"] - memory["total_bytes"]))
    return found


def test_every_number_shown_is_the_plans(plan: Plan) -> None:
    shown = Shown(plan_page(plan))
    assert json.loads(shown.data)["plan"] == json.loads(plan.dump_json())
    text = "\n".join(shown.texts)
    for stage in plan.stages:  # names have numbers, too
        text = text.replace(stage.device, "").replace(stage.kind, "")
    text = text.replace(plan.model.name, "").replace(plan.cluster.name, "")
    numbers = NUMBER.findall(text)
    assert len(numbers) > 100
    assert set(numbers) - known(plan) == set()


def test_a_number_that_is_not_the_plans_is_found(plan: Plan) -> None:
    page = plan_page(plan).replace("343.5", "343.6")
    assert "343.6" in set(NUMBER.findall("\n".join(Shown(page).texts))) - known(plan)


def test_charts_show_the_plans_times(plan: Plan) -> None:
    charts = json.loads(Shown(plan_page(plan)).data)["charts"]
    bars = charts["predicted-pipeline"]["data"]["values"]
    stages = {stage.device: stage for stage in plan.stages}
    assert {bar["kind"] for bar in bars} == {"prefill", "decode"}
    for bar in bars:
        stage = stages[bar["stage"]]
        seconds = stage.prefill_s if bar["kind"] == "prefill" else stage.decode_s
        assert bar["ms"] == 1e3 * seconds
        assert bar["end_s"] - bar["start_s"] == pytest.approx(seconds, abs=2e-6)


def test_the_predicted_pipeline_ends_as_predicted_and_no_stage_does_two_things(plan: Plan) -> None:
    found = predicted_steps(plan)
    assert found.tokens_shown == plan.workload.gen_len
    predicted = plan.predicted
    prefill = [step for step in found.steps if step.kind == "prefill"]
    assert max(step.end_s for step in prefill) == pytest.approx(predicted.prefill_s, rel=0.01)
    assert max(step.end_s for step in found.steps) == pytest.approx(predicted.total_s, rel=0.01)
    for stage in range(len(plan.stages)):
        own = sorted((s.start_s, s.end_s) for s in found.steps if s.stage == stage)
        assert all(a[1] <= b[0] + 1e-12 for a, b in zip(own, own[1:], strict=False))
    assert len(predicted_steps(plan, most=200).steps) <= 200


def test_parts_of_memory_are_all_of_it(plan: Plan) -> None:
    for index, stage in enumerate(plan.stages):
        parts = memory_parts(plan, index)
        assert sum(part.nbytes for part in parts) == device_bytes(stage)
        assert all(part.nbytes > 0 for part in parts)
        assert sum(run.count for run in layer_runs(stage)) == stage.num_layers
        assert sum(run.share for run in layer_runs(stage)) == pytest.approx(1)


def test_a_recurrent_models_states_are_apart_from_its_kv(tmp_path: Path) -> None:
    made = tmp_path / "plan.json"
    words = "--devices cpu=64GB+60GB/s+16threads --model qwen3.5-27b --batch 2 --bits 4 --dtype "
    assert main([*words.split(), "float32", "--json", "-o", str(made)]) == 0
    plan = Plan.load(made)
    sizes = {part.name: part.nbytes for part in memory_parts(plan, 0)}
    assert sizes["recurrent state"] == 2 * plan.pool.state_bytes
    assert sizes["recurrent state"] + sizes["KV cache"] == plan.stages[0].memory.kv_bytes
    assert sizes["states of prefixes"] == plan.stages[0].memory.prefix_bytes > 0
    assert "states of prefixes" in plan_page(plan) and "states of prefixes" in cards_svg(plan)
    assert "s states of prefixes" in "\n".join(map(str, memory_bars(plan)))


def test_a_plan_by_hand_has_a_page(plan: Plan) -> None:
    stages = tuple(
        stage.model_copy(update={"memory": None, "prefill_s": None, "decode_s": None})
        for stage in plan.stages
    )
    bare = plan.model_copy(update={"stages": stages, "predicted": None, "inputs": None})
    page = plan_page(bare)
    assert "The plan predicts no times." in page and "memory not counted" in page
    assert json.loads(Shown(page).data)["charts"] == {}


def test_nothing_comes_from_elsewhere_and_names_are_text(plan: Plan) -> None:
    evil = "</script><b>"
    odd = plan.model_copy(update={"model": plan.model.model_copy(update={"name": evil})})
    page = plan_page(odd)
    assert "<b>" not in page and Shown(page).data
    for name in SCRIPTS:
        library = (FOLDER / name).read_text()
        assert library in page
        page = page.replace(library, "")
    assert set(re.findall(r"https?://[^\"'\\\\\s)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page and "@import" not in page and "src=" not in page


def test_the_library_is_named_licensed_and_small() -> None:
    packages = json.loads((FOLDER / "versions.json").read_text())["packages"]
    assert [f"{p['name']}.min.js" for p in packages] == list(SCRIPTS)
    for package in packages:
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["integrity"].startswith("sha512-")
        licence = (FOLDER / f"LICENSE-{package['name']}.txt").read_text()
        assert "Redistribution and use" in licence
    assert sum((FOLDER / name).stat().st_size for name in SCRIPTS) < 1_000_000


def large_plan(plan: Plan, devices: int = 64, layers: int = 126) -> Plan:
    """The same card many times."""
    stages, at = [], 0
    inputs = plan.inputs
    for index in range(devices):
        end = (index + 1) * layers // devices
        own = ["w8a16", "w4a16"][index % 2]
        data = {**json.loads(plan.stages[1].model_dump_json()), "device": f"RTX-4090-{index}",
                "layers": [at, end], "precisions": [own] * (end - at)}  # fmt: skip
        stages.append(type(plan.stages[1]).model_validate(data))
        at = end
    names = [stage.device for stage in stages]
    link = inputs.links[0]
    links = tuple(
        link.model_copy(update={"source": a, "target": b})
        for a, b in zip(names, [*names[1:], names[0]], strict=True)
    )
    return plan.model_copy(
        update={
            "stages": tuple(stages),
            "model": plan.model.model_copy(update={"num_layers": layers}),
            "inputs": inputs.model_copy(update={"links": links}),
            "pool": None,
        }
    )


def test_a_large_plan_is_a_small_file(plan: Plan) -> None:
    page = plan_page(large_plan(plan))
    assert len(page) < 3_000_000
    assert page.count("layer ") >= 126 and "RTX-4090-63" in page


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "new" / "plan.html"
    words = f"--devices 3060:2 --model opt-125m --batch 4 --bits 16,8 --report {report}"
    assert main([*words.split(), "--method", "all", "--what-if", "+3060"]) == 0
    shown = capsys.readouterr().out
    assert f"wrote {report}" in shown and "what if +3060" in shown
    data = json.loads(Shown(report.read_text()).data)
    assert {row["method"] for row in data["beside"]["methods"]} >= {"exact", "uniform"}
    for row in data["charts"]["methods"]["data"]["values"]:
        assert row in [{k: r.get(k) for k in row} for r in data["beside"]["methods"]]
    assert any(line.startswith("what if +3060") for line in data["beside"]["changes"])
    assert data["beside"]["why"]


def test_the_front_marks_what_each_preference_takes(tmp_path: Path) -> None:
    report = tmp_path / "front.html"
    words = f"--devices 3060:2 --model opt-125m --batch 4 --pareto --json --report {report}"
    assert main(words.split()) == 0
    data = json.loads(Shown(report.read_text()).data)
    points = data["charts"]["front"]["data"]["values"]
    plans = data["beside"]["front"]
    assert [p["total_s"] for p in points] == [p["predicted"]["total_s"] for p in plans]
    assert [p["sum_omega"] for p in points] == [p["predicted"]["sum_omega"] for p in plans]
    asked = " ".join(point["chosen"] for point in points)
    assert all(f"--prefer {name}" in asked for name in ("quality", "balanced", "speed"))
    (balanced,) = (p for p in points if "balanced" in p["chosen"])
    assert data["plan"] == plans[balanced["plan"] - 1]


def test_another_ending_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--devices 3060 --model opt-125m --report {tmp_path}/plan.json"
    assert main(words.split()) == 2
    assert "expected a name that ends in .html" in capsys.readouterr().err


@needs_browser
def test_a_browser_draws_it_without_a_network(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    said = Beside(front=[plan], chosen={0: "--prefer balanced"}, why=["because"])
    file.write_text(plan_page(plan, said))
    with browser() as page:
        page.size(390)
        page.open(file.as_uri())
        drawn = "document.querySelectorAll('.chart svg').length"
        page.until(f"{drawn} === document.querySelectorAll('.chart').length")
        assert page.run("return performance.getEntriesByType('resource').length") == 0
        assert page.run("return document.documentElement.scrollWidth") <= 390
        domain = "views.get('predicted-pipeline').scale('x').domain()"
        before = page.run(f"return {domain}")
        page.run("document.querySelector('[data-zoom=in]').focus()")
        page.press("\ue007")
        page.until(f"{domain}[1] < {before[1]}")
        page.run("document.querySelector('[data-zoom=all]').click()")
        page.until(f"{domain}[1] === {before[1]}")
        assert {"Devices", "Zoom in", "Save plan.json"} <= {
            *page.names("heading"), *page.names("button"),
        }  # fmt: skip
        assert all(page.names("image")), "a picture without a name"
        assert faults_in_every_look(page) == []
        assert page.complaints() == []
    assert len(link_loads(plan)) == 3
