"""A plan that runs, as a start for another problem."""

import random
from contextlib import suppress

import pytest

from llmpq.errors import DoesNotFitError
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.problem.known_plan import KnownPlan, KnownStage
from llmpq.planner.problem.outcome import Unfinished, WarmStart
from llmpq.precision import Precision
from reference.random_problems import random_problem

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


@pytest.mark.parametrize("seed", range(4))
def test_sizes_that_are_not_looked_at_become_the_nearest(seed: int):
    """Sizes of 16 rows that take as many steps as a smaller one are not: 7 is not, 6 and 8 are."""
    p = random_problem(random.Random(seed), batch=16)
    stage = KnownStage(
        device=p.cluster.devices[0].name,
        layers=(0, p.spec.num_layers),
        precisions=(p.choices[0],) * p.spec.num_layers,
    )
    for sizes in ((7, 7), (16, 11), (300, 300), (4, 8)):
        known = KnownPlan(stages=(stage,), prefill_microbatch=sizes[0], decode_microbatch=sizes[1])
        found = known.in_numbers_of(p)
        assert found is not None
        pair = (found.prefill_microbatch, found.decode_microbatch)
        assert pair in p.pairs and (sizes not in p.pairs or pair == sizes)
        with suppress(DoesNotFitError, Unfinished):
            solve_exact(p, time_limit_s=0.2, gap=1e-6, warm=WarmStart(known=found))


def test_nothing_is_left_of_no_device():
    assert plan(4, 6).without([None, None]) is None
