"""Deals architectures out to what is compiled: `make test` compiles each form for one of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ALL = "LLMPQ_ALL_TESTS" in os.environ
ORDER = (90, 86, 100, 80, 120, 89, 75)
"""Of equals, the architecture that is dealt first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave each form of a kernel that compiles to one architecture, in turn.

    A family of kernels is a folder: each architecture meets some form of it. A test marked
    `everywhere` keeps all of its own. Runs before the root's hook, which thins the rest.
    """
    if ALL:
        return
    families: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if _dealt(item):
            families.setdefault(item.path.parent, []).append(item)
    left_out = {item for family in families.values() for item in _not_dealt(family)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _dealt(item: pytest.Item) -> bool:
    """Return whether a test compiles for an architecture that may be chosen for it."""
    if not item.get_closest_marker("compile") or "arch" not in _parameters(item):
        return False
    return not any(item.get_closest_marker(name) for name in ("seldom", "everywhere"))


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _not_dealt(family: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return those whose form meets another architecture: that which came least often so far."""
    forms: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in family:
        others = sorted((k, repr(v)) for k, v in _parameters(item).items() if k != "arch")
        forms.setdefault((item.path, item.originalname, *others), []).append(item)
    met: Counter[int] = Counter()

    def place(item: pytest.Item) -> tuple[int, int]:
        arch = _parameters(item)["arch"]
        return met[arch], ORDER.index(arch)

    kept = set()
    for items in sorted(forms.values(), key=len):  # those that have no choice go first
        item = min(items, key=place)
        met[_parameters(item)["arch"]] += 1
        kept.add(item)
    return set(family) - kept


@pytest.fixture(scope="session")
def share() -> Callable[[Sequence[Any], int, Sequence[int]], Sequence[Any]]:
    """Return an architecture's share of forms that are the same for all; or all of them."""
    return lambda whole, arch, every: whole if ALL else whole[every.index(arch) :: len(every)]
