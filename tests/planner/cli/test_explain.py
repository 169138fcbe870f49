"""Explanations, word for word, on a cluster of devices described in the test."""

from __future__ import annotations

import io
import json
import random
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.planner.__main__ import main
from llmpq.planner.cli import explain
from llmpq.planner.cli.explain import Regret, is_balanced, regret_lines
from llmpq.planner.cli.report import quality_of
from llmpq.planner.cli.what_if import compared, loss_change, without
from llmpq.planner.evaluate.objective import StageTimes, value
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.outcome import Unfinished
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.methods import SolveOptions, solve
from llmpq.plans.plan import Plan, Predicted, SolverReport
from llmpq.plans.topology import read_plan
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]
CARDS = """
name: pair
nodes:
  - name: box
    devices:
      - {kind: small, count: 2, spec: {memory: 16GiB, mem_gbps: 300, fp16_tflops: 60}}
      - {kind: large, count: 1, spec: {memory: 24GiB, mem_gbps: 900, fp16_tflops: 120}}
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a small job on the inline cluster."""
    file = tmp_path_factory.mktemp("pair") / "pair.yaml"
    file.write_text(CARDS)
    job = ["--model", "opt-30b", "--s", "512", "--n", "100"]
    return ["--cluster", str(file), *job, "--tensor-parallel", "1"]


@pytest.fixture(scope="module")
def of_four_bits(words: list[str]) -> dict[str, Any]:
    """The plan of eight requests at four bits, as JSON data."""
    text = io.StringIO()
    with redirect_stdout(text):
        assert main([*words, "--global_bz", "8", "--bits", "4", "--json"]) == 0
    data: dict[str, Any] = json.loads(text.getvalue())
    return data


def _run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(list(flags))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def _planned(capsys: pytest.CaptureFixture[str], *flags: str) -> Plan:
    code, text, _ = _run(capsys, *flags, "--json")
    assert code == 0
    return Plan.model_validate_json(text)


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.total_s


def _predicted(capsys: pytest.CaptureFixture[str], *flags: str) -> Predicted:
    code, text, _ = _run(capsys, *flags, "--json")
    assert code == 0
    found = Plan.parse_data(json.loads(text), where="test").predicted
    assert found is not None
    return found


