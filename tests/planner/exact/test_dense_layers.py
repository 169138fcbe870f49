"""Mixtures that begin with dense layers: what those take less is counted, and never too much."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.evaluate.fits import spare_bytes
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.precision import Precision
from llmpq.sizes.memory import layer_weight_bytes, stage_memory
from llmpq.sizes.stage_shape import StageShape

pytestmark = [pytest.mark.pure, pytest.mark.slow]


def problem(bits: str) -> Problem:
    words = f"--device-names H100 --device-numbers 3 --model deepseek-v3 --bits {bits}"
    return make_problem(
        plan_request([*words.split(), "--s", "64", "--n", "8", "--global_bz", "4"])
    )[0]


def sized_to(memory: int, p: Problem) -> Problem:
    """Return the problem on devices of so many bytes."""
    (node,) = p.cluster.nodes
    (group,) = node.devices
    sized = node.model_copy(update={"devices": (group.model_copy(update={"memory": memory}),)})
    return p.with_changes(cluster=Cluster(name="sized", nodes=(sized,)))


def needed(p: Problem, choices: tuple[int, ...], *, last: bool) -> int:
    """Return what a first stage of these layers takes, layer by layer."""
    device = p.cluster.devices[0]
    stage = StageShape(
        precisions=[p.choices[b] for b in choices],
        first=True,
        last=last,
        prefill_chunk=p.chunk,
        on_gpu=True,
        unpacks=device.spec.unpacks_weights,
    )
    context = device.spec.context
    return stage_memory(
        p.spec, p.workload, stage, quantization=p.quantization, context_bytes=context
    ).total_bytes


def first_stage(choices: tuple[int, ...]) -> Assignment:
    stages = (Stage(cls=0, start=0, end=len(choices), choices=choices),)
    rest = Stage(cls=0, start=len(choices), end=61, choices=(0,) * (61 - len(choices)))
    return Assignment(prefill_microbatch=1, decode_microbatch=1, stages=(*stages, rest))


def test_stated_memory_is_that_of_each_layer() -> None:
    spec = ModelSpec.by_name("deepseek-v3")
    options: dict[str, Any] = {"quantization": problem("4").quantization, "dtype_bytes": 2}
    dense, routed = (
        layer_weight_bytes(spec.of_layer(i), Precision.W4A16, **options) for i in (0, 3)
    )
    p = problem("4")
    by_count = [needed(p, (0,) * count, last=False) for count in range(1, 7)]
    grown = [b - a for a, b in zip(by_count, by_count[1:], strict=False)]
    cached = grown[0] - dense
    assert grown == [dense + cached] * 2 + [routed + cached] * 3
    assert routed > 10 * dense


@pytest.mark.parametrize("bits", ["4", "4,8,16"])
def test_what_the_search_takes_to_fit_does_and_dense_layers_do_not_count_as_routed(
    bits: str,
) -> None:
    rng = random.Random(3)
    p, tight, roomy = problem(bits), 0, 0
    for _ in range(60):
        count = rng.choice((1, 2, 3, 4, 7))
        choices = tuple(rng.randrange(len(p.choices)) for _ in range(count))
        need = needed(p, choices, last=False)
        memory = int(need * rng.choice((0.7, 0.95, 1.0, 1.05, 1.5)))
        sized = sized_to(memory, p)
        fits = spare_bytes(sized, first_stage(choices), 0) >= 0
        assert not fits or need <= memory
        tight += fits and memory == need
        if len(p.choices) == 1 and count >= 3:
            assert fits == (need <= memory), "one choice: the search counts to the byte"
        roomy += fits
    assert roomy > 3 and bool(tight) == (len(p.choices) == 1)


def test_a_device_of_just_that_size_holds_the_first_layers() -> None:
    p = problem("4")
    need = needed(p, (0,) * 4, last=False)
    routed = layer_weight_bytes(p.spec, Precision.W4A16, p.quantization, 2)
    assert spare_bytes(sized_to(need, p), first_stage((0,) * 4), 0) == 0
    assert need < 3 * routed, "four routed layers would not have fitted"
