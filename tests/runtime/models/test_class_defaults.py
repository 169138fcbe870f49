"""The shipped table of config classes is that of the installed Transformers."""

from __future__ import annotations

import json
from importlib import resources, util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmpq.families import BY_MODEL_TYPE, WRAPPERS
from llmpq.families.common.class_defaults import SAME_CLASS, TABLE, config_class
from llmpq.models.model_spec import ModelSpec, builtin_configs

pytestmark = pytest.mark.cpu
SCRIPT = Path(__file__).parents[3] / "docs" / "make_class_defaults.py"
KINDS = sorted({*BY_MODEL_TYPE, *WRAPPERS} - set(SAME_CLASS))
SAID: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm4_moe", "glm4v_moe", "glm4v_moe_text"), {"head_dim": 128}),
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n": {"num_kv_shared_layers": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 8,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
}
"""What a class takes no sound default for."""
OF_TRAINING = {
    "_name_or_path": "somewhere",
    "attention_dropout": 0.1,
    "embedding_dropout": 0.1,
    "embd_pdrop": 0.1,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.018,
    "eod_token_id": 5,
    "sep_token_id": 6,
    "use_mamba_kernels": False,
    "num_logits_to_keep": 2,
    "gradient_clipping": 10.0,
}
"""Keys of files, training, tokens and kernels, which published configs have."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = util.spec_from_file_location("make_class_defaults", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current(script: ModuleType) -> None:
    shipped = json.loads(resources.files("llmpq.families").joinpath(TABLE).read_text())
    made = json.loads(json.dumps(script.table()))
    assert made["classes"] == shipped["classes"], "run python docs/make_class_defaults.py"
    assert made["read_by_all"] == shipped["read_by_all"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_config_is_the_class_without_arguments(kind: str) -> None:
    """What the class fills in at last, layer by layer, is what the family fills in."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    said = {"num_hidden_layers": 8, **SAID.get(kind, {})}
    if kind in WRAPPERS:
        text = {**said, "model_type": config_class(kind).text}
        said = {"text_config": text, "tie_word_embeddings": False}
    spelled_out = json.loads(CONFIG_MAPPING[kind](**said).to_json_string(False))
    spec = ModelSpec.from_config(spelled_out, name="spelled out")
    assert ModelSpec.from_config({"model_type": kind, **said}, name="spelled out") == spec


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_training_tokens_and_kernels_change_nothing(kind: str) -> None:
    said = {"model_type": kind, "num_hidden_layers": 8, **SAID.get(kind, {})}
    beside = {**said, **OF_TRAINING}
    if kind in WRAPPERS:
        said = {"model_type": kind, "text_config": {**said, "model_type": config_class(kind).text}}
        beside = {**said, "text_config": {**said["text_config"], **OF_TRAINING}}
    spec = ModelSpec.from_config(said, name="said")
    assert ModelSpec.from_config(beside, name="said") == spec


LARGEST = {str(c["model_type"]): name for name, c in builtin_configs().items()}
"""`model_type` -> a built-in model of many layers, the last one of its family."""


@pytest.mark.parametrize("name", LARGEST.values())
def test_what_transformers_makes_of_a_config_is_the_same_model(name: str) -> None:
    """As `save_pretrained` writes it, with all that the class says: of Gemma 4 layer by layer."""
    from transformers import CONFIG_MAPPING

    said = {k: v for k, v in builtin_configs()[name].items() if k != "sliding_window_pattern"}
    kind = SAME_CLASS.get(said["model_type"], said["model_type"])
    made = CONFIG_MAPPING[kind].from_dict({**said, "model_type": kind})
    again = json.loads(made.to_json_string(use_diff=False))
    found = ModelSpec.from_config(again, name=name).fingerprint()
    assert found == ModelSpec.by_name(name).fingerprint()
