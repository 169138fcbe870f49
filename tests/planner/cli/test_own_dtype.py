"""A plan that uses no card without bfloat16 computes in the checkpoint's dtype, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.cli.own_dtype import in_dtype, where_unused
from llmpq.planner.cli.show_plan import PlanJob, read_job
from llmpq.planner.make import make_plan
from llmpq.planner.problem.requests import PlanRequest
from llmpq.plans.topology import Topology, read_plan

pytestmark = pytest.mark.pure

REQUEST = PlanRequest(model="qwen3-0.6b", devices="a6000,t4", batch=2, gen_len=16)


@pytest.fixture(scope="module")
def job() -> PlanJob:
    return read_job(REQUEST)


@pytest.mark.parametrize("engines", [1, 2])
def test_of_engines_without_the_card_and_its_costs(
    job: PlanJob, engines: int, tmp_path: Path
) -> None:
    words = f"--model qwen3-0.6b --devices a6000:{engines} --engines {engines} --dtype float16"
    path = tmp_path / "plan.json"
    assert main([*words.split(), "--batch", "2", "--gen-len", "16", "-o", str(path)]) == 0
    plan = read_plan(path)
    assert isinstance(plan, Topology) == (engines > 1)
    dtype, notes = where_unused(REQUEST, job.problem, plan, job.notes)
    assert dtype == "bfloat16"
    assert [n for n in notes if "T4, which has no bfloat16, is not used" in n]
    changed = in_dtype(plan, dtype)
    assert changed.workload.dtype == "bfloat16"
    for one in changed.plans:
        assert one.inputs is not None
        assert {entry.dtype for entry in one.inputs.costs} == {one.workload.dtype} == {"bfloat16"}


def test_a_card_that_shares_a_stage_is_used(job: PlanJob) -> None:
    plan = make_plan(
        "qwen3-0.6b",
        devices="a6000,t4",
        batch=2,
        gen_len=16,
        dtype="float16",
        tensor_parallel="3:1",
    )
    assert len(plan.stages[0].devices) == 2
    assert where_unused(REQUEST, job.problem, plan, job.notes) == ("float16", job.notes)
