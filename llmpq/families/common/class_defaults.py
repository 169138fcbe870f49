"""Defaults of Transformers' config class of a `model_type`, where `config.json` is silent.

The table, `class_defaults.json`, is written from the installed classes by
`docs/make_class_defaults.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from typing import Any

TABLE = "class_defaults.json"
SAME_CLASS = {"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""`model_type` whose config class is another's."""


@dataclass(frozen=True, kw_only=True)
class ConfigClass:
    """A config class of Transformers, as data."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> what the class takes where the key is absent."""
    nullable: frozenset[str] = frozenset()
    """Keys whose null means something; of others it counts as absent."""
    reads: frozenset[str] = frozenset()
    """Every key that the class or its model reads."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key -> another key that says the same."""
    text: str | None = None
    """The `model_type` of the language model inside, where that is a section of its own."""

    def same_as(self, key: str) -> list[str]:
        """Return the other keys that say the same as a key."""
        names = self.aliases.items()
        root = self.aliases.get(key, key)
        return [n for n in [root, *(alias for alias, own in names if own == root)] if n != key]


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    """Return the whole file: `classes` by `model_type`, and the keys `read_by_all`."""
    text = resources.files("llmpq.families").joinpath(TABLE).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@cache
def config_class(model_type: str) -> ConfigClass:
    """Return the class of a `model_type`."""
    found = _table()["classes"][SAME_CLASS.get(model_type, model_type)]
    return ConfigClass(
        defaults=found["defaults"],
        nullable=frozenset(found["nullable"]),
        reads=frozenset([*found["defaults"], *found["reads"], *_table()["read_by_all"]]),
        aliases=found["aliases"],
        text=found.get("text"),
    )
