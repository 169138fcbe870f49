"""How long a start is predicted to take: only what has to be loaded counts."""

import pytest

from llmpq.precision import Precision
from llmpq.runtime.launch.stages.stage_place import device_of
from llmpq.runtime.launch.start_times import (
    CONNECT_S,
    LOAD_BYTES_PER_S,
    PROCESS_S,
    StartModel,
    StartTimes,
    num_held,
)
from llmpq.runtime.steps.trace import LoadReport

pytestmark = pytest.mark.pure


def report(layers_s: float, compiled_s: float = 0.0) -> LoadReport:
    return LoadReport(
        weights_bytes=1, kv_bytes=1, seconds=layers_s, layers_s=layers_s, compiled_s=compiled_s
    )


@pytest.mark.parametrize("threads", [None, 1])
def test_layers_that_are_there_cost_nothing(demo_model, make_plan, threads):
    def made(splits, **shape):
        plan = make_plan(demo_model, splits, batch=2, **shape)
        stages = [stage.model_copy(update={"threads": threads}) for stage in plan.stages]
        return plan.model_copy(update={"stages": tuple(stages)})

    before, now, lower = made((4,)), made((2,)), made((4,), bits="w8a16")
    model = StartModel()
    took = StartTimes(started_s=10.0, connected_s=0.5, load_s={0: 6.0, 1: 7.0})
    model.learn(before, took, [report(4.0, 1.5), report(4.0, 2.0)], moved=())
    first, last = map(device_of, before.places)
    whole_s = 10.0 + (4 * 1.0 + 1.0) + 0.5
    assert model.predicted_s(before, before, ()) == pytest.approx(whole_s)
    assert model.predicted_s(before, before, {first}) == pytest.approx(whole_s)
    assert [num_held(worker, before) for worker in now.workers] == [2, 4]
    held = model.predicted_s(now, before, {first, last})  # two layers more on the second
    assert held == pytest.approx(2 * 1.0 + 1.0 + 0.5)
    other = model.predicted_s(lower, before, {first, last})
    compiled_s = 2.0 if threads is None else 0.0  # a CPU's kernels are of all precisions
    assert other == pytest.approx(4 * 1.0 + 1.0 + 0.5 + compiled_s)
    assert lower.places[0].precisions[0] is Precision.W8A16


def test_the_first_start_is_predicted_by_its_bytes(demo_model, make_plan):
    """And by what was seen of one that was lost before it ended."""
    plan = make_plan(demo_model, (4,))
    layers = max(place.num_layers for place in plan.places)
    model = StartModel(layer_bytes=2 * LOAD_BYTES_PER_S)
    assert model.predicted_s(plan, plan, ()) == pytest.approx(PROCESS_S + 2 * layers + CONNECT_S)
    model.begun(StartTimes())
    assert model.predicted_s(plan, plan, ()) == pytest.approx(PROCESS_S + 2 * layers + CONNECT_S)
    model.begun(StartTimes(started_s=4.0))
    assert model.predicted_s(plan, plan, ()) == pytest.approx(4.0 + 2 * layers + CONNECT_S)
