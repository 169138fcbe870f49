"""Families through a GPU's layers, kernels interpreted: the tokens of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton import knobs

from llmpq.kernels.kv.reference import ScoreRule
from llmpq.kernels.weights import dense_weight
from llmpq.model_spec import ModelSpec
from llmpq.runtime.backends.build_stage import load_slots
from llmpq.runtime.backends.gpu import cuda_experts, cuda_layers, cuda_rules
from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner
from llmpq.runtime.models.layers import DecoderLayer, PlainLayers
from llmpq.runtime.models.rotary import Rotary
from llmpq.runtime.weights.sources import CheckpointSource

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
CPU, NEW = torch.device("cpu"), 4
PROMPTS = (14, 7, 2)
"""The longest first: Transformers goes on with the dynamic frequencies of an earlier one else."""
KINDS = (
    "llama with dynamic rope",
    "llama with yarn",
    "gemma2",
    "gemma3",
    "phi3",
    "glm4",
    "granite",
    "olmo3",
    "qwen3_moe with windows, every other layer dense",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "cohere",
    "hunyuan",
    "exaone4",
    "apertus",
)
"""One for each path through the kernels; test_cuda_families_gpu.py has all."""


@pytest.fixture(autouse=True)
def _on_gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(dense_weight, "pack_dense", lambda weight_NK: weight_NK)
    monkeypatch.setattr(
        PlainLayers, "sparse_mlp", lambda _, *given: cuda_experts.sparse_mlp(*given)
    )
    monkeypatch.setattr(
        DecoderLayer,
        "forward",
        lambda layer, *given, **options: cuda_layers.decoder_layer(layer, *given, **options),
    )


def tokens_of(
    run: Any, models: Any, make_plan: Any, kind: str, prompts: list[list[int]]
) -> list[list[int]]:
    """Return what a stage of a whole model gives: prompts in two micro-batches, steps of three."""
    directory = models.directory(kind)
    options = {"prompt_len": max(map(len, prompts)), "gen_len": NEW}
    plan = make_plan(directory, batch=3, decode_microbatch=3, prefill_microbatch=2, **options)
    spec = ModelSpec.from_directory(directory)
    loaded, kv = load_slots(plan, 0, spec, CheckpointSource(directory, spec), CPU)
    assert not loaded.asks_host, "experts run one after the other"
    compute = CudaSlotStageRunner(
        *(loaded, kv, CPU, torch.float32),
        workload=plan.workload,
        decode_microbatch=plan.decode_microbatch,
    )
    found: list[list[int]] = run(compute, plan, prompts, NEW)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(
    models: Any, make_plan: Any, random_prompts: Any, stage_tokens: Any, kind: str
) -> None:
    """Prompts within and beyond windows."""
    prompts = random_prompts(*PROMPTS)
    expected = [tokens[:NEW] for tokens in models.greedy(kind, prompts)]
    assert tokens_of(stage_tokens, models, make_plan, kind, prompts) == expected


def test_what_no_kernel_computes_is_refused(
    models: Any, make_plan: Any, random_prompts: Any, stage_tokens: Any, monkeypatch: Any
) -> None:
    """Planted: lengths that decide in a way that nothing on a device makes."""
    monkeypatch.setattr(Rotary, "is_dynamic", False)
    with pytest.raises(ValueError, match="rotary positions"):
        kind = "llama with dynamic rope"
        tokens_of(stage_tokens, models, make_plan, kind, random_prompts(*PROMPTS))


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [("olmo3", {"window": 0}), ("gpt_oss", {"sinks_H": None})],
)
def test_a_rule_that_is_left_out_gives_other_tokens(
    models: Any,
    make_plan: Any,
    random_prompts: Any,
    stage_tokens: Any,
    monkeypatch: Any,
    kind: str,
    left_out: Any,
) -> None:
    def without(
        q: Any, k: Any, v: Any, step: Any, scale: float, rule: ScoreRule, *rest: Any
    ) -> Any:
        return whole(q, k, v, step, scale, ScoreRule(**{**vars(rule), **left_out}), *rest)

    whole = cuda_rules.attend
    monkeypatch.setattr(cuda_rules, "attend", without)
    prompts = random_prompts(*PROMPTS)
    expected = [tokens[:NEW] for tokens in models.greedy(kind, prompts)]
    assert tokens_of(stage_tokens, models, make_plan, kind, prompts) != expected
