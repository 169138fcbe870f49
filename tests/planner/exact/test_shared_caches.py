"""Layers that read another layer's KV cache stay on its stage, whatever method plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from llmpq.errors import BadPlanError
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.baselines.adabits import solve_adabits
from llmpq.planner.baselines.heuristic import solve_heuristic
from llmpq.planner.baselines.pipeedge import solve_pipeedge
from llmpq.planner.baselines.uniform import solve_uniform
from llmpq.planner.check.check import check_alone
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.ilp.solve import solve_ilp
from llmpq.planner.make import make_plan
from llmpq.planner.problem.outcome import Infeasible, Outcome
from llmpq.planner.problem.problem import Problem
from llmpq.precision import KVPrecision
from llmpq.sizes.pool_size import PoolSize
from reference.brute_force import brute_force
from reference.random_problems import random_problem

pytestmark = [pytest.mark.pure, pytest.mark.slow]
TINY = {"layers": (3, 5), "kinds": (1, 2), "devices": (1, 2), "precisions": 2}
BASELINES = (solve_adabits, solve_heuristic, solve_pipeedge, solve_uniform)


def _sharing(seed: int) -> Problem:
    """Return a random problem in which a random layer and all behind it share caches."""
    rng = random.Random(seed)
    p = random_problem(rng, objective="makespan", separable=True, **TINY)  # type: ignore[arg-type]
    layers = p.spec.num_layers
    source = rng.randrange(layers - 1)
    reader = rng.randrange(source + 1, layers)
    sources = [layer if layer < reader else source for layer in range(layers)]
    return p.with_changes(spec=replace(p.spec, kv_sources=tuple(sources)))


def _cuts(found: Outcome) -> list[int]:
    return [stage.start for stage in found.assignment.stages]


def test_the_best_plan_is_brute_forces_and_no_plan_cuts_a_cache_from_its_readers(
    seeds: Callable[[Sequence[int]], Sequence[int]],
) -> None:
    several = 0
    for seed in seeds(range(30)):
        p = _sharing(seed)
        best, _ = brute_force(p)
        try:
            found = solve_exact(p)
        except Infeasible:
            assert best == float("inf")
            continue
        assert found.value == pytest.approx(best, rel=1e-8)
        assert solve_ilp(p).value == pytest.approx(best, rel=1e-6)
        for solve in BASELINES:
            try:
                other = solve(p)
            except Infeasible:
                continue
            assert all(p.spec.may_cut(start) for start in _cuts(other))
            assert other.value >= best * (1 - 1e-9)
        assert all(p.spec.may_cut(start) for start in _cuts(found))
        several += len(_cuts(found)) > 1
    assert several, "some plans have several stages"


def test_gemma_is_cut_in_front_of_its_shared_caches_and_a_plan_cut_behind_is_refused() -> None:
    spec = ModelSpec.by_name("gemma-4-e2b")
    assert [layer for layer in range(spec.num_layers) if spec.may_cut(layer)] == [*range(14)]
    plan = make_plan(
        model="gemma-4-e2b",
        devices="cpu=64GB:2",
        batch=1,
        prompt_len=64,
        gen_len=8,
        method="uniform",
    )
    assert [stage.layers for stage in plan.stages] == [(0, 13), (13, 35)]
    check_alone(plan)
    moved = [stage.model_copy() for stage in plan.stages]
    moved[0] = moved[0].model_copy(
        update={"layers": (0, 14), "precisions": (*moved[0].precisions, moved[0].precisions[0])}
    )
    moved[1] = moved[1].model_copy(
        update={"layers": (14, 35), "precisions": moved[1].precisions[1:]}
    )
    with pytest.raises(BadPlanError, match="layer 15 attends to the keys and values of layer 13"):
        check_alone(plan.model_copy(update={"stages": tuple(moved)}))


def test_shared_caches_and_unlike_heads_are_counted_once_and_as_they_are() -> None:
    """E2B: of 35 layers 15 keep keys and values, three of them of 512 channels, the others 256."""
    spec = ModelSpec.by_name("gemma-4-e2b")
    size = PoolSize(num_blocks=10, slots=1, max_len=1280)
    token = 2 * 2 * (12 * 256 + 3 * 512)
    layers = range(spec.num_layers)
    found = size.nbytes(spec, KVPrecision.KV16, layers=layers, dtype_bytes=2)
    assert found == 10 * 128 * token
    inputs = 35 * 256 * (262144 + 1536) + 256
    assert spec.per_layer_params == inputs
    assert spec.embedding_params == 262144 * 1536 + inputs
    assert spec.hop_features == 1536 + 35 * 256
    assert spec.of_layer(20).ffn == 2 * spec.of_layer(14).ffn == 2 * 6144
