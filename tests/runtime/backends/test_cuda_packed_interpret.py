"""Families over packed KV caches through a GPU's layers, kernels interpreted: as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton import knobs

from llmpq.kernels.kv.low_bit.low_bit_cache import KERNEL_HEAD_DIMS, QuantizedKVCache
from llmpq.kernels.kv.reference import ScoreRule
from llmpq.kernels.weights import dense_weight
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.gpu import cuda_experts, cuda_layers, cuda_rules
from llmpq.runtime.cache.kv_by_precision import make_kv_cache
from llmpq.runtime.models.layers import DecoderLayer, PlainLayers
from llmpq.runtime.step import Step
from reference.pipeline import ReferencePipeline, pad

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
TOLERANCE = 5e-3
"""Of logits: decode kernels multiply in fp16 (2e-3 an output, tests/kernels/kv), over 4 layers."""
KV4, KV8, KV2 = KVPrecision.KV4, KVPrecision.KV8, KVPrecision.KV2
PROMPT = 148
CASES = [
    ("gemma2", KV4),
    ("gemma3", KV2),
    ("olmo3", KV8),
    ("gpt_oss", KV4),
    ("qwen3_moe with windows, every other layer dense", KV4),
    ("deepseek_v2", KV8),
    ("deepseek_v3", KV4),
]
"""Windows, caps, sinks; heads of 24 channels; latents."""


def go_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send decoder layers and packed caches through the GPU's code."""
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
    for name, known in (("uses_kernels", True), ("gathers", False)):
        monkeypatch.setattr(
            QuantizedKVCache,
            name,
            property(lambda cache, k=known: (cache.fmt.head_dim in KERNEL_HEAD_DIMS) is k),
        )


def logits(directory: Any, tokens: list[int], kv: KVPrecision) -> list[torch.Tensor]:
    """Return the logits behind a prompt, a token and three tokens more."""
    pipeline = ReferencePipeline.from_directory(directory)
    options = {"num_layers": pipeline.spec.num_layers, "slots": 2, "max_len": len(tokens)}
    cache = make_kv_cache(pipeline.spec, kv, dtype=torch.float32, **options)
    found = []
    for start, end in ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 4)):
        step = Step.of([1], [start], [end - start])
        found.append(pipeline.logits(pad([tokens[start:end]]), step, [cache]))
    return found


@pytest.mark.parametrize(("kind", "kv"), CASES, ids=lambda value: str(value))
def test_logits_are_those_of_a_cpu(
    models: Any, random_prompts: Any, monkeypatch: Any, kind: str, kv: KVPrecision
) -> None:
    """A prompt beyond the first line at 144 tokens, a step of one token and one of three."""
    (tokens,) = random_prompts(PROMPT + 4)
    want = logits(models.directory(kind), tokens, kv)
    go_by_gpu(monkeypatch)
    got = logits(models.directory(kind), tokens, kv)
    for ours, theirs in zip(got, want, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "change"), [("olmo3", {"window": 0}), ("gpt_oss", {"sinks_H": None})]
)
def test_a_rule_that_is_left_out_is_seen(
    models: Any, random_prompts: Any, monkeypatch: Any, kind: str, change: dict[str, Any]
) -> None:
    (tokens,) = random_prompts(PROMPT + 4)
    want = logits(models.directory(kind), tokens, KV4)
    go_by_gpu(monkeypatch)
    honest = cuda_rules.rule_of
    monkeypatch.setattr(
        cuda_rules,
        "rule_of",
        lambda rule, step: ScoreRule(**{**vars(honest(rule, step)), **change}),
    )
    got = logits(models.directory(kind), tokens, KV4)
    assert float((got[1] - want[1]).norm() / want[1].norm()) > 3 * TOLERANCE
