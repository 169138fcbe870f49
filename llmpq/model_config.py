"""Reading a Hugging Face `config.json`, one function per family.

Each function returns the fields of `ModelSpec`. A key the wiring depends on is checked, so that a
model that would run wrongly is refused by name instead. A key that is null counts as absent.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmpq.errors import unknown_name
from llmpq.model_spec import RopeScaling

Config = Mapping[str, Any]


def spec_fields(config: Config, name: str) -> dict[str, Any]:
    """Return the `ModelSpec` fields for a config; `ValueError` if it is not supported."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise unknown_name("model_type", model_type, FAMILIES)
    section(config, "quantization_config")  # The runtime reads it; a plan is refused already.
    fields = FAMILIES[model_type](config)
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
    eos = _value(config, ["eos_token_id"], _is_token_ids, "a token id or a list of them", [])
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    found = {"name": name, "dtype": _dtype(config), "eos_token_ids": eos_ids}
    return {**found, "head_dim": head_dim, **fields}


def _opt(config: Config) -> dict[str, Any]:
    hidden = size(config, "hidden_size")
    _expect(config, "word_embed_proj_dim", hidden, default=hidden)
    _expect(config, "do_layer_norm_before", True, default=True)
    _expect(config, "activation_function", "relu", default="relu")
    bias = _flag(config, "enable_bias", default=True)
    heads = size(config, "num_attention_heads")
    return {
        "family": "opt",
        "num_layers": size(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": size(config, "ffn_dim"),
        "vocab": size(config, "vocab_size"),
        "max_positions": size(config, "max_position_embeddings"),
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "relu",
        "gated": False,
        "qkv_bias": bias,
        "linear_bias": bias,
        "tied_embeddings": _flag(config, "tie_word_embeddings", default=True),
    }


def _bloom(config: Config) -> dict[str, Any]:
    _expect(config, "apply_residual_connection_post_layernorm", False, default=False)
    hidden = size(config, "hidden_size", "n_embed")
    heads = size(config, "n_head", "num_attention_heads")
    return {
        "family": "bloom",
        "num_layers": size(config, "n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": 4 * hidden,
        "vocab": size(config, "vocab_size"),
        "max_positions": size(config, "seq_length", default=2048),
        "positions": "alibi",
        "norm": "layernorm",
        "norm_eps": _number(config, "layer_norm_epsilon", default=1e-5),
        "activation": "gelu",
        "gated": False,
        "qkv_bias": True,
        "linear_bias": True,
        "tied_embeddings": _flag(config, "tie_word_embeddings", default=True),
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


def _mistral(config: Config) -> dict[str, Any]:
    """Llama's layers and names; a window over the last tokens is not supported."""
    _expect(config, "sliding_window", None, default=None)
    return _llama(config)


def _mixtral(config: Config) -> dict[str, Any]:
    _expect(config, "sliding_window", None, default=None)
    experts = size(config, "num_local_experts")
    per_token = size(config, "num_experts_per_tok")
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
    hidden = size(config, "hidden_size")
    heads = size(config, "num_attention_heads")
    parameters, scaling = (section(config, key) for key in ("rope_parameters", "rope_scaling"))
    rope = {**(parameters or {}), **(scaling or {})}
    theta = _number(rope, "rope_theta", default=10000.0)
    return {
        "num_layers": size(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": size(config, "num_key_value_heads", default=heads),
        "ffn": size(config, "intermediate_size"),
        "vocab": size(config, "vocab_size"),
        "max_positions": size(config, "max_position_embeddings"),
        "positions": "rotary",
        "norm": "rmsnorm",
        "norm_eps": _number(config, "rms_norm_eps", default=1e-6),
        "activation": "silu",
        "gated": True,
        "qkv_bias": False,
        "linear_bias": False,
        "tied_embeddings": _flag(config, "tie_word_embeddings", default=False),
        "rope_theta": _number(config, "rope_theta", default=theta),
        "rope_scaling": _rope_scaling(rope),
    }


def _rope_scaling(rope: Config) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope scaling '{kind}' is not supported; expected 'default' or 'llama3'")
    where = "config.json, llama3 rope scaling"
    low, high = (_number(rope, f"{end}_freq_factor", where=where) for end in ("low", "high"))
    if high <= low:
        raise ValueError(
            f"{where}: high_freq_factor={high} must be above low_freq_factor={low}; correct them "
            "or download config.json again"
        )
    return RopeScaling(
        factor=_number(rope, "factor", where=where),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=size(rope, "original_max_position_embeddings", where=where),
    )


FAMILIES = {
    "opt": _opt,
    "bloom": _bloom,
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
}
"""model_type of `config.json` -> reader of its fields."""


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


def section(config: Config, key: str, *, where: str = "config.json") -> Config | None:
    """Return an object inside a config; None where it is absent or null."""
    absent: Config = {}
    found: Config = _value(config, [key], _is_object, "an object", absent, where)
    return None if found is absent else found


def size(config: Config, *keys: str, default: int | None = None, where: str = "config.json") -> int:
    """Return the positive integer of the first key that is there."""
    return int(_value(config, keys, _is_size, "a positive integer", default, where))


def _number(
    config: Config, key: str, *, default: float | None = None, where: str = "config.json"
) -> float:
    return float(_value(config, [key], _is_number, "a positive number", default, where))


def _flag(config: Config, key: str, *, default: bool) -> bool:
    return bool(_value(config, [key], _is_flag, "true or false", default))


def _value(
    config: Config,
    keys: Sequence[str],
    accepts: Callable[[Any], bool],
    expected: str,
    default: Any = None,
    where: str = "config.json",
) -> Any:
    """Return the value of the first key that is there, if accepted; `default` where none is."""
    for key in keys:
        value = config.get(key)
        if value is not None and not accepts(value):
            raise ValueError(
                f"{where}: '{key}' must be {expected}, got {reprlib.repr(value)}; correct it or "
                "download config.json again"
            )
        if value is not None:
            return value
    if default is None:
        raise ValueError(
            f"{where}: '{keys[0]}' is missing, expected {expected}; add it or download config.json "
            "again"
        )
    return default


# `type(value) is` and not `isinstance`: True is an int to Python, and no size.
def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_token_ids(value: Any) -> bool:
    return all(type(token) is int for token in (value if isinstance(value, list) else [value]))


def _expect(config: Config, key: str, expected: Any, *, default: Any) -> None:
    got = config.get(key, default)
    if got != expected:
        raise ValueError(
            f"config.json: {key}={got!r} is not supported; this model family is run with "
            f"{key}={expected!r} only"
        )
