"""What a problem hands to another of other lengths is what that one would compute itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.sizes.pool_size import planned_kv_bytes

pytestmark = pytest.mark.pure
MODELS = ("gemma-3-12b", "qwen3-next-80b-a3b", "gemma-3n-e2b", "deepseek-v3", "llama-3.2-1b")
"""Windows, recurrent layers, shared caches, dense layers before a mixture, all layers alike."""


def job(model: str) -> Problem:
    asked = PlanRequest(model=model, devices="3090,4090:2,cpu=64GB+8threads", batch=3, context=4096)
    return make_problem(asked)[0]


@pytest.mark.parametrize("model", MODELS)
def test_layers_of_a_kind_keep_as_much(model: str) -> None:
    p = job(model)
    each = [
        planned_kv_bytes(
            p.spec, p.workload, (layer,), chunk=p.chunk,
            prefill_microbatch=1,
        )
        for layer in range(p.spec.num_layers)
    ]  # fmt: skip
    assert p.kv_bytes_of_layers.tolist() == each


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [200, 9000])
def test_another_length_has_the_tables_of_its_own(model: str, tokens: int) -> None:
    kept = job(model).prepared().with_context(tokens)
    fields = {f.name: getattr(kept, f.name) for f in dataclasses.fields(kept)}
    fresh = Problem(**fields)
    assert "classes" in kept.__dict__ and "classes" not in fresh.__dict__
    assert kept.classes == fresh.classes and kept.members == fresh.members
    for name in ("weights", "all_layer_bytes", "open", "cuts"):
        assert np.array_equal(getattr(kept, name), getattr(fresh, name)), name
    assert np.array_equal(kept.capacity(1, 1), fresh.capacity(1, 1))
    assert kept.class_links.terms.keys() == fresh.class_links.terms.keys()


def test_another_dtype_or_choice_is_computed_anew() -> None:
    p = job("llama-3.2-1b").prepared()
    wide = p.with_changes(workload=p.workload.model_copy(update={"dtype": "float32"}))
    assert (wide.weights > p.weights).any()
    fewer = p.with_changes(choices=p.choices[-1:])
    assert fewer.weights.tolist() == p.weights[-1:].tolist() and fewer.open.shape[1] == 1
    pinned = p.with_changes(pins={p.cluster.devices[1].name: (0, 1)})
    assert len(pinned.classes) > len(p.classes)
