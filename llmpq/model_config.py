"""From a Hugging Face `config.json` to the fields of `ModelSpec`, by its family's record."""

from __future__ import annotations

from typing import Any

from llmpq.errors import unknown_name
from llmpq.families import BY_MODEL_TYPE
from llmpq.families.config_values import Config, section, size, token_ids


def spec_fields(config: Config, name: str) -> dict[str, Any]:
    """Return the `ModelSpec` fields for a config; `ValueError` if it is not supported."""
    model_type = str(config.get("model_type"))
    if model_type not in BY_MODEL_TYPE:
        raise unknown_name("model_type", model_type, BY_MODEL_TYPE)
    family = BY_MODEL_TYPE[model_type]
    section(config, "quantization_config")  # The runtime reads it; a plan is refused already.
    fields = family.fields(config)
    heads, kv_heads = fields["heads"], fields["kv_heads"]
    head_dim = _head_dim(config, fields["hidden"], heads)
    if fields["positions"] == "rotary" and head_dim % 2:
        raise ValueError(
            f"config.json: head_dim={head_dim} is odd; rotary positions turn pairs of "
            "channels. Correct it or download config.json again"
        )
    if heads % kv_heads:
        raise ValueError(
            f"config.json: {heads} query heads do not share {kv_heads} key/value heads evenly; "
            "expected a multiple. Correct num_attention_heads or num_key_value_heads, or download "
            "config.json again"
        )
    eos_ids = token_ids(config, "eos_token_id")
    found = {"name": name, "family": family.name, "dtype": _dtype(config), "eos_token_ids": eos_ids}
    return {**found, "head_dim": head_dim, **fields}


def _dtype(config: Config) -> str:
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"model dtype '{dtype}' is not supported: float16, bfloat16 or float32")
    return dtype


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={heads}; "
            "correct them or download config.json again"
        )
    return size(config, "head_dim", default=hidden // heads)
