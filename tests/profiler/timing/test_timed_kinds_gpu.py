"""Models whose layers differ are timed kind by kind on a GPU, steps with drafts among them."""

from __future__ import annotations

import pytest
import torch

from llmpq.costs.cost_model import Phase
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.profiler.timing.cases import Effort, Part, Sampling, Target, TimedCase
from llmpq.profiler.timing.timed_layers import TimedModel
from llmpq.sizes.memory import Quantization
from reference.unlike_layers import DENSE, NANO, NEXT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("spec", [NEXT, DENSE, NANO], ids=lambda spec: spec.name)
def test_all_phases_are_timed(spec: ModelSpec) -> None:
    timed = TimedModel(spec, torch.device("cuda"), Quantization(), Sampling())
    shapes: list[tuple[Phase, dict[str, int]]] = [
        (Phase.DECODE, {"length": 6}),
        (Phase.PREFILL, {"length": 40}),
        (Phase.PREFILL, {"length": 20, "start": 5}),
        (Phase.VERIFY, {"length": 9, "q_len": 4}),
    ]
    parts: tuple[Part, ...] = ("layer", "embedding", "head")
    for phase, sizes in shapes:
        for part in parts:
            given = {"phase": phase, "dtype": "bfloat16", "part": part, "device_kind": "g"}
            target = Target.model_validate({**given, "precision": Precision.W16A16})
            timing = timed.time(TimedCase(target=target, v=2, **sizes), Effort(seconds=1e-3))
            assert 0 < timing.seconds < 1
            assert part != "layer" or timing.layers == spec.num_layers