SHORT = {
    "bits, KV, context or batch": (
        "--global_bz 33 --bits 8,16 --engines 1",
        "even at w8a16 and kv16, large-0 is short by # for 33 requests of 612 tokens at once; what "
        "fits: --kv 8, or --bits 4,8, or --global_bz #, or --s #, or one more small, or cpu=16GB "
        "among the devices (first token after # s, then # tokens/s a request)",
    ),
    "bits alone": (
        "--global_bz 1 --bits 16 --max-devices 1",
        "at w16a16 and kv16, large-0 is short by #, whatever the context; what fits: --bits 4,16, "
        "or cpu=64GB among the devices (first token after # s, then # tokens/s a request)",
    ),
    "batch alone": (
        "--global_bz 400 --bits 3 --kv 2 --engines 1",
        "at w3a16 and kv2, large-0 is short by #, whatever the context; what fits: "
        "--global_bz #, or 4 more large, or cpu=128GB among the devices (first token after # "
        "hours, then # tokens/s a request)",
    ),
    "no flag": (
        "--global_bz 1 --bits 3 --kv 2 --reserve 15GiB --max-devices 1",
        "at w3a16 and kv2, large-0 is short by #, whatever the context; what fits: cpu=16GB among "
        "the devices (first token after # s, then # tokens/s a request)",
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_infeasible_names_the_device_its_bytes_and_changes_that_fit(
    capsys: pytest.CaptureFixture[str], words: list[str], name: str
) -> None:
    flags, text = SHORT[name]
    code, out, err = _run(capsys, *words, *flags.split())
    shown = re.sub(
        r"(?<=by )[\d.]+ [GM]iB|(?<=--s )\d+|(?<=--global_bz )\d+|(?<=after )[\d,.]+|"
        r"(?<=then )[\d.]+",
        "#",
        err,
    )
    assert (code, out) == (5, "") and shown == f"llmpq-algo: opt-30b does not fit pair: {text}\n"
    for way in err.strip().partition("what fits: ")[2].split(", or "):
        if way.startswith("--"):
            assert _run(capsys, *words, *flags.split(), *way.split())[0] == 0, way


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, _, err = _run(capsys, *words)
    assert code == 5
    return err.strip().removeprefix("llmpq-algo: ")


def test_what_if_is_the_plan_of_the_changed_cluster_or_job(
    capsys: pytest.CaptureFixture[str], words: list[str], tmp_path: Path
) -> None:
    flags = ["--global_bz", "8", "--bits", "4,8", "--theta", "9"]
    before = _planned(capsys, *words, *flags)
    fewer, more = tmp_path / "fewer.yaml", tmp_path / "more.yaml"
    fewer.write_text(CARDS[: CARDS.index("      - {kind: large")])
    more.write_text(CARDS.replace("kind: large, count: 1", "kind: large, count: 2"))
    large, cards = tmp_path / "large.yaml", tmp_path / "cards.yaml"
    large.write_text("".join(line for line in CARDS.splitlines(True) if "small" not in line))
    cards.write_text(CARDS + "      - {kind: T4, count: 2}\n")
    changes = {
        "-large-0": _planned(capsys, *words, *flags, "--cluster", str(fewer)),
        "+large": _planned(capsys, *words, *flags, "--cluster", str(more)),
        "prompt_len=1000": _planned(capsys, *words, *flags, "--s", "1000"),
        "bits=4": _planned(capsys, *words, *flags, "--bits", "4"),
        "-small:2": _planned(capsys, *words, *flags, "--cluster", str(large)),
        "+t4:2": _planned(capsys, *words, *flags, "--cluster", str(cards)),
    }
    asked = [flag for change in changes for flag in ("--what-if", change)]
    waves = ["--what-if", "batch=100", "--what-if", "batch=400"]
    code, text, _ = _run(capsys, *words, *flags, *asked, *waves)
    assert code == 0
    lines = [line for line in text.splitlines() if line.startswith("what if")]
    in_waves = tmp_path / "waves.json"
    assert _run(capsys, *words, *flags, "--global_bz", "100", "-o", str(in_waves))[0] == 0
    refused = _refused(capsys, *words, *flags, "--global_bz", "400")
    refused = refused.replace("--s ", "--prompt-len ").replace("--global_bz ", "--batch ")
    assert lines == [
        *(f"what if {change}: {compared(before, after)}" for change, after in changes.items()),
        f"what if batch=100: {compared(before, read_plan(in_waves))}",
        f"what if batch=400: {refused}",
    ]
    assert ", rows in 3 waves, " in lines[-2]
    assert _seconds(changes["-large-0"]) > _seconds(before) * 1.1
    assert _seconds(changes["+large"]) < _seconds(before)
    (line,) = [line for line in lines if line.startswith("what if bits=4")]
    assert line.endswith(" 4 bits, quality loss 1 instead of 0.003461, 289 times more")


def test_what_if_shrinks_fixed_microbatches_with_the_batch(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    fixed = ["--global_bz", "8", "--bits", "4", "--decode-microbatch", "8"]
    code, text, err = _run(capsys, *words, *fixed, "--what-if", "batch=4")
    assert (code, err) == (0, "")
    before = _planned(capsys, *words, *fixed)
    after = _planned(capsys, *words, "--global_bz", "4", *fixed[2:-1], "4")
    assert f"what if batch=4: {compared(before, after)}\n" in text


def test_pins_follow_their_devices(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    job = ["--global_bz", "8", "--bits", "4", "--model", "opt-1.3b"]
    slow = [*job, "--pin", "0-15=small-1"]
    code, text, _ = _run(capsys, *words, *slow, "--what-if", "-small-0")
    assert code == 0
    there = next(line for line in text.splitlines() if line.startswith("what if -small-0: "))
    pinned = _planned(capsys, *words, *slow)
    assert there == f"what if -small-0: {compared(pinned, pinned)}", "small-0 has no layers"
    assert _seconds(_planned(capsys, *words, *job)) < 0.9 * _seconds(pinned)
    code, text, err = _run(capsys, *words, *slow, "--what-if", "-small-1")
    assert (code, text) == (2, "")
    assert err == ("llmpq-algo: --what-if -small-1: a --pin needs small-1; leave one of them out\n")


def test_a_device_is_taken_from_its_own_group() -> None:
    """Of two equal groups of a node, the one that has it: the others keep their order."""
    groups = [{"kind": "T4", "count": 2}, {"kind": "V100"}, {"kind": "T4", "count": 2}]
    data = {"name": "x", "nodes": [{"name": "box", "devices": groups}]}
    cluster = Cluster.parse_data(data, where="test")
    less, names = without(cluster, cluster.device("T4-3"))
    assert all(old == new for old, new in names.items())
    assert [d.kind for d in less.devices] == ["T4", "T4", "V100-32GB", "T4"]
    _, names = without(cluster, cluster.device("T4-0"))
    assert (names["T4-2"], names["V100-32GB-0"]) == ("T4-1", "V100-32GB-0")


def test_what_if_says_what_a_change_makes_possible(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    job = [*words, "--global_bz", "4", "--bits", "16"]
    changes = {"bits=4": True, "+a100": True, "--kv=8": False, "-large": False}
    asked = [flag for change in changes for flag in ("--what-if", change)]
    code, text, err = _run(capsys, *job, *asked)
    assert code == 5 and err.startswith("llmpq-algo: opt-30b does not fit pair: ")
    for line, (change, fits) in zip(text.splitlines(), changes.items(), strict=True):
        assert line.startswith(f"what if {change}: {'fits: ' if fits else 'opt-30b does not fit'}")
    assert " tokens/s, 4 bits, quality loss 1" in text.splitlines()[0]
    assert text.splitlines()[-1].startswith(
        "what if -large: opt-30b does not fit pair with -large: "
    )


def test_quality_change_in_words() -> None:
    assert loss_change(0.5, 0.25) == "quality loss 0.25 instead of 0.5, 2 times less"
    assert loss_change(0.25, 0.5) == "quality loss 0.5 instead of 0.25, 2 times more"
    assert loss_change(0.5, 0.0) == "quality loss 0 instead of 0.5"
    assert loss_change(0.5, 0.5 + 1e-9) == "quality loss as now (0.5)"


def test_cost_error_study_in_words() -> None:
    study = [
        Regret(kind="small", factor=0.9, loss=0.0123),
        Regret(kind="large", factor=1.1, loss=0.0),
    ]
    assert regret_lines(study) == [
        "costs of small x 0.90: this plan is 1.23% above the best one",
        "costs of large x 1.10: this plan is 0.00% above the best one",
        "a cost error of 10 % on one device kind loses at most 1.23% (small)",
    ]
    assert regret_lines(study, balanced=True)[-1].endswith(
        "1.23% (small): stages that are to take equally long wait for one that does not"
    )


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_cost_error_loses_what_a_plan_made_with_it_gains(factor: float) -> None:
    """Two kinds of cards whose prompts take equally long: with the error another cut is best."""
    request = PlanRequest(
        model="llama-2-13b", devices="4090,3090", batch=32, prompt_len=512, gen_len=2, bits="8",
        reserve="0", theta=0.0,
    )  # fmt: skip
    p, _, _ = make_problem(request)
    outcome = solve(p, SolveOptions(method="exact"))
    first, second = outcome.assignment.stages
    assert is_balanced(p, outcome.assignment)
    kind = p.classes[first.cls].first.profile_kind
    scaled = p.with_changes(costs=replace(p.costs, scale={kind: factor}))
    choice, layers = first.choices[0], p.spec.num_layers
    cuts = [
        (
            replace(first, end=cut, choices=(choice,) * cut),
            replace(second, start=cut, choices=(choice,) * (layers - cut)),
        )
        for cut in range(1, layers)
    ]
    best = min(value(scaled, replace(outcome.assignment, stages=stages)) for stages in cuts)
    lost = value(scaled, outcome.assignment) / best - 1
    study = explain.cost_error_study(p, outcome)
    (found,) = [r.loss for r in study if (r.kind, round(r.factor, 1)) == (kind, factor)]
    assert found >= lost - 1e-3 and lost > 0.01


def test_a_study_without_an_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        raise Unfinished("no plan found within 5 s; give a longer --time-limit")

    p = random_problem(random.Random(3))
    outcome = solve(p, SolveOptions(method="exact"))
    monkeypatch.setattr(explain, "plan_in_child", late)
    assert regret_lines(explain.cost_error_study(p, outcome)) == [
        "how much a cost error loses is not known: no plan was found in time"
    ]


def test_a_study_under_a_budget_compares_plans_within_it(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    budget = ["--global_bz", "8", "--bits", "4,8", "--quality-budget", "0.3"]
    code, text, _ = _run(capsys, *words, *budget, "--explain")
    said = [line.split(" is ")[1] for line in text.splitlines() if line.startswith("- costs of")]
    assert code == 0 and len(said) == 4
    losses = [float(line.split("%")[0]) for line in said]
    assert max(losses) < 5
    kept = _predicted(capsys, *words, *budget)
    fast = _predicted(capsys, *words, *budget[:-2], "--theta", "0")
    assert kept.total_s > 1.2 * fast.total_s and fast.sum_omega > 0.9, "4 bits break the budget"


def test_why_this_plan_in_full(
    capsys: pytest.CaptureFixture[str], words: list[str], of_four_bits: dict[str, Any]
) -> None:
    stage = of_four_bits["stages"][0]
    prefill, decode = stage["prefill_s"] * 1e3, stage["decode_s"] * 1e3
    code, text, _ = _run(capsys, *words, *["--global_bz", "8", "--bits", "4", "--explain"])
    assert code == 0
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    with_small = lines.pop(3)
    assert with_small.startswith("- with a layer on small-0 as well: ") and "(+" in with_small
    assert lines == [
        f"- prefill is bound by large-0: 1 micro-batch x {prefill:.2f} ms",
        f"- decode is bound by large-0: 1 micro-batch x {decode:.2f} ms = {decode:.2f} ms per "
        f"token of every request; a token's own way takes {decode:.2f} ms",
        "- left out, faster without: small-0, small-1",
        "- costs of large x 0.90: this plan is 0.00% above the best one",
        "- costs of large x 1.10: this plan is 0.00% above the best one",
        "- costs of small x 0.90: this plan is 0.00% above the best one",
        "- costs of small x 1.10: this plan is 0.00% above the best one",
        "- a cost error of 10 % on one device kind loses at most 0.00% (large)",
    ]


def test_full_stages_and_stages_that_wait_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    flags = ["--global_bz", "30", "--bits", "8"]
    plan = json.loads(_run(capsys, *words, *flags, "--json")[1])
    text = _run(capsys, *words, *flags, "--explain")[1]
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    full = [line for line in lines if line.endswith(" free, less than one more layer")]
    layer = min(s["memory"]["weights_bytes"] / len(s["precisions"]) for s in plan["stages"])
    tight = [
        s["device"]
        for s in plan["stages"]
        if s["memory"]["limit_bytes"] - s["memory"]["total_bytes"] < layer
    ]
    assert tight and set(tight) <= {line.split()[1] for line in full}
    for name in {s["device"] for s in plan["stages"]}:
        said = [line for line in lines if line.startswith(f"- {name} waits ")]
        for line in said:
            share, whom = line.removeprefix(f"- {name} waits ").split("% of decode for ")
            assert 1 <= int(share) < 100
            assert whom in {"its next token"} | {s["device"] for s in plan["stages"]}


@pytest.mark.parametrize(
    "status, gap, text",
    [
        (
            "optimal",
            5e-7,
            "objective 2.5 (theta 1, makespan), proven optimal of pipelines with a device a stage",
        ),
        ("baseline", None, "objective 2.5 (theta 1, makespan), no bound"),
        (
            "feasible",
            0.02,
            "objective 2.5 (theta 1, makespan), at most 2.00% above the best of pipelines with a "
            "device a stage (bound 2.45)",
        ),
    ],
)
def test_how_good_the_plan_is_known_to_be(
    of_four_bits: dict[str, Any], status: str, gap: float | None, text: str
) -> None:
    bound = None if gap is None else 2.5 * (1 - gap)
    report = SolverReport(
        method="exact", status=status, theta=1, value=2.5, bound=bound, gap=gap  # type: ignore[arg-type]
    )  # fmt: skip
    plan = Plan.parse_data({**of_four_bits, "solver": report.model_dump()}, where="test")
    assert quality_of(plan) == text


def _explained(monkeypatch: pytest.MonkeyPatch, **times: object) -> list[str]:
    """The sentences for three stages with given times, two micro-batches in each phase."""
    moments = {"busy_prefill_s": (0.0,) * 3, "busy_decode_s": (0.0,) * 3}
    found = StageTimes(**{**moments, **times})  # type: ignore[arg-type]
    monkeypatch.setattr(explain, "stage_times", lambda *_: found)
    monkeypatch.setattr(explain, "_memory_lines", lambda *_: ["b is full: 1.0 MiB free"])
    names = ["a", "b", "c"]
    problem = SimpleNamespace(
        workload=SimpleNamespace(gen_len=9),
        counts=lambda *_: (2, 2),
        chunks_of_prompt=1,
        cluster=SimpleNamespace(devices=[SimpleNamespace(name=n) for n in [*names, "d"]]),
    )
    plan = SimpleNamespace(prefill_microbatch=4, decode_microbatch=4)
    return explain.explain_plan(problem, plan, names)  # type: ignore[arg-type]


def test_a_pipeline_bound_by_a_link_and_by_a_tokens_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = _explained(
        monkeypatch,
        prefill_s=(0.010, 0.020, 0.010),
        busy_prefill_s=(0.001, 0.050, 0.0),
        decode_s=(0.004, 0.005, 0.004),
    )
    assert lines == [
        "prefill is bound by the link b -> c: 50.00 ms a message",
        "decode is bound by a token's own way through 3 stages, 13.00 ms; "
        "2 micro-batches keep the slowest stage, b, busy for 10.00 ms of it",
        "a waits 38% of decode for its next token",
        "b waits 23% of decode for its next token",
        "c waits 38% of decode for its next token",
        "b is full: 1.0 MiB free",
        "left out, faster without: d",
    ]


def test_a_pipeline_bound_by_its_slowest_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _explained(monkeypatch, prefill_s=(0.01, 0.02, 0.01), decode_s=(0.001, 0.010, 0.004))
    assert lines[:4] == [
        "prefill is bound by b: 2 micro-batches x 20.00 ms",
        "decode is bound by b: 2 micro-batches x 10.00 ms = 20.00 ms per token of every request; "
        "a token's own way takes 15.00 ms",
        "a waits 90% of decode for b",
        "c waits 60% of decode for b",
    ]


def test_a_full_stage_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "spare_bytes", lambda *_: (3 << 20) + (1 << 19))
    numbers = SimpleNamespace(layer_bytes=SimpleNamespace(min=lambda: 4 << 20))
    problem = SimpleNamespace(numbers=lambda *_: numbers)
    plan = SimpleNamespace(prefill_microbatch=1, decode_microbatch=1)
    assert explain._memory_lines(problem, plan, ["T4-2"]) == [  # type: ignore[arg-type]
        "T4-2 is full: 3.5 MiB free, less than one more layer"
    ]
