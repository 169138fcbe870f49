"""`--prefer`: the least score of the front, whatever the unit and the length of the job."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.front.preference import (
    MOST_SOLVES,
    TOLERANCE,
    WEIGHTS,
    Corner,
    Scored,
    StartPoint,
    preferred,
)
from llmpq.planner.make import make_plan
from llmpq.planner.problem.make_problem import generic_sensitivity
from llmpq.planner.solving.answer import answer
from llmpq.planner.solving.methods import SolveOptions
from llmpq.plans.plan import Plan
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision
from reference.brute_force import assignments
from reference.random_cases import random_case

pytestmark = pytest.mark.pure

Point = tuple[float, float]
CARDS = ["--devices", "4090,3090:2", "--model", "qwen3-32b"]


def _chosen(points: list[Point], weight: float, unit: float = 1.0) -> tuple[Point, int]:
    """Return the point (time, omega) that is preferred, and how many solves that took."""
    solves = 0

    def solve(theta: float) -> Scored[Point]:
        nonlocal solves
        solves += 1
        least = min(points, key=lambda point: point[0] + theta * point[1])
        bound = least[0] + theta * least[1]
        return Scored(plan=least, theta=theta, time_s=least[0], omega=least[1], bound=bound)

    fastest, omegas = min(time_s for time_s, _ in points), [omega for _, omega in points]
    best = preferred(
        solve,
        price=weight / unit,
        guess=StartPoint(time_s=points[0][0], omega=points[0][1]),
        corner=Corner(time_s=0.8 * fastest, omega_low=0.0, omega_high=max(omegas)),
    )
    return best.plan, solves


def _front(rng: random.Random) -> list[Point]:
    return [
        (math.exp(rng.uniform(-3, 3)), rng.choice([1.0, 0.003]) * rng.uniform(0, 5))
        for _ in range(rng.randint(1, 60))
    ]


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_the_least_score_is_found_in_a_few_solves(weight: float) -> None:
    rng = random.Random(7)
    for _ in range(300):
        points = _front(rng)
        (time_s, omega), solves = _chosen(points, weight)
        scores = [math.log(t) + weight * w for t, w in points]
        close = math.log(time_s) + weight * omega - min(scores) <= TOLERANCE * 1.01
        assert solves <= MOST_SOLVES
        # Beyond `balanced` a front can have a knee that few solves only come near to.
        assert close or (solves == MOST_SOLVES and weight > 1), (points, time_s, omega)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_neither_unit_nor_length_changes_the_choice(weight: float) -> None:
    rng = random.Random(11)
    for _ in range(100):
        points, slower, unit = _front(rng), rng.choice([1e-3, 60.0]), rng.choice([457.0, 1e-4])
        (time_s, omega), _ = _chosen(points, weight)
        scaled = [(t * slower, w * unit) for t, w in points]
        assert _chosen(scaled, weight, unit)[0] == pytest.approx((time_s * slower, omega * unit))


@pytest.mark.parametrize(
    ("seed", "prefer"),
    [(4, "quality"), (4, "balanced"), (4, "speed"), (8, "balanced"), (15, "balanced")],
)
def test_no_plan_of_a_small_problem_has_a_better_score(seed: int, prefer: str) -> None:
    case = random_case(seed, objective="makespan")
    unit = case.problem.sensitivity.four_bit_omega()

    def score(time_s: float, omega: float) -> float:
        return math.log(time_s) + WEIGHTS[prefer] * (omega / unit if unit else 0.0)  # type: ignore[index]

    free = [case.priced(kv).with_changes(theta=0.0) for kv in case.kvs]
    every = [
        score(value(p, a), sum_omega(p, a)) for p in free for a in assignments(p) if fits(p, a)
    ]
    assert every, "the case has a plan"
    options = SolveOptions(
        method="exact", time_limit_s=60.0, gap=1e-6, backend="highs", budget=None,
        kvs=case.kvs, prefer=prefer,  # type: ignore[arg-type]
    )  # fmt: skip
    best = answer(case.problem, options, None)
    own = best.problem.with_changes(theta=0.0)
    found = score(value(own, best.outcome.assignment), sum_omega(own, best.outcome.assignment))
    assert min(every) - 1e-9 <= found <= min(every) + TOLERANCE * 1.01
    solver = best.plan.solver
    assert (solver.prefer, solver.status) == (prefer, "optimal")
    assert solver.theta == best.problem.theta


def _planned(capsys: pytest.CaptureFixture[str], *words: str) -> Plan:
    assert main([*CARDS, *words, "--json"]) == 0
    return Plan.model_validate_json(capsys.readouterr().out)


@pytest.mark.seldom  # nor does a front's choice, above
def test_quality_does_not_depend_on_how_long_one_generates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for tokens in ("20", "50"):
        plan = _planned(capsys, "--prompt-len", "128", "--gen-len", tokens)
        assert set(plan.precisions) == {Precision.W8A16}, tokens
        assert sum(max(1, len(stage.shares)) for stage in plan.stages) == 3, "all cards are used"
        assert plan.solver.prefer == "balanced"


@pytest.mark.seldom  # nor a front's choice, above
def test_the_unit_of_a_measured_file_changes_no_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Layers differ, as measured ones do, so that which of them have fewer bits is a choice."""
    spec = ModelSpec.by_name("qwen3-32b")
    flat = generic_sensitivity(spec, WEIGHT_ONLY, [KVPrecision.KV16])
    plans = []
    for unit in (1.0, 457.0, 1e-5):
        weights = {
            precision.value: [omega * unit * (1 + layer % 7) for layer, omega in enumerate(column)]
            for precision, column in flat.weights.items()
        }
        path = tmp_path / "omega.json"
        form = json.loads(flat.dump_json()) | {"indicator": "variance", "weights": weights}
        path.write_text(json.dumps(form))
        words = ["--batch", "8", "--omega-file", str(path), "--devices", "4090,3060"]
        plans.append(_planned(capsys, *words))
    assert len(set(plans[0].precisions)) > 1, "the memory is too small for one precision"
    assert len({plan.precisions for plan in plans}) == 1
    assert len({tuple(stage.layers for stage in plan.stages) for plan in plans}) == 1


