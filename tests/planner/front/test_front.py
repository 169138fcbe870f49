"""The front: every non-dominated plan of tiny problems; a proven resolution of larger ones."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.check.check import check_plan
from llmpq.planner.cli import show_front
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.cli.show_front import FrontRow, ListedFront, coverage, worth_listing
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.front.front import Front, pareto_front
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.outcome import Unfinished
from llmpq.planner.problem.problem import Problem
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, bits_of
from reference.brute_force import assignments
from reference.random_problems import random_problem

Seeds = Callable[[Sequence[int]], Sequence[int]]

pytestmark = [pytest.mark.pure, pytest.mark.slow]
PAPER = Path(__file__).resolve().parents[3] / "clusters" / "paper"
Points = list[tuple[float, float]]


def _tiny(seed: int) -> tuple[Problem, Points]:
    """A problem and (time, sum of omega) of all its plans, non-dominated first."""
    rng = random.Random(seed)
    separable = rng.random() < 0.5
    p = random_problem(
        rng,
        objective="makespan",
        separable=separable,
        layers=(3, 5),
        kinds=(1, 2),
        devices=(1, 2),
        precisions=2,
    ).with_changes(theta=0.0)
    return p, sorted({(value(p, a), sum_omega(p, a)) for a in assignments(p) if fits(p, a)})


def _undominated(plans: Points) -> Points:
    kept: Points = []
    for seconds, omega in plans:
        if kept and omega >= kept[-1][1] * (1 - 1e-5):
            continue
        if kept and seconds <= kept[-1][0] * (1 + 1e-9):
            kept.pop()  # as fast but for rounding, and more precise
        kept.append((seconds, omega))
    return kept


def _listed(front: Front) -> Points:
    return [(point.time_s, point.omega) for point in front.points]


def _covered(plan: tuple[float, float], points: Points, width: float) -> bool:
    """What `coverage` says in words."""
    seconds, omega = plan
    loose, tight = 1 + width + 1e-5, 1 + 1e-5
    return any(
        (t <= seconds * loose and w <= omega * tight + 1e-12)
        or (t <= seconds * tight and w <= omega * loose + 1e-12)
        for t, w in points
    )


@pytest.mark.slow
def test_whole_front_is_brute_force(monkeypatch: pytest.MonkeyPatch, seeds: Seeds) -> None:
    """Of problems whose whole front takes seconds, those first that take least; limits count this
    process's own time."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    tried, between = seeds((9, 0, 1, 11, 7, 2, 8, 13, 15)), 0
    for seed in tried:
        p, plans = _tiny(seed)
        front = pareto_front(p, points=200, time_limit_s=600)
        assert front.complete, f"seed {seed}: {front.width}"
        expected, got = _undominated(plans), _listed(front)
        assert len(got) == len(expected), f"seed {seed}"
        for one, other in zip(got, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-9), f"seed {seed}"
        between += sum(not point.supported for point in front.points)
    assert between >= len(tried) // 3, "plans that no theta finds are part of the front"


def test_what_is_not_listed_is_within_the_stated_resolution(seeds: Seeds) -> None:
    short = 0
    for seed in seeds(range(15)):
        p, plans = _tiny(seed)
        if not plans:
            continue
        front = pareto_front(p, points=4)
        points = _listed(front)
        assert len(points) <= 4 and points == sorted(points)
        assert all(_covered(plan, points, front.width) for plan in plans), f"seed {seed}"
        if len(_undominated(plans)) > 4:
            assert not front.complete
            short += 1
            # A resolution that is too good to be true is found out.
            assert not all(_covered(plan, points, 1e-4) for plan in plans), f"seed {seed}"
    assert short >= 1


def test_each_point_has_a_valid_bound_of_its_own() -> None:
    p, plans = _tiny(11)
    for point in pareto_front(p).points:
        best = min(seconds for seconds, omega in plans if omega <= point.omega * (1 + 1e-9))
        assert point.bound_s <= best * (1 + 1e-9) and point.time_s >= best * (1 - 1e-9)
        assert point.outcome.status == "optimal"


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


SMALL = ["--cluster", str(PAPER / "02.yaml"), "--model", "opt-13b", "--global_bz", "8"]
NEW = ["--devices", "4070,3060", "--model", "opt-13b", "--global_bz", "8"]
"""Devices that run a KV cache of 8 bits."""


