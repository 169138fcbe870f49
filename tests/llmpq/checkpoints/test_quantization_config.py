"""Words of a quantization_config that would change the arithmetic unheeded are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.checkpoints.quantization_config import (
    METHODS,
    quantization_of,
    require_method,
    require_read,
)

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("method", METHODS)
def test_plain_forms_are_read(method: str) -> None:
    off = {"transform_config": {}, "rotation": None, "sparsity_config": {"format": "dense"}}
    require_read({"quant_method": method, **off}, "DIR")


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (
            {"quant_method": "awq", "version": "gemv"},
            "version='gemv' is not supported; expected ge",
        ),
        ({"quant_method": "awq", "version": "marlin"}, "version='marlin'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "bitblas"}, "expected gptq or gptq_v2"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "codes in Marlin's order"),
        ({"quant_method": "hqq"}, "'hqq' is not supported"),
        ({}, "quantization method 'None'"),
    ],
)
def test_others_are_refused_by_what_they_are(described: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_read(described, "DIR")


def test_usual_words_are_no_hindrance() -> None:
    require_read({"quant_method": "awq", "version": "GEMM", "bits": 4, "zero_point": True}, "DIR")
    require_read({"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4}, "DIR")
    require_read({"quant_method": "compressed-tensors", "version": "0.9.0"}, "DIR")


def test_a_kv_cache_alone_is_no_quantised_model() -> None:
    """ModelOpt writes `quant_algo: null` for weights that it left as they are."""
    only = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert quantization_of({"quantization_config": only}) is None


def test_auto_round_may_say_nothing_of_a_layer() -> None:
    form = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}
    extra = {"extra_config": {"lm_head": None, "model.layers.0.mlp.gate": {"bits": 16}}}
    found = quantization_of({"quantization_config": {**form, **extra}})
    assert found is not None and found["quant_method"] == "gptq"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_where_configs_say_it(key: str, inside: bool) -> None:
    """Kimi K2.5's of its language model; the first configs of compressed-tensors' models."""
    form = {"quant_method": "compressed-tensors", "config_groups": {"g": {}}}
    config = {"text_config": {key: form}} if inside else {key: form, "text_config": {}}
    assert quantization_of(config) == form
    assert quantization_of({"quantization_config": None, "text_config": None}) is None


def test_modelopts_words_need_no_method() -> None:
    """Qwen3-32B's FP8 as ModelOpt 0.31 wrote it."""
    form = {"quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
    found = quantization_of({"quantization_config": form})
    assert found is not None and found["quant_method"] == "modelopt"


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}},
}


@pytest.mark.parametrize(
    ("described", "true", "wrong"),
    [
        ({"quant_method": "awq"}, "awq AWQ awq_marlin moe_wna16", "gptq awq_marlin_24 int4"),
        ({"quant_method": "gptq"}, "gptq gptq_marlin moe_wna16", "awq awq_marlin gptq_marlin_24"),
        ({"quant_method": "fp8"}, "fp8", "fbgemm_fp8 compressed-tensors ptpc_fp8 modelopt"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors compressed_tensors", "fp8"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes bnb", "nf4x"),
        ({"quant_method": "mxfp4"}, "mxfp4 gpt_oss_mxfp4", "modelopt_fp4"),
        (AUTO_ROUND, "auto-round auto_round inc gptq gptq_marlin", "awq"),
        (NVFP4, "modelopt modelopt_fp4 petit_nvfp4", "modelopt_mixed nvfp4x fp8"),
        ({**NVFP4, "quant_algo": "FP8"}, "modelopt", "modelopt_fp4 fp8"),
        (MIXED, "modelopt modelopt_mixed modelopt_fp4", "fp8"),
        ({"format": "llmpq"}, "llmpq", "awq"),
    ],
)
def test_a_method_is_what_the_files_say(
    described: dict[str, Any], true: str, wrong: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    for method in true.split():
        require_method(tmp_path, method)
    for method in wrong.split():
        with pytest.raises(ValueError, match=f"is quantised with .*, not with .*'{method}': leave"):
            require_method(tmp_path, method)


def test_a_method_is_not_that_of_whole_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in (tmp_path, "llama-3.1-8b"):
        with pytest.raises(ValueError, match="is not quantised, quantization='fp8' asks for"):
            require_method(model, "fp8")