def test_what_is_allowed_besides_changes_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", "llama-3.1-8b", "--devices", "4090", "--batch", "4", "--bits"]
    usual, more = (_planned(capsys, *small, bits) for bits in ("8,4", "16,8,4,3"))
    assert set(usual.precisions) == set(more.precisions) == {Precision.W8A16}


def test_make_plan_prefers_what_it_is_asked_to() -> None:
    bits = {}
    for prefer in WEIGHTS:
        plan = make_plan("llama-3.1-8b", devices="4090", batch=4, prefer=prefer)
        (bits[prefer],) = {p.weight_bits for p in plan.precisions}
        assert plan.solver.prefer == prefer
    assert bits == {"quality": 16, "balanced": 8, "speed": 4}
    with pytest.raises(ValueError, match="prefer 'fast'.*balanced"):
        make_plan("llama-3.1-8b", devices="4090", prefer="fast")  # type: ignore[arg-type]


def test_theta_is_another_form_and_a_cluster_may_state_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*CARDS, "--theta", "1", "--prefer", "speed"]) == 2
    assert "--prefer has no effect with --theta" in capsys.readouterr().err
    root = Path(__file__).resolve().parents[3]
    words = [
        "--cluster",
        str(root / "clusters/paper/03.yaml"),
        "--model",
        "opt-30b",
        "--json",
        "--engines",
        "1",
    ]
    for extra, prefer in (([], None), (["--prefer", "speed"], "speed")):
        assert main([*words, *extra]) == 0
        solver = Plan.model_validate_json(capsys.readouterr().out).solver
        assert solver.prefer == prefer and (solver.theta == 1.0) == (prefer is None)


def test_the_next_choices_stand_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--devices", "4090,3090", "--model", "llama-3.1-8b", "--engines", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (own,) = [line for line in lines if line.startswith("first token of the last request ")]
    rate = own.split("; the job ")[1].split()[0]
    (better,) = [line for line in lines if line.startswith("better quality: ")]
    (faster,) = [line for line in lines if line.startswith("faster: ")]
    for line, bits in ((better, "16"), (faster, "4")):
        alone = make_plan("llama-3.1-8b", devices="4090,3090", bits=bits)
        predicted = alone.predicted
        assert predicted is not None
        assert f" {bits} bits everywhere: " in line and f" instead of {rate} tokens/s" in line
        shown = float(line.split("everywhere: ")[1].split()[0])
        assert 0.99 <= shown / predicted.output_tokens_per_s <= 1.001
