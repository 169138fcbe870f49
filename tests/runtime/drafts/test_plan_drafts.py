"""What a plan says of drafts: how long they may be, what a stage on a GPU or a CPU copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.round_to_nearest import quantize_weight
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan, QuantizationForm, Speculation, StagePlan
from llmpq.precision import Precision, WeightScheme
from llmpq.runtime.drafts.draft_model import upper_plane
from llmpq.runtime.models.linear import Linear
from llmpq.speculation import MAX_GAMMA, draft_bytes

pytestmark = pytest.mark.cpu


def stage(kind: str, threads: int | None = None) -> StagePlan:
    return StagePlan(
        device="d-0",
        node="a",
        kind=kind,
        profile_kind=kind,
        threads=threads,
        layers=(0, 1),
        precisions=(Precision.W8A16,),
    )


def test_a_plan_drafts_no_more_than_the_runtime_takes() -> None:
    data = {"mode": "kv4", "gamma": MAX_GAMMA, "acceptance": 0.9}
    assert Speculation.parse_data(data, where="plan").gamma == MAX_GAMMA
    with pytest.raises(
        ValueError, match=f"'gamma': Input should be less than or equal to {MAX_GAMMA}"
    ):
        Speculation.parse_data(data | {"gamma": MAX_GAMMA + 1}, where="plan")


def test_a_cpu_is_known_by_its_kind_or_its_threads() -> None:
    assert stage("CPU").is_cpu and stage("CPU", 2).is_cpu
    assert stage("not in the table", 1).is_cpu
    assert not stage("H200").is_cpu and not stage("not in the table").is_cpu


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_planes_that_a_gpu_stage_copies(
    symmetric: bool, make_plan: Any, demo_model: Path
) -> None:
    """Weights in rows, as a GPU's, but in host memory."""
    spec = ModelSpec.from_directory(demo_model)
    made: Plan = make_plan(demo_model, (3,), bits="w8a16", dtype="float16")
    on_gpus = [s.model_copy(update={"threads": None, "kind": "H200"}) for s in made.stages]
    form = QuantizationForm(symmetric=symmetric)
    plan = made.model_copy(update={"stages": tuple(on_gpus), "quantization": form})
    kept: list[QuantizedWeight] = []
    for shape in spec.linears():
        weight = quantize_weight(
            torch.randn(shape.out_features, shape.in_features),
            WeightScheme(bits=8, symmetric=symmetric, clip_search=False),
            dtype=torch.float16,
            layout=Layout.ROWS,
            plane_aligned=not symmetric,
        )
        upper_plane(Linear(weight, None), lambda copy: kept.append(copy) or copy)
    of_a_layer = sum(weight.nbytes for weight in kept)
    assert (of_a_layer > 0) == symmetric
    assert draft_bytes(plan, spec, 0, "planes") == 3 * of_a_layer
