"""Certificates: those of random problems hold, and what was changed in them or a plan does not."""

from __future__ import annotations

import ast
import copy
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import pytest

from llmpq.costs.cost_model import CostModel, LatencyEntry
from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.planner.__main__ import main
from llmpq.planner.check import verify as verify_module
from llmpq.planner.check.build_plan import build_plan
from llmpq.planner.check.verify import (
    PRICE,
    Refused,
    Verified,
    bounds,
    digest,
    most_rows,
    verify,
)
from llmpq.planner.cli.certificates import robust_line
from llmpq.planner.evaluate import objective
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.solving import certificate as certificate_module
from llmpq.planner.solving.certificate import certificate, engine_proofs, with_tables
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import best_plan
from llmpq.planner.solving.robustness import bound_only
from llmpq.planner.solving.topologies import best_topology
from llmpq.planner.solving.topology_search import KnownPipeline
from reference.brute_force import assignments, brute_force
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure]

ALL = "LLMPQ_ALL_TESTS" in os.environ
Pair = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(autouse=True)
def _few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs of few parts: looser, quicker."""
    monkeypatch.setattr(certificate_module, "MOST_PARTS", 8)


@cache
def _certified(seed: int) -> Pair | None:
    """Return the plan of a random problem and its certificate; None where nothing fits."""
    rng = random.Random(seed)
    p = random_problem(
        rng, layers=(2, 5), devices=(1, 2), precisions=2, batch=rng.choice([1, 2, 3])
    )
    options = SolveOptions(gap=1e-9, time_limit_s=math.inf)
    budget = None
    try:
        found = best_plan(p, options)
        if seed % 3 == 0:
            loss = sum_omega(found.problem, found.outcome.assignment)
            budget = loss * rng.uniform(1.0, 1.5)
            options = SolveOptions(gap=1e-9, time_limit_s=math.inf, budget=budget)
            found = best_plan(p, options)
    except DoesNotFitError:
        return None
    own = found.problem if budget is None else found.problem.with_changes(theta=0.0)
    plan = build_plan(own, found.outcome)
    made = certificate(plan, found.problem, found.outcome.assignment, [found.problem], budget)
    return json.loads(plan.dump_json()), json.loads(json.dumps(made))


def _pairs(count: int) -> Iterator[tuple[int, Pair]]:
    for seed in range(count):
        pair = _certified(seed)
        if pair is not None:
            yield seed, copy.deepcopy(pair)


def test_certificates_of_random_problems_hold() -> None:
    near = whole = 0
    for seed, (plan, made) in _pairs(1000 if ALL else 20):
        found = verify(plan, made)
        # The value is the best there is: a bound above it would be wrong.
        assert 0 < found.bound <= found.value * (1 + 1e-9), seed
        near += found.bound > 0.9 * found.value
        whole += 1
    assert whole > 12 and near > whole / 4


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, dict | list):
        for key, inner in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(inner, (*path, key))
    elif path:
        yield path


def _mutated(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([-1, 1, 7])
    if isinstance(value, float):
        return value * rng.choice([0.5, 0.999, 1.001, 2.0]) + 1e-9
    return "x" if value is None else f"{value}x"


def test_a_thousand_changed_plans_and_certificates_are_refused() -> None:
    rng, pairs, refused = random.Random(0), list(_pairs(20)), 0
    while refused < 1000:
        _, pair = rng.choice(pairs)
        changed = copy.deepcopy(pair)
        which = rng.choice(changed)
        path = rng.choice(list(_leaves(which)))
        inner: Any = which
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = _mutated(rng, inner[path[-1]])
        with pytest.raises((Refused, LookupError, TypeError, ValueError)):
            verify(*changed)
        refused += 1


def _signed(plan: dict[str, Any], made: dict[str, Any]) -> Pair:
    """Return a plan and a certificate whose digests are those of what they now hold."""
    made["plan_sha256"] = digest(plan)
    made["sha256"] = digest(made)
    return plan, made


def _bound(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["bound"] += 0.01 * made["value"]


def _value(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["value"] *= 0.99


def _layer_missing(plan: dict[str, Any], made: dict[str, Any]) -> None:
    stage = plan["stages"][-1]
    stage["layers"][1] -= 1
    stage["precisions"].pop()


def _bits_not_allowed(plan: dict[str, Any], made: dict[str, Any]) -> None:
    plan["stages"][0]["precisions"][0] = "w8a8"


def _other_bits(plan: dict[str, Any], made: dict[str, Any]) -> None:
    bits = plan["stages"][0]["precisions"]
    bits[0] = next(one for one in made["choices"] if one != bits[0])


def _faster(plan: dict[str, Any], made: dict[str, Any]) -> None:
    plan["predicted"]["total_s"] *= 0.99


def _less_loss(plan: dict[str, Any], made: dict[str, Any]) -> None:
    plan["predicted"]["sum_omega"] = plan["predicted"]["sum_omega"] * 0.9 - 1e-3


def _other_device(plan: dict[str, Any], made: dict[str, Any]) -> None:
    plan["stages"][0]["device"] = "elsewhere"


def _lighter(plan: dict[str, Any], made: dict[str, Any]) -> None:
    plan["stages"][0]["memory"]["weights_bytes"] -= 1


def _less_room(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["engines"][0]["room"][-1] = 0


def _negative_price(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["proofs"][0]["multipliers"][0]["memory"][0] = -1


def _kappa(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["proofs"][0]["multipliers"][0]["kappa"] = PRICE + 1


def _share(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["proofs"][0]["multipliers"][0]["decode"][0] = PRICE + 1


def _a_pair_less(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["proofs"][0]["of_pairs"].pop()


def _of_no_multipliers(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["proofs"][0]["of_pairs"][0] = 99


def _of_fewer_rows(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["tables"][0]["batch"] = made["proofs"][0]["rows"] = made["rows"] + 1


def _other_table(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["tables"].append({**made["tables"][0], "kv": "other"})
    made["engines"][0]["table"] = 1


def _other_schema(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["schema"] = 1


def _no_proof(plan: dict[str, Any], made: dict[str, Any]) -> None:
    made["proofs"] = []


FORGED: list[Callable[[dict[str, Any], dict[str, Any]], None]] = [
    _bound, _value, _layer_missing, _bits_not_allowed, _other_bits, _faster, _less_loss,
    _other_device, _lighter, _less_room, _negative_price, _kappa, _share, _a_pair_less,
    _of_no_multipliers, _of_fewer_rows, _other_table, _other_schema, _no_proof,
]  # fmt: skip


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__.strip("_"))
def test_what_is_forged_is_refused_though_its_digests_are_right(
    forge: Callable[[dict[str, Any], dict[str, Any]], None],
) -> None:
    for seed, (plan, made) in _pairs(12):
        forge(plan, made)
        with pytest.raises((Refused, LookupError, TypeError, ValueError)):
            verify(*_signed(plan, made))
            pytest.fail(f"seed {seed}")


def _reweighed(rng: random.Random, m: dict[str, Any], classes: list[Any]) -> None:
    """Give a pair other multipliers that are in their range."""
    for phase in ("prefill", "decode"):
        shares = [rng.random() for _ in classes]
        total = sum(len(names) * x for names, x in zip(classes, shares, strict=True))
        m[phase] = [int(x / total * rng.choice([0.0, 0.5, 0.999999]) * PRICE) for x in shares]
    scale = rng.choice([0.0, 0.5, 2.0])
    m["memory"] = [int(x * scale * rng.random()) for x in m["memory"]]
    m["kappa"], m["loss"] = int(rng.random() * PRICE), int(m["loss"] * 2 * rng.random())
    m["path"] = rng.random() < 0.7


def test_no_multipliers_prove_more_than_is_so() -> None:
    rng = random.Random(1)
    for seed, (_, made) in _pairs(40):
        for _ in range(3):
            for m in made["proofs"][0]["multipliers"]:
                _reweighed(rng, m, made["classes"])
            assert min(bounds(made)) <= made["value"] * (1 + 1e-9), seed


@cache
def _bounded(seed: int) -> tuple[float, dict[str, Any]] | None:
    """Return the best value of engines of a random problem, and what proves that there is no less.

    None where nothing fits.
    """
    rng = random.Random(seed)
    p = random_problem(rng, layers=(2, 3), kinds=(1, 2), devices=(1, 2), precisions=2, batch=4)
    room = int(rng.uniform(0, 2) * int(p.all_layer_bytes.sum()))
    data = p.cluster.model_dump(mode="json", by_alias=True)
    for node in data["nodes"]:
        for group in node["devices"]:
            group["spec"]["memory"] += room
    p = p.with_changes(cluster=Cluster.parse_data(data, where="test"))
    budget = float(p.omega.min(axis=1).sum()) * 1.3 + 1e-6 if seed % 3 == 0 else None
    p = p if budget is None else p.with_changes(theta=0.0)
    options = SolveOptions(gap=1e-9, time_limit_s=math.inf, groups=False, budget=budget)
    found = best_topology(p, options, KnownPipeline(), gap=0.0)
    if math.isinf(found.value):
        return None
    made = {
        "rows": 4,
        "exactly": None,
        "most_waves": MOST_WAVES,
        "tables": [],
        "gen_len": p.workload.gen_len,
        "theta": p.theta,
        "budget": budget,
        "classes": [[device.name for device in cls.devices] for cls in p.classes],
    }
    made = with_tables(made, engine_proofs(p, options, found.bound, found.most))
    return found.value, json.loads(json.dumps(made))


def _topologies(count: int) -> Iterator[tuple[int, float, dict[str, Any]]]:
    for seed in range(count):
        found = _bounded(seed)
        if found is not None and found[1]["proofs"]:
            yield seed, found[0], copy.deepcopy(found[1])


def test_no_engines_are_below_what_their_proofs_say() -> None:
    near = whole = 0
    for seed, value, made in _topologies(300 if ALL else 12):
        bound = min(bounds(made))
        assert bound <= value * (1 + 1e-9), seed
        near += bound > 0.9 * value
        whole += 1
    assert whole > 5 and near > whole / 2


def _fewer_rows(made: dict[str, Any]) -> None:
    made["proofs"][0]["rows"] -= 1


def _one_wave_less(made: dict[str, Any]) -> None:
    made["proofs"].pop()


def _no_proofs(made: dict[str, Any]) -> None:
    made["proofs"] = []


def _no_rows(made: dict[str, Any]) -> None:
    made["rows"] = 0


def _fewer_steps(made: dict[str, Any]) -> None:
    made["tables"][0]["decode"][0]["count"] -= 1


@pytest.mark.parametrize("forge", [_fewer_rows, _one_wave_less, _no_proofs, _no_rows, _fewer_steps])
def test_proofs_of_engines_that_lack_something_are_refused(
    forge: Callable[[dict[str, Any]], None],
) -> None:
    for seed, _, made in _topologies(6):
        forge(made)
        with pytest.raises((Refused, LookupError, ValueError)):
            bounds(made)
            pytest.fail(f"seed {seed}")


def test_the_most_rows_are_those_of_the_best_disjoint_engines() -> None:
    rng = random.Random(3)
    for _ in range(20):
        counts = (rng.randint(1, 2), rng.randint(1, 2))
        vectors = list(product(*(range(n + 1) for n in counts)))
        rows = {v: rng.randint(1, 9) if any(v) else 0 for v in vectors}
        for exactly in (None, 1, 2, 3):
            most = max(
                (
                    sum(rows[v] for v in chosen)
                    for k in (range(5) if exactly is None else [exactly])
                    for chosen in combinations_with_replacement(vectors[1:], k)
                    if all(sum(v[c] for v in chosen) <= counts[c] for c in (0, 1))
                ),
                default=None,
            )
            if most is not None:
                assert most_rows(counts, rows, exactly) == most


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_a_plan_stays_near_the_best_with_every_cost_off_by_what_is_said(seed: int) -> None:
    """By all plans there are, at random corners, and with its own costs up and all others down."""
    rng = random.Random(seed)
    p = random_problem(rng, layers=(2, 3), kinds=(2, 2), devices=(1, 1), precisions=2, batch=2)
    found = best_plan(p, SolveOptions(gap=1e-9, time_limit_s=math.inf))
    own = found.outcome.assignment
    time_s = objective.job_time(p, own).total_s
    share = bound_only(objective.value(p, own), time_s, brute_force(p)[0])
    assert 0.02 < share < 0.05
    plans = [a for a in assignments(p) if fits(p, a)]
    costs = p.costs.estimate
    kinds = {p.classes[stage.cls].name.partition("@")[0] for stage in own.stages}

    def ratio(x: float, sign: Callable[[LatencyEntry], int]) -> float:
        data = costs.model_dump(by_alias=True)
        for one, entry in zip(costs.entries, data["entries"], strict=True):
            factor = 1 + x * sign(one)
            for regime in entry["regimes"]:
                regime["terms"] = {name: s * factor for name, s in regime["terms"].items()}
        changed = replace(p, costs=replace(p.costs, estimate=CostModel(**data)))
        values = (objective.value(changed, a) for a in plans)
        return objective.value(changed, own) / min(values)

    assert ratio(0.0, lambda _: 1) == pytest.approx(1.0)
    assert ratio(share, lambda one: 1 if one.device_kind in kinds else -1) <= 1.05
    worst = max(ratio(share, lambda _: rng.choice([-1, 1])) for _ in range(20))
    assert worst <= 1.05
    assert max(ratio(0.6, lambda _: rng.choice([-1, 1])) for _ in range(20)) > 1.05


@pytest.mark.parametrize(
    ("bound", "proven", "words"),
    [
        (10.0, 0.03, "each by itself, the plan is within 5% of the best; the search, which knows"),
        (4.0, 0.03, "the bound shows no cost error that keeps the plan within 5% of the best; the"),
        (4.0, 0.03, "which knows what plans share, says 3.0%"),
        (4.0, 0.0, "which knows what plans share, shows none either"),
    ],
)
def test_what_no_bound_shows_is_not_said_as_a_share(
    bound: float, proven: float, words: str
) -> None:
    found = Verified(value=10.0, time_s=10.0, bound=bound, parts=1)
    assert words in robust_line(found, {"proven": proven})


def test_it_imports_the_standard_library_alone() -> None:
    source = Path(verify_module.__file__).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert all(name.partition(".")[0] in sys.stdlib_module_names for name in names), names


def test_the_command_says_what_holds_and_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    flags = ["--devices", "4090,3060", "--model", "opt-1.3b", "--batch", "4", "-o", str(path)]
    for engines in ("1", "2"):
        assert main([*flags, "--engines", engines]) == 0
        assert main(["verify", str(path)]) == 0
        said = capsys.readouterr().out
        assert "every layer once" in said and "bound" in said and "5% of the best" in said
    data = json.loads(path.read_text())
    data["engines"][0]["plan"]["stages"][0]["memory"]["weights_bytes"] -= 1
    path.write_text(json.dumps(data))
    assert main(["verify", str(path)]) == 3
    assert "it is of another plan" in capsys.readouterr().err
    made = tmp_path / "plan.certificate.json"
    made.write_text(json.dumps({**json.loads(made.read_text()), "schema": 1}))
    assert main(["verify", str(path)]) == 3
    assert "written by an older llmpq-algo (schema 1, this one checks" in capsys.readouterr().err
    assert main([*flags, "--method", "heuristic"]) == 0
    assert not made.exists(), "it was of the plan before"
    assert main(["verify", str(path)]) == 2
    assert "is not there" in capsys.readouterr().err
    made.write_text('{"schema": 1, "of": "somebody else"}')
    assert main([*flags, "--method", "heuristic"]) == 0
    assert made.exists(), "no certificate of ours"


@pytest.mark.slow
def test_engines_that_share_stages_are_bounded_as_they_are_grouped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, made = tmp_path / "plan.json", tmp_path / "plan.certificate.json"
    job = ["--batch", "2", "--gen-len", "32", "--bits", "4", "--theta", "0", "--engines", "2"]
    assert main(["--devices", "3090:4", "--model", "qwen3-8b", *job, "-o", str(path)]) == 0
    plan, certificate = (json.loads(one.read_text()) for one in (path, made))
    assert all(stage["shares"] for one in plan["engines"] for stage in one["plan"]["stages"])
    capsys.readouterr()
    assert main(["verify", str(path)]) == 0
    said = capsys.readouterr().out
    assert "the groups that share stages as they are" in said and "of all groups looked at" in said
    assert 0.5 * certificate["value"] < certificate["bound"] <= certificate["value"]
    certificate["bound"] = 1.01 * certificate["value"]
    for changed in (certificate, {**certificate, "rows": 3}):
        made.write_text(json.dumps({**changed, "sha256": digest(changed)}))
        assert main(["verify", str(path)]) == 3
