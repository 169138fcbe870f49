"""States of recurrent layers kept for prefixes: counted where all stages have room, all or none."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmpq
from llmpq.errors import BadPlanError
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.check.check import check_alone
from llmpq.plans.plan import MemoryForm, Plan
from llmpq.plans.prefix_states import prefix_notes, with_prefix_states
from llmpq.sizes.pool_size import LEAST_SNAPSHOTS
from llmpq.sizes.state_size import state_bytes

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module", params=["qwen3.5-27b", "nemotron-3-nano-30b-a3b"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return llmpq.make_plan(
        model=request.param, devices="a6000,3090", batch=6, prompt_len=400, gen_len=20, bits="4"
    )


def _spec(plan: Plan) -> ModelSpec:
    assert plan.inputs is not None, "the planner writes its entries"
    return plan.inputs.model


def _memories(plan: Plan) -> list[MemoryForm]:
    return [stage.memory for stage in plan.stages if stage.memory is not None]


def _limited(plan: Plan, spare: int) -> Plan:
    """Return the plan with a limit on the last stage of so many bytes more than it needs."""
    *others, last = plan.stages
    assert last.memory is not None
    limit = last.memory.least_bytes + spare
    own = last.memory.model_copy(update={"limit_bytes": limit})
    return plan.model_copy(update={"stages": (*others, last.model_copy(update={"memory": own}))})


def test_as_many_states_as_requests_are_counted_and_checked(plan: Plan) -> None:
    work = plan.workload
    for stage, memory in zip(plan.stages, _memories(plan), strict=True):
        layers = range(*stage.layers)
        slots = max(LEAST_SNAPSHOTS, work.batch)
        kept = state_bytes(_spec(plan), layers, slots=slots, dtype_bytes=work.dtype_bytes)
        assert memory.prefix_bytes == kept > 0
        assert memory.total_bytes == memory.least_bytes + kept <= memory.limit_bytes
    check_alone(plan)
    assert prefix_notes(plan, _spec(plan)) == []


def test_a_plan_that_states_other_bytes_is_refused(plan: Plan) -> None:
    stage = plan.stages[0]
    assert stage.memory is not None
    wrong = stage.model_copy(update={"memory": stage.memory.with_prefix_bytes(1024)})
    with pytest.raises(BadPlanError, match="1024 bytes for prefix_bytes"):
        check_alone(plan.model_copy(update={"stages": (wrong, *plan.stages[1:])}))


def test_one_stage_without_room_means_none_on_any(plan: Plan) -> None:
    last = _memories(plan)[-1].prefix_bytes
    for spare, beside, has_room in ((last, 0, True), (last - 1, 0, False), (last, 1, False)):
        drafts = [*[0] * (len(plan.stages) - 1), beside]
        tight = _limited(plan, spare)
        stages = with_prefix_states(tight.stages, _spec(plan), plan.workload, beside=drafts)
        found = tight.model_copy(update={"stages": stages})
        assert [memory.prefix_bytes > 0 for memory in _memories(found)] == [has_room] * len(stages)
        assert bool(prefix_notes(found, _spec(plan))) is not has_room


def test_devices_that_share_a_stage_count_none(tmp_path: Path) -> None:
    made = tmp_path / "plan.json"
    words = "--model qwen3.5-27b --devices 3090:2 --tensor-parallel 2 --batch 2 --bits 4 --json"
    assert main([*words.split(), "-o", str(made)]) == 0
    plan = Plan.load(made)
    assert [memory.prefix_bytes for memory in _memories(plan)] == [0]
    check_alone(plan)
    assert prefix_notes(plan, _spec(plan)) == []
