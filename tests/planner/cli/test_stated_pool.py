"""Plans state the pool of KV blocks that their runs keep, and count its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.errors import BadPlanError, DoesNotFitError
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.__main__ import main
from llmpq.planner.check.check import check_alone
from llmpq.precision import KVPrecision
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options import EngineOptions

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
    "CPU": (
        f"--devices cpu=64GB+8threads {JOB} --dtype bfloat16",
        "llama-3.1-8b",
        32 * 8 * 640 * 4096 / GIB,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("live", [False, True])
def test_a_plan_counts_the_pool_that_its_run_keeps(
    name: str, live: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags, model, by_hand = CASES[name]
    path = tmp_path / "plan.json"
    assert main([*flags.split(), "--model", model, "-o", str(path)]) == 0, capsys.readouterr().err
    assert "KV pool: " in capsys.readouterr().out
    plan, spec = Plan.load(path), ModelSpec.by_name(model)
    assert plan.pool is not None and plan.prefill_chunk == 512
    counted = [stage.memory.kv_bytes for stage in plan.stages if stage.memory is not None]
    assert counted == list(plan.pool.stage_bytes)
    assert sum(counted) / GIB == pytest.approx(by_hand, rel=0.005)
    pool = PoolPlan(plan, spec, EngineOptions(offline=not live))
    assert pool.use_paged_engine and (live or pool.limits.row_tokens == 512)
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


def test_the_check_counts_the_pool_anew(tmp_path: Path) -> None:
    flags, model, _ = CASES["rounded to blocks"]
    path = tmp_path / "plan.json"
    assert main([*flags.split(), "--model", model, "-o", str(path)]) == 0
    plan = Plan.load(path)
    check_alone(plan)
    assert plan.pool is not None
    fewer = plan.pool.model_copy(update={"num_blocks": plan.pool.num_blocks - 1})
    for pool in (fewer, None):
        with pytest.raises((BadPlanError, DoesNotFitError)):
            check_alone(plan.model_copy(update={"pool": pool}))


def test_what_a_pool_on_gpus_lacks_has_slots_and_whole_prompts(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = "--devices 4090 --model opt-2.7b --kv 8 --batch 4 --prompt-len 600 --gen-len 9"
    assert main([*words.split(), "-o", str(path)]) == 0
    plan = Plan.load(path)
    check_alone(plan)
    assert plan.pool is None and plan.prefill_chunk is None and len(plan.chunks) == 1
    spec = ModelSpec.by_name("opt-2.7b")
    assert not PoolPlan(plan, spec, EngineOptions(offline=True)).use_paged_engine
