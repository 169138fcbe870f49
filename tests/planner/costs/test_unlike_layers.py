"""Layers whose weights differ much count for what each takes, not for the largest of them."""

from __future__ import annotations

import pytest

from llmpq.models.model_spec import ModelSpec, builtin_configs
from llmpq.planner.make import make_plan
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.precision import Precision
from llmpq.sizes.memory import Quantization, layer_weight_bytes

pytestmark = pytest.mark.pure
NANO = "nemotron-3-nano-30b-a3b"


def own_bytes(name: str, precision: Precision) -> list[int]:
    spec = ModelSpec.by_name(name)
    layers = range(spec.num_layers)
    return [layer_weight_bytes(spec.of_layer(i), precision, Quantization(), 2) for i in layers]


def test_a_card_that_holds_the_layers_is_not_refused() -> None:
    """4 bits of the 52 layers are 15.5 GiB; 52 of the largest would be 34."""
    own = own_bytes(NANO, Precision.W4A16)
    assert sum(own) < 16 * 2**30 and max(own) * len(own) > 33 * 2**30
    plan = make_plan(NANO, devices="4090", batch=1, bits="4")
    memory = plan.stages[0].memory
    assert memory is not None and memory.weights_bytes == sum(own)
    two = make_plan(NANO, devices="3060:2", batch=1, bits="4", method="ilp")
    held = [stage.memory.weights_bytes for stage in two.stages if stage.memory is not None]
    assert sum(held) == sum(own)


@pytest.mark.parametrize("name", ["llama-2-7b", "deepseek-v2-lite", "gemma-3-12b", "glm-4.5-air"])
def test_layers_that_are_nearly_alike_count_as_equal(name: str) -> None:
    problem, _, _ = make_problem(PlanRequest(model=name, devices="A100-80:4", batch=2))
    assert problem.unlike_bytes is None
    assert (problem.all_layer_bytes == problem.all_layer_bytes[0]).all()


@pytest.mark.parametrize("name", [n for n in builtin_configs() if "nemotron" in n or "lfm2" in n])
def test_every_layer_is_counted_once(name: str) -> None:
    problem, _, _ = make_problem(PlanRequest(model=name, devices="A100-80:8", batch=2))
    total = problem.all_layer_bytes.sum(axis=0) - problem.kv_bytes_of_layers.sum()
    for index, precision in enumerate(problem.choices):
        own = sum(own_bytes(name, precision))
        if problem.unlike_bytes is not None:
            assert total[index] == own
        else:
            assert own <= total[index] <= 1.11 * own
