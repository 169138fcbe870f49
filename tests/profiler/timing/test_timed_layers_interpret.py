"""The profiler's steps through a GPU's stage over a pool, its kernels interpreted."""

from typing import Any

import pytest
import torch
from triton import knobs

from llmpq.costs.cost_model import Phase
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.profiler.timing import timed_layers
from llmpq.profiler.timing.cases import Sampling, Target, TimedCase
from llmpq.profiler.timing.timed_layers import TimedModel
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.cache.gpu_paged_kv import GpuPagedKV
from llmpq.sizes.memory import Quantization
from reference.interpreted_stage import take_gpu_path

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


def over_gpu_pool(
    model: Any, kv: KVPrecision, pool: Any, *, step_tokens: int, **given: Any
) -> CudaStageRunner:
    assert kv is KVPrecision.KV16
    pages = GpuPagedKV(model.spec, size=pool, **given)
    del given["layers"]
    return CudaStageRunner(model, pages, **given, size=pool, step_tokens=step_tokens)


def test_steps_of_a_gpu_can_be_repeated(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_layers, "stage_over_pool", over_gpu_pool)
    take_gpu_path(monkeypatch, experts=False)
    spec = ModelSpec.from_directory(tiny_models.directory("llama"))
    timed = TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
    shapes: list[tuple[Phase, dict[str, int], int]] = [
        (Phase.DECODE, {"length": 6}, 2),
        (Phase.PREFILL, {"length": 3}, 6),
        (Phase.PREFILL, {"length": 2, "start": 5}, 4),
        (Phase.VERIFY, {"length": 6, "q_len": 2}, 4),
    ]
    for phase, sizes, tokens in shapes:
        target = Target(device_kind="g", part="layer", phase=phase, dtype="float32")
        call, layers = timed.step(TimedCase(target=target, v=2, **sizes))
        call()
        hidden: Any = call()
        assert hidden.shape == (1, tokens, spec.hidden) and layers == spec.num_layers
        for part in ("embedding", "head"):
            target = Target(device_kind="g", part=part, phase=phase, dtype="float32")
            call, _ = timed.step(TimedCase(target=target, v=2, **sizes))
            call()