def _plans(path: Path) -> list[Plan]:
    return [Plan.model_validate(data) for data in json.loads(path.read_text())["plans"]]


def test_command_writes_every_plan_to_one_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "front.json"
    words = [*SMALL, "--pareto", "--pareto-points", "7", "--time-limit", "600"]
    code, text, _ = _run(capsys, *words, "-o", str(out))
    assert code == 0 and list(tmp_path.iterdir()) == [out]
    plans = _plans(out)
    points = [(q.predicted.total_s, q.predicted.sum_omega) for q in plans if q.predicted]
    assert points == sorted(points) and 3 <= len(points) <= 7
    assert [w for _, w in points] == sorted((w for _, w in points), reverse=True)
    rows = [line for line in text.splitlines() if " s " in line and " bits" in line]
    assert len(rows) == len(plans)
    for plan, row, (seconds, omega) in zip(plans, rows, points, strict=True):
        assert plan.solver.status == "optimal"
        assert plan.solver.gap is not None and plan.solver.gap <= 2e-6
        assert plan.solver.value == pytest.approx(seconds) and plan.solver.theta == 0.0
        assert f"{seconds:.3f} s" in row and bits_of(plan.precisions) in row
        assert any(omega <= float(word) <= omega * 1.01 + 1e-12 for word in row.split()[3:5])
    assert plans[-1].solver.note == "the smallest sum of omega there is"
    assert f"wrote {out}: {len(plans)} plans\n" in text
    code, text, _ = _run(capsys, *SMALL, "--quality-budget", rows[1].split()[4], "--json")
    assert code == 0
    again = Plan.model_validate_json(text).predicted
    assert again is not None and again.total_s == pytest.approx(points[1][0], rel=1e-5)


def test_rows_that_buy_nothing_are_not_listed() -> None:
    times = (1.0, 1.001, 1.2, 1.3, 1.2999, 2.0, 2.1)
    losses = (1.0, 0.5, 0.5, 0.1, 0.2, 0.0999, 0.0)
    pairs = zip(times, losses, strict=True)
    rows = [FrontRow(time_s=t, omega=w, number=k) for k, (t, w) in enumerate(pairs)]
    # 0 is 0.1 % faster than 1 for half the loss; 2 and 5 lose as much as 1 and 3; 4 saves nothing.
    assert [row.number for row in worth_listing(rows, 1.0)] == [1, 3, 6]
    assert [row.number for row in worth_listing(rows, 0.0)] == [0, 1, 4, 3, 5, 6]


