"""A plan that runs, as a start for another problem."""

import pytest

from llmpq.planner.problem.known_plan import KnownPlan, KnownStage
from llmpq.precision import Precision

pytestmark = pytest.mark.pure
W8, W4 = Precision.W8A16, Precision.W4A16


def plan(*sizes: int) -> KnownPlan:
    stages, start = [], 0
    for number, size in enumerate(sizes):
        bits = tuple(W8 if layer % 2 else W4 for layer in range(start, start + size))
        stages.append(
            KnownStage(device=f"d{number}", layers=(start, start + size), precisions=bits)
        )
        start += size
    return KnownPlan(stages=tuple(stages), prefill_microbatch=2, decode_microbatch=4)


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["a", "b", "c"], [("a", (0, 4)), ("b", (4, 10)), ("c", (10, 12))]),
        ([None, "b", "c"], [("b", (0, 10)), ("c", (10, 12))]),
        (["a", None, "c"], [("a", (0, 7)), ("c", (7, 12))]),
        (["a", "b", None], [("a", (0, 4)), ("b", (4, 12))]),
        ([None, "b", None], [("b", (0, 12))]),
    ],
)
def test_neighbours_take_the_layers_of_a_device_that_is_gone(names, layers):
    found = plan(4, 6, 2).without(names)
    assert [(stage.device, stage.layers) for stage in found.stages] == layers
    bits = [precision for stage in found.stages for precision in stage.precisions]
    assert bits == [W8 if layer % 2 else W4 for layer in range(12)]


def test_nothing_is_left_of_no_device():
    assert plan(4, 6).without([None, None]) is None
