"""Reading a Hugging Face `config.json` key by key.

A key the wiring depends on is checked, so that a model that would run wrongly is refused by name
instead. A key that is null counts as absent.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling of rotary positions; None elsewhere."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def rotary_fields(config: Config) -> dict[str, Any]:
    """Fields that the rotary, RMSNorm, SiLU-gated families share."""
    expect(config, "hidden_act", "silu", default="silu")
    hidden = size(config, "hidden_size")
    heads = size(config, "num_attention_heads")
    parameters, scaling = (section(config, key) for key in ("rope_parameters", "rope_scaling"))
    rope = {**(parameters or {}), **(scaling or {})}
    theta = number(rope, "rope_theta", default=10000.0)
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
        "norm_eps": number(config, "rms_norm_eps", default=1e-6),
        "activation": "silu",
        "gated": True,
        "qkv_bias": False,
        "linear_bias": False,
        "tied_embeddings": flag(config, "tie_word_embeddings", default=False),
        "rope_theta": number(config, "rope_theta", default=theta),
        "rope_scaling": _rope_scaling(rope),
    }


def _rope_scaling(rope: Config) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope scaling '{kind}' is not supported; expected 'default' or 'llama3'")
    where = "config.json, llama3 rope scaling"
    low, high = (number(rope, f"{end}_freq_factor", where=where) for end in ("low", "high"))
    if high <= low:
        raise ValueError(
            f"{where}: high_freq_factor={high} must be above low_freq_factor={low}; correct them "
            "or download config.json again"
        )
    return RopeScaling(
        factor=number(rope, "factor", where=where),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=size(rope, "original_max_position_embeddings", where=where),
    )


def section(config: Config, key: str, *, where: str = "config.json") -> Config | None:
    """Return an object inside a config; None where it is absent or null."""
    absent: Config = {}
    found: Config = _value(config, [key], _is_object, "an object", absent, where)
    return None if found is absent else found


def size(config: Config, *keys: str, default: int | None = None, where: str = "config.json") -> int:
    """Return the positive integer of the first key that is there."""
    return int(_value(config, keys, _is_size, "a positive integer", default, where))


def token_ids(config: Config, key: str) -> tuple[int, ...]:
    """Return the token ids of a key: one, several, or none where it is absent."""
    found = _value(config, [key], _is_token_ids, "a token id or a list of them", [])
    return tuple(found) if isinstance(found, list) else (found,)


def number(
    config: Config, key: str, *, default: float | None = None, where: str = "config.json"
) -> float:
    """Return the positive number of a key."""
    return float(_value(config, [key], _is_number, "a positive number", default, where))


def flag(config: Config, key: str, *, default: bool) -> bool:
    """Return the truth value of a key."""
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


def expect(config: Config, key: str, expected: Any, *, default: Any) -> None:
    """Refuse a config in which a key says anything but what the family is run with."""
    got = config.get(key, default)
    if got != expected:
        raise ValueError(
            f"config.json: {key}={got!r} is not supported; this model family is run with "
            f"{key}={expected!r} only"
        )
