"""Patterns of module names, as Transformers calls a family's modules."""

from __future__ import annotations

from llmpq.families import FAMILIES


def layers_pattern(family: str, layers: list[int], num_layers: int) -> str:
    """Return a regular expression of everything inside these layers of a model."""
    root = FAMILIES[family].layers_at.replace(".", "\\.")
    return f"{root}\\.{numbers_pattern(layers, num_layers)}\\..*"


def numbers_pattern(layers: list[int], num_layers: int) -> str:
    """Return a regular expression of these layers' numbers."""
    every = len(layers) == num_layers
    return "[0-9]+" if every else f"({'|'.join(str(i) for i in layers)})"