def test_the_row_that_the_plain_command_takes_has_a_star(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = SMALL
    code, text, _ = _run(capsys, *words, "--pareto", "--pareto-points", "20", "--json")
    content = json.loads(text)
    plans = [Plan.parse_data(plan, where="test").predicted for plan in content["plans"]]
    code, text, _ = _run(capsys, *words, "--json")
    taken = Plan.model_validate_json(text).predicted
    assert code == 0 and taken is not None
    assert all(plan is not None for plan in plans)
    near = min(
        range(len(plans)),
        key=lambda i: (
            abs(plans[i].total_s - taken.total_s) + abs(plans[i].sum_omega - taken.sum_omega)
        ),
    )
    assert content["chosen"] == near
    code, text, _ = _run(capsys, *words, "--pareto", "--pareto-points", "20")
    starred = [line.split()[0] for line in text.splitlines() if re.match(r" *\d+\*", line)]
    assert starred == [f"{near + 1}*"]
    assert "* of these plans the one that --theta " in text, "the cluster file says one"


def test_json_is_the_whole_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = _run(capsys, *SMALL, "--pareto", "--pareto-points", "3", "--json")
    content = json.loads(text)
    keys = ["chosen", "complete", "plans", "resolution", "schema"]
    assert code == 0 and sorted(content) == keys
    assert 2 <= len(content["plans"]) <= 3 and 0 < content["resolution"] < 1
    code, text, _ = _run(capsys, *SMALL, "--pareto", "--pareto-points", "3")
    line = next(row for row in text.splitlines() if row.startswith("3 points"))
    share = f"{content['resolution']:.2%}"
    assert line == (
        "3 points of pipelines with a device a stage; proven: for every such plan there is one of "
        f"these that is at most {share} slower without more loss, or no slower with at most {share}"
        " more loss; for a finer list give more --pareto-points or a longer --time-limit"
    )


def test_coverage_is_said_in_one_sentence() -> None:
    def said(width: float, complete: bool, left_out: int = 1) -> str:
        return coverage(ListedFront(plans=(), left_out=left_out, width=width, complete=complete))

    assert said(1e-6, True, 5) == (
        "5 points (5 that buy nothing not shown), proven to be the whole front"
    )
    assert said(math.inf, False).replace(" (1 that buy nothing not shown)", "") == (
        "1 point; what lies between them is not proven; give a longer --time-limit"
    )


FRONT_ERRORS = {
    "another method": (["--method", "ilp"], "--pareto is for --method exact, not ilp"),
    "a budget": (
        ["--quality-budget", "1"],
        "--pareto lists every budget; leave --quality-budget out",
    ),
    "one point": (["--pareto-points", "1"], "--pareto-points must be at least 2, got 1"),
}


@pytest.mark.parametrize("name", FRONT_ERRORS)
def test_errors(capsys: pytest.CaptureFixture[str], name: str) -> None:
    words, text = FRONT_ERRORS[name]
    assert _run(capsys, *SMALL, "--pareto", *words) == (2, "", f"llmpq-algo: {text}\n")


def test_a_kv_precision_out_of_time_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {KVPrecision.KV8}

    def late(p: Problem, **how: Any) -> Front:
        if p.kv in slow:
            raise Unfinished("no plan found within 1 s; give a longer --time-limit")
        return pareto_front(p, **how)

    monkeypatch.setattr(show_front, "front_in_child", late)
    words = [*NEW, "--pareto", "--pareto-points", "2", "--kv", "16,8"]
    code, text, _ = _run(capsys, *words)
    assert code == 0 and "what lies between them is not proven" in text
    slow.add(KVPrecision.KV16)
    code, text, err = _run(capsys, *words)
    last = "llmpq-algo: no plan found within 1 s; give a longer --time-limit"
    assert (code, text, err.splitlines()[-1]) == (5, "", last)


def test_the_table_is_at_most_as_wide_as_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--devices", "3060,3070,3080,3090,4060,4070", "--model", "qwen3-32b", "--batch", "4"]
    code, text, _ = _run(capsys, *devices, "--pareto", "--pareto-points", "2", "--time-limit", "2")
    assert code == 0
    table = text[: text.index("* of these plans")].splitlines()
    assert max(map(len, table)) <= 100
    assert "note: assumed: one machine, " in text
    assert any("not proven" in line for line in text.splitlines()) is ("s?" in text)


def test_front_of_two_kv_precisions_is_merged(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pareto", "--pareto-points", "3", "--kv", "16,8", "--json"]
    code, text, _ = _run(capsys, *NEW, *words)
    plans = json.loads(text)["plans"]
    assert code == 0 and {plan["workload"]["kv"] for plan in plans} <= {"kv16", "kv8"}
    omegas = [plan["predicted"]["sum_omega"] for plan in plans]
    assert omegas == sorted(set(omegas), reverse=True)


def test_a_home_machine_and_a_laptop_list_a_front_in_time(tmp_path: Path) -> None:
    """2 x 4090, a 3090 and a CPU over a slow link: each plan is feasible, none is dominated."""
    cluster = PAPER.parents[1] / "benchmarks" / "clusters" / "home-4090-3090-cpu.yaml"
    words = f"--cluster {cluster} --model llama-2-13b --global-bz 4 --s 128 --n 16 --bits 8,4"
    limit_s, out = 2.0, tmp_path / "plan.json"
    start = time.perf_counter()
    assert main([*words.split(), "--pareto", "--time-limit", str(limit_s), "-o", str(out)]) == 0
    assert time.perf_counter() - start < limit_s + 40.0  # a busy machine
    plans = _plans(out)
    assert plans
    p = make_problem(plan_request(words.split()))[0]
    points = []
    for plan in plans:
        check_plan(plan, spec=p.spec, cluster=p.cluster, costs=p.costs)
        assert plan.predicted is not None
        points.append((plan.predicted.total_s, plan.predicted.sum_omega))
    points.sort()
    assert all(a[1] > b[1] for a, b in zip(points, points[1:], strict=False))
