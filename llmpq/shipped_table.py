"""Reads the tables that the package ships as YAML: cards, models, engines' flags.

They are long, so libyaml parses them where PyYAML has it: eight times faster, to the same values.
What people write is read by PyYAML's own parser, whose errors show the line.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

Loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def shipped_table(package: str, name: str) -> dict[str, Any]:
    """Return the mapping in the YAML file `name` of a package."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.load(text, Loader=Loader)  # noqa: S506  (both loaders are safe)
    return table
