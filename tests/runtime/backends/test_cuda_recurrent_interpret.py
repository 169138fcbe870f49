"""Recurrent layers through a GPU's stage, its kernels interpreted: the tokens of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton import knobs

from llmpq.kernels.fused.rope_append import rope_append_pages_reference
from llmpq.kernels.weights import dense_weight
from llmpq.model_spec import ModelSpec
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.backends.gpu import cuda_experts, cuda_layers
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.cache import gpu_paged_kv
from llmpq.runtime.cache.gpu_paged_kv import GpuPagedKV
from llmpq.runtime.cache.gpu_paged_latents import GpuPagedLatents
from llmpq.runtime.cache.recurrent_states import with_states
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.models.layers import DecoderLayer, PlainLayers
from llmpq.runtime.request import Request
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from reference.open_stages import OpenStages

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
CPU, NEW = torch.device("cpu"), 3
POOL = PoolSize(num_blocks=6, slots=3, max_len=300, snapshots=2)
KINDS = (
    "qwen3_next",
    "qwen3_5",
    "lfm2",
    "lfm2_moe",
    "bamba",
    "falcon_h1",
    "falcon_h1 without its norm",
    "nemotron_h",
    "granitemoehybrid",
    "olmo_hybrid",
    "minimax",
    "kimi_linear",
)


@pytest.fixture(autouse=True)
def _on_gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(gpu_paged_kv, "rope_append_pages", rope_append_pages_reference)
    monkeypatch.setattr(dense_weight, "pack_dense", lambda weight_NK: weight_NK)
    monkeypatch.setattr(
        PlainLayers, "sparse_mlp", lambda _, *given: cuda_experts.sparse_mlp(*given)
    )
    monkeypatch.setattr(
        DecoderLayer,
        "forward",
        lambda layer, *given, **options: cuda_layers.decoder_layer(layer, *given, **options),
    )


def stages_of(directory: Any, make_plan: Any, *, step_tokens: int) -> OpenStages:
    """Return a stage of a whole model as on a GPU."""
    spec = ModelSpec.from_directory(directory)
    plan = make_plan(directory, batch=3)
    stages = OpenStages(plan, spec, CheckpointSource(directory, spec), pool=POOL)
    base, _ = build_stage(plan, 0, spec, CheckpointSource(directory, spec), CPU, POOL)
    layers = [n for n in range(spec.num_layers) if spec.has_kv(n)]
    pages = with_states(
        (GpuPagedLatents if spec.latent else GpuPagedKV)(
            spec, layers=layers, size=POOL, dtype=torch.float32, device=CPU
        ),
        spec,
        num_layers=sum(map(spec.has_state, range(spec.num_layers))),
        slots=POOL.slots,
        snapshots=POOL.snapshots,
        dtype=torch.float32,
        device=CPU,
    )
    stages.computes = [
        CudaStageRunner(base.model, pages, CPU, torch.float32, size=POOL, step_tokens=step_tokens)
    ]
    return stages


def limits(step_tokens: int, **changed: Any) -> PoolLimits:
    values = {
        "num_blocks": POOL.num_blocks,
        "max_rows": POOL.slots,
        "max_len": POOL.max_len,
        "step_tokens": step_tokens,
        "decode_rows": POOL.slots,
        "tokens_ahead": 2,
        "snapshots": POOL.snapshots,
    }
    return PoolLimits(**values | changed)


def asked(prompts: list[list[int]]) -> list[Request]:
    return [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(
    models: Any, make_plan: Any, random_prompts: Any, kind: str
) -> None:
    """Chunks beside decoding rows, more requests than rows."""
    prompts = random_prompts(9, 17, 1, 4)
    stages = stages_of(models.directory(kind), make_plan, step_tokens=11)
    found = stages.run(Scheduler(limits(11)), asked(prompts)).tokens
    assert [found[i] for i in range(4)] == [row[:NEW] for row in models.greedy(kind, prompts)]


def test_a_prompt_goes_on_from_the_state_of_another(
    models: Any, make_plan: Any, random_prompts: Any
) -> None:
    directory = models.directory("bamba")
    trunk, *tails = random_prompts(128, 4, 7, seed=5)
    prompts = [trunk + tail for tail in tails]
    stages = stages_of(directory, make_plan, step_tokens=100)
    requests = asked(prompts)
    given = limits(100, num_blocks=2)  # room for one at a time
    found = stages.run(Scheduler(given), requests).tokens
    assert [found[i] for i in range(2)] == [row[:NEW] for row in models.greedy("bamba", prompts)]
    assert requests[1].num_prefix_hits == 128
