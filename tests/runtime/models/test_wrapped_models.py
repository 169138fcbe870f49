"""The language model inside of models for pictures and sound gives what Transformers' whole gives.

Models of tests/runtime/conftest.py's `... in its wrapper` are compared in more ways; here are those
whose towers have names of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.sources import CheckpointSource
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
VOCAB = 199
TOKENS = [(7 * i * i + 3) % VOCAB for i in range(24)]
TINY = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "d_model", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "depth"), 1),
    "encoder_attention_heads": 2,
    "max_img_size": 64,
    "vocab_size": 64,
    "image_size": 32,
    "layer_types": None,
}
"""What towers have of it."""
INSIDE = {
    "hyperclovax_vision_v2": "hyperclovax",
    "deepseek_vl": "arcee",
    "minicpm_ocr": "qwen3_5",
    "glmga": "glm4v",
    "lfm3_vl": "lfm3",
}
"""Wrapper -> a kind with the options of the language model that it has by default."""
OWN = {"rope_parameters", "head_dim", "attention_bias", "mlp_bias"}


@pytest.mark.parametrize("kind", INSIDE)
def test_the_text_of_a_wrapper_is_transformers(kind: str, models: Any, tmp_path: Path) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    default, (_, options) = made(), models.options(INSIDE[kind])
    inside = default.text_config.model_type
    inner = options.pop("text_config", {})
    options = {k: v for k, v in (options | inner).items() if k != "vision_config"}
    if inside == "llama":
        options = {key: value for key, value in options.items() if key not in OWN}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    towers = {}
    for key in {*default.sub_configs} - {"text_config"}:
        tower = getattr(default, key)
        if tower is not None:
            small = {name: size for name, size in TINY.items() if hasattr(tower, name)}
            towers[key] = {**tower.to_dict(), **small}
    config = made(text_config={**options, "model_type": inside, **tokens}, **towers)
    autos = transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM
    auto = next(auto for auto in autos if made in auto._model_mapping)
    torch.manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        model = auto.from_config(config).float().eval()
        for name, values in model.named_parameters():
            if "language_model" in name or "lm_head" in name:
                values.copy_(torch.randn_like(values) * 0.1 + (values if values.ndim == 1 else 0))
        want = model(input_ids=torch.tensor([TOKENS])).logits[0]
    model.save_pretrained(tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    assert any("tower" in words for words in spec.left_out)
    pipeline = ReferencePipeline.from_directory(tmp_path)
    step, caches = Step.of([0], [0], [len(TOKENS)]), pipeline.caches(1, len(TOKENS))
    got = pipeline.logits(pad([TOKENS]), step, caches, all_positions=True)[0]
    assert float((got - want).norm() / want.norm()) < 1e-4
    assert got.argmax(-1).equal(want.argmax(-1))


def test_nemotron_omni_is_read_as_it_is_published(models: Any, tmp_path: Path) -> None:
    """Its towers' names, and what it calls the language model's config."""
    plain = models.directory("nemotron_h")
    stored = load_file(plain / "model.safetensors")
    towers = ("vision_model.x", "mlp1.0.weight", "sound_encoder.x", "sound_projection.norm.weight")
    inside = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    save_file(inside | {name: torch.ones(2) for name in towers}, tmp_path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    tied = {**config, "tie_word_embeddings": True}  # which its class does not heed
    whole = {"model_type": "nemotron_h_omni", "llm_config": tied}
    beside = {"vision_config": {"depth": 1}, "sound_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(whole | beside))
    spec = ModelSpec.from_directory(tmp_path)
    assert spec.left_out == ("the vision tower: text only", "the audio tower: text only")
    assert spec.fingerprint() == ModelSpec.from_directory(plain).fingerprint()
    sources = [CheckpointSource(path, spec) for path in (tmp_path, plain)]
    for index in range(spec.num_layers):
        got, want = (source.layer(index, torch.float32) for source in sources)
        assert all(got[part].equal(tensor) for part, tensor in want.items())
