"""Reading a Hugging Face `config.json` key by key.

A key the wiring depends on is checked, so that a model that would run wrongly is refused by name
instead. A key that is null counts as absent.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Config = Mapping[str, Any]
EPSILONS = (1e-12, 1e-2)
"""Norms in use add 1e-6 or 1e-5, GLM-4 1.5e-7; others are slips of the pen."""


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


def bounded(
    config: Config,
    key: str,
    limits: tuple[float, float],
    *,
    default: float | None = None,
    where: str = "config.json",
) -> float:
    """Return the number of a key within limits that no model in use is outside of."""
    found = number(config, key, default=default, where=where)
    if not limits[0] <= found <= limits[1]:
        raise ValueError(
            f"{where}: '{key}'={found:g} is absurd, expected {limits[0]:g} to {limits[1]:g}; "
            "correct it or download config.json again"
        )
    return found


def epsilon(config: Config, key: str) -> float:
    """Return the small number a norm adds to what it divides by."""
    return bounded(config, key, EPSILONS)


def head_size(config: Config) -> int:
    """Return a head's channels: `head_dim`, or the hidden size shared by the heads."""
    if config.get("head_dim") is not None:
        return size(config, "head_dim")
    heads = ("num_attention_heads", "n_head")
    # BLOOM's first files say `n_embed`, which its class reads before `hidden_size`.
    return size(config, "n_embed", "n_embd", "hidden_size") // size(config, *heads)


def is_given(value: object) -> bool:
    """Whether a value switches anything on: null, false, zero and empty ones do not."""
    return value is not None and value is not False and value not in (0, "", [], {})


def flag(config: Config, key: str, *, default: bool | None = None) -> bool:
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
    given = {key: config.get(key) for key in keys}  # all are read: the others say the same
    for key, value in given.items():
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
    given = config.get(key)
    got = default if given is None else given
    if got != expected:
        raise ValueError(
            f"config.json: {key}={got!r} is not supported; this model family is run with "
            f"{key}={expected!r} only"
        )
