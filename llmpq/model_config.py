"""Reading a Hugging Face `config.json`, one function per family.

Each function returns the fields of `ModelSpec`. A key the wiring depends on is checked, so that a
model that would run wrongly is refused by name instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmpq.errors import unknown_name
from llmpq.model_spec import RopeScaling

Config = Mapping[str, Any]


def spec_fields(config: Config, name: str) -> dict[str, Any]:
    """Return the `ModelSpec` fields for a config; `ValueError` if it is not supported."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise unknown_name("model_type", str(model_type), FAMILIES)
    fields = FAMILIES[model_type](config)
    heads, hidden = fields["heads"], fields["hidden"]
    fields.setdefault("head_dim", hidden // heads)
    if fields["heads"] % fields["kv_heads"]:
        raise ValueError(
            f"model '{name}': {heads} query heads do not share {fields['kv_heads']} key/value "
            "heads evenly; expected a multiple"
        )
    eos = config.get("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),))
    return {"name": name, "dtype": _dtype(config), "eos_token_ids": eos_ids, **fields}


def _opt(config: Config) -> dict[str, Any]:
    hidden = _int(config, "hidden_size")
    _expect(config, "word_embed_proj_dim", hidden, default=hidden)
    _expect(config, "do_layer_norm_before", True, default=True)
    _expect(config, "activation_function", "relu", default="relu")
    bias = bool(config.get("enable_bias", True))
    heads = _int(config, "num_attention_heads")
    return {
        "family": "opt",
        "num_layers": _int(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": _int(config, "ffn_dim"),
        "vocab": _int(config, "vocab_size"),
        "max_positions": _int(config, "max_position_embeddings"),
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "relu",
        "gated": False,
        "qkv_bias": bias,
        "linear_bias": bias,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _bloom(config: Config) -> dict[str, Any]:
    _expect(config, "apply_residual_connection_post_layernorm", False, default=False)
    hidden = _int(config, "hidden_size", "n_embed")
    heads = _int(config, "n_head", "num_attention_heads")
    return {
        "family": "bloom",
        "num_layers": _int(config, "n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": 4 * hidden,
        "vocab": _int(config, "vocab_size"),
        "max_positions": int(config.get("seq_length", 2048)),
        "positions": "alibi",
        "norm": "layernorm",
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "activation": "gelu",
        "gated": False,
        "qkv_bias": True,
        "linear_bias": True,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        "embedding_norm": True,
    }


def _llama(config: Config) -> dict[str, Any]:
    _expect(config, "attention_bias", False, default=False)
    _expect(config, "mlp_bias", False, default=False)
    return {"family": "llama", **_rotary(config)}


def _qwen3(config: Config) -> dict[str, Any]:
    _expect(config, "attention_bias", False, default=False)
    _expect(config, "use_sliding_window", False, default=False)
    return {"family": "qwen3", "qk_norm": True, **_rotary(config)}


def _mixtral(config: Config) -> dict[str, Any]:
    _expect(config, "sliding_window", None, default=None)
    experts = _int(config, "num_local_experts")
    per_token = _int(config, "num_experts_per_tok")
    if per_token > experts:
        raise ValueError(
            f"config.json: num_experts_per_tok={per_token} of num_local_experts={experts}; "
            "expected at most all of them"
        )
    counts = {"experts": experts, "experts_per_token": per_token}
    return {"family": "mixtral", **counts, **_rotary(config)}


def _rotary(config: Config) -> dict[str, Any]:
    """Fields that the rotary, RMSNorm, SiLU-gated families share."""
    _expect(config, "hidden_act", "silu", default="silu")
    hidden = _int(config, "hidden_size")
    heads = _int(config, "num_attention_heads")
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    theta = float(config.get("rope_theta", rope.get("rope_theta", 10000.0)))
    return {
        "num_layers": _int(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "ffn": _int(config, "intermediate_size"),
        "vocab": _int(config, "vocab_size"),
        "max_positions": _int(config, "max_position_embeddings"),
        "positions": "rotary",
        "norm": "rmsnorm",
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": "silu",
        "gated": True,
        "qkv_bias": False,
        "linear_bias": False,
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(rope),
    }


def _rope_scaling(rope: Config) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope scaling '{kind}' is not supported; expected 'default' or 'llama3'")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )


FAMILIES = {
    "opt": _opt,
    "bloom": _bloom,
    "llama": _llama,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
}
"""model_type of `config.json` -> reader of its fields."""


def _dtype(config: Config) -> str:
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"model dtype '{dtype}' is not supported: float16, bfloat16 or float32")
    return dtype


def _int(config: Config, *keys: str) -> int:
    for key in keys:
        if config.get(key) is not None:
            value = config[key]
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"config.json: '{key}' must be a positive integer, got {value!r}")
            return value
    raise ValueError(f"config.json: '{keys[0]}' is missing")


def _expect(config: Config, key: str, expected: Any, *, default: Any) -> None:
    got = config.get(key, default)
    if got != expected:
        raise ValueError(
            f"config.json: {key}={got!r} is not supported; this model family is run with "
            f"{key}={expected!r} only"
        )
