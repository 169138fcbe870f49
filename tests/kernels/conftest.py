"""Deals architectures out to what is compiled: `make test` compiles a form for one or two."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ALL = "LLMPQ_ALL_TESTS" in os.environ
LEAST = (86, 120, 89)
"""Where a block may use the least shared memory: what fits there fits everywhere."""
Forms = dict[tuple[object, ...], list[pytest.Item]]
"""Of each form of a test its items, one for each architecture."""
BEHIND = (90, 100)
"""Where kernels take branches of their own (launches that overlap, operands of wgmma)."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave each form of a kernel to one of those with the least memory, in turn.

    A family of kernels is a folder: each other architecture meets some form of it, and of each test
    one form is compiled for one of BEHIND, of three forms or more the first, the smallest, for it
    alone. A test marked `everywhere` keeps all of its own. Runs before the root's hook, which thins
    the rest.
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
    """Return those whose form meets another architecture."""
    forms: Forms = {}
    for item in family:
        others = sorted((k, repr(v)) for k, v in _parameters(item).items() if k != "arch")
        forms.setdefault((item.path, item.originalname, *others), []).append(item)
    kept = _smallest_behind(forms)
    forms = {form: items for form, items in forms.items() if kept.isdisjoint(items)}
    met: Counter[int] = Counter(map(_arch, kept))

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        arch = _arch(item)
        return arch not in LEAST, met[arch], LEAST.index(arch) if arch in LEAST else arch

    for items in sorted(forms.values(), key=len):  # those that have no choice go first
        item = min(items, key=place)
        met[_arch(item)] += 1
        kept.add(item)
    for number, arch in enumerate(sorted({_arch(item) for item in family} - {*met})):
        able = [item for item in family if _arch(item) == arch]
        more = able[number * len(able) // 4 % len(able)]  # not always the first test's
        more.add_marker("dealt")
        kept.add(more)
    return set(family) - kept - _behind(family, kept)


def _smallest_behind(forms: Forms) -> set[pytest.Item]:
    """Return the first form of each test of three or more, for one of BEHIND."""
    tests: dict[tuple[object, ...], list[list[pytest.Item]]] = {}
    for form, items in forms.items():
        tests.setdefault(form[:2], []).append(items)
    found = set()
    for number, own in enumerate(tests.values()):
        able = [item for item in own[0] if _arch(item) in BEHIND]
        if len(own) > 2 and able:
            found.add(able[number % len(able)])
    return found


def _behind(family: Sequence[pytest.Item], kept: set[pytest.Item]) -> set[pytest.Item]:
    """Return a form for one of BEHIND of each test that has none of `kept` there."""
    tests: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in family:
        if _arch(item) in BEHIND:
            tests.setdefault((item.path, item.originalname), []).append(item)
    found = set()
    for number, items in enumerate(tests.values()):
        if kept.isdisjoint(items):
            able = [i for i in items if _arch(i) == BEHIND[number % 2]] or items
            able[number % len(able)].add_marker("dealt")
            found.add(able[number % len(able)])
    return found


def _arch(item: pytest.Item) -> int:
    return int(_parameters(item)["arch"])


@pytest.fixture(scope="session")
def share() -> Callable[[Sequence[Any], int, Sequence[int]], Sequence[Any]]:
    """Return an architecture's share of forms that are the same for all; or all of them."""
    return lambda whole, arch, every: whole if ALL else whole[every.index(arch) :: len(every)]
