"""Plans state the pool of KV blocks that their runs keep, and count its bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache

import pytest

from llmpq.errors import BadPlanError, DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.check.check import check_alone
from llmpq.plans.plan import Plan, Speculation
from llmpq.plans.speculation import SpeculationMode, draft_bytes, draft_weight_bytes
from llmpq.precision import KVPrecision
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options.engine_options import EngineOptions

pytestmark = pytest.mark.pure
GIB = 1 << 30
JOB = "--batch 8 --prompt-len 512 --gen-len 100"
LONG = "--batch 1 --bits 4 --theta 1"
CASES = {
    # Flags, the model, GiB of KV of all stages by hand.
    "rounded to blocks": (f"--devices T4,V100 {JOB}", "llama-3.1-8b", 32 * 8 * 640 * 4096 / GIB),
    "latents": ("--devices 4090 --bits 8 " + JOB, "deepseek-v2-lite", 27 * 8 * 640 * 576 * 2 / GIB),
    "windows, one card": (
        f"--devices a6000 {LONG} --prompt-len 130000 --gen-len 1072",
        "gemma-3-27b",
        (10 * 131072 + 52 * 13 * 128) * 8192 / GIB,
    ),
    "windows, 3 cards": (
        f"--devices 3090,3060:2 {LONG} --prompt-len 60000 --gen-len 5536",
        "gemma-3-27b",
        (10 * 65536 + 52 * 13 * 128) * 8192 / GIB,
    ),
    "every other layer": (
        f"--devices 4090 {LONG} --prompt-len 120000 --gen-len 8000",
        "gpt-oss-20b",
        (12 * 128000 + 12 * 6 * 128) * 2048 / GIB,
    ),
    "4 bits": (
        f"--devices 3090 --kv 4 {JOB}",
        "llama-3.1-8b",
        32 * 8 * (4 * 8 * (128 * 128 + (128 + 128) * 4) + 160 * 4096) / GIB,
    ),
    "with room": (
        "--devices a6000 --bits 16 --batch 4 --prompt-len 600 --gen-len 200",
        "llama-2-7b",
        32 * 4 * 896 * 16384 / GIB,
    ),
    "CPU": (
        f"--devices cpu=64GB+8threads {JOB} --dtype bfloat16",
        "llama-3.1-8b",
        32 * 8 * 640 * 4096 / GIB,
    ),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Plan, str]]:
    """Return the plan of a case, and what the command prints; each is made once."""

    @cache
    def plan(name: str) -> tuple[Plan, str]:
        flags, model, _ = CASES[name]
        path, said = tmp_path_factory.mktemp("planned") / "plan.json", io.StringIO()
        with redirect_stdout(said):
            assert main([*flags.split(), "--model", model, "-o", str(path)]) == 0
        return Plan.load(path), said.getvalue()

    return plan


@pytest.mark.parametrize("name", CASES)
def test_a_plan_counts_the_pool_that_its_run_keeps(
    name: str, planned: Callable[[str], tuple[Plan, str]]
) -> None:
    """In a batch job, and where requests come live."""
    _, model, by_hand = CASES[name]
    plan, said = planned(name)
    assert "KV pool: " in said
    spec = ModelSpec.by_name(model)
    assert plan.pool is not None and plan.prefill_chunk == 512
    counted = [stage.memory.kv_bytes for stage in plan.stages if stage.memory is not None]
    assert counted == list(plan.pool.stage_bytes)
    assert sum(counted) / GIB == pytest.approx(by_hand, rel=0.005)
    for live in (False, True):
        pool = PoolPlan(plan, spec, EngineOptions(offline=not live))
        assert live or pool.limits.row_tokens == 512
        if not live or plan.workload.kv is KVPrecision.KV16:
            kept = [
                pool.size.nbytes(
                    spec,
                    plan.workload.kv,
                    layers=range(*stage.layers),
                    dtype_bytes=plan.workload.dtype_bytes,
                )
                for stage in plan.stages
            ]
            assert name == "4 bits" or kept == counted
            assert pool.size.num_blocks == plan.pool.num_blocks


def test_the_check_counts_the_pool_anew(planned: Callable[[str], tuple[Plan, str]]) -> None:
    plan, _ = planned("rounded to blocks")
    check_alone(plan)
    assert plan.pool is not None
    fewer = plan.pool.model_copy(update={"num_blocks": plan.pool.num_blocks - 1})
    with pytest.raises(BadPlanError, match="its workload needs"):
        check_alone(plan.model_copy(update={"pool": fewer}))
    check_alone(plan.model_copy(update={"pool": None}))


def test_an_older_plan_that_counts_a_slot_for_each_request_is_refused(
    planned: Callable[[str], tuple[Plan, str]],
) -> None:
    plan, _ = planned("rounded to blocks")
    first = plan.stages[0]
    assert first.memory is not None
    less = {
        "kv_bytes": first.memory.kv_bytes - (1 << 20),
        "total_bytes": first.memory.total_bytes - (1 << 20),
    }
    changed = first.model_copy(update={"memory": first.memory.model_copy(update=less)})
    stages = (changed, *plan.stages[1:])
    older = {"pool": None, "prefill_chunk": None, "stages": stages}
    with pytest.raises(BadPlanError, match="the formulas give [0-9]+: re-plan with llmpq-algo"):
        check_alone(plan.model_copy(update=older))


@pytest.mark.parametrize("mode", ["kv4", "w4kv4"])
def test_the_copy_that_drafts_read_is_counted_beside_the_pool(
    mode: SpeculationMode, planned: Callable[[str], tuple[Plan, str]]
) -> None:
    """A run has all blocks that the plan states where it has room for the copy, too."""
    spec = ModelSpec.by_name("llama-2-7b")
    made, _ = planned("with room")
    drafts = Speculation(
        mode=mode, gamma=2, acceptance=0.8, extra_bytes=draft_bytes(made, spec, 0, mode)
    )
    plan = made.model_copy(update={"speculation": drafts})
    check_alone(plan)
    (stage,) = plan.stages
    assert plan.pool is not None and stage.memory is not None
    kept = draft_bytes(plan, spec, 0, mode)
    copy = kept - draft_weight_bytes(plan, spec, 0, mode)
    assert 0.2 * plan.pool.stage_bytes[0] < copy < 0.5 * plan.pool.stage_bytes[0]
    for room, fits in ((kept, True), (kept - 1, False)):
        memory = stage.memory.model_copy(update={"limit_bytes": stage.memory.total_bytes + room})
        stages = (stage.model_copy(update={"memory": memory}),)
        pool = PoolPlan(
            plan.model_copy(update={"stages": stages}), spec, EngineOptions(speculate=mode, gamma=2)
        )
        if fits:
            assert pool.size.num_blocks == plan.pool.num_blocks
        else:
            with pytest.raises(DoesNotFitError, match="its stages have room for"):
                _ = pool.size
