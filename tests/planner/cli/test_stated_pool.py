"""`llmpq-algo --kv-pool`: plans of GPUs state the pool that their runs then keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.__main__ import main
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.launch.stages.stage_settings import StageSettings

pytestmark = pytest.mark.pure
JOB = ["--global_bz", "8", "--s", "512", "--n", "100"]
TWO = ["--device-names", "T4", "V100", "--device-numbers", "1", "1", "--model", "llama-3.1-8b"]


def test_a_run_of_the_plan_keeps_the_pool(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec, path = ModelSpec.by_name("llama-3.1-8b"), tmp_path / "plan.json"
    assert main([*TWO, *JOB, "--kv-pool", "-o", str(path)]) == 0
    assert "KV pool: 40 blocks, 5120 tokens at once" in capsys.readouterr().out
    pool = PoolPlan(Plan.load(path), spec, StageSettings(model_dir=""))
    assert pool.serves and pool.limits.num_blocks == 8 * 5
    assert main([*TWO, *JOB, "-o", str(path)]) == 0
    slots = PoolPlan(Plan.load(path), spec, StageSettings(model_dir=""))
    assert slots.plan.pool is None and not slots.serves


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--speculate", "ngram"], "does not go with speculation yet; leave the pool out"),
        (["--pareto"], "--kv-pool has no effect with --pareto"),
    ],
)
def test_what_has_no_pool_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TWO, *JOB, "--kv-pool", *words]) == 2
    assert said in capsys.readouterr().err
