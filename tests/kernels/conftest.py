"""Deals architectures out to what is compiled: `make test` compiles a form for one."""

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
    """Leave each form of a kernel to one architecture.

    Of a test of several forms the first, the smallest, is compiled for one of BEHIND, the others in
    turn for those with the least memory, as is a test's only form. A family of kernels is a folder:
    where none has such a test, one form is compiled for one of BEHIND, too. Each other architecture
    meets some form. A test marked `everywhere` keeps all of its own. Runs before the root's hook,
    which thins the rest.
    """
    if ALL:
        return
    families: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if _dealt(item):
            families.setdefault(item.path.parent, []).append(item)
    kept = {item for family in families.values() for item in _kept(family)}
    dealt = [item for family in families.values() for item in family]
    kept |= _met_elsewhere(dealt, kept)
    left_out = {*dealt} - kept
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _dealt(item: pytest.Item) -> bool:
    """Return whether a test compiles for an architecture that may be chosen for it."""
    if not item.get_closest_marker("compile") or "arch" not in _parameters(item):
        return False
    return not any(item.get_closest_marker(name) for name in ("seldom", "everywhere"))


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _kept(family: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return one of each form of a folder's tests."""
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
    if not any(_arch(item) in BEHIND for item in kept):
        kept |= {_dealt_to(item) for item in [i for i in family if _arch(i) in BEHIND][:1]}
    return kept


def _smallest_behind(forms: Forms) -> set[pytest.Item]:
    """Return the first form of each test of several, for one of BEHIND."""
    tests: dict[tuple[object, ...], list[list[pytest.Item]]] = {}
    for form, items in forms.items():
        tests.setdefault(form[:2], []).append(items)
    found = set()
    for number, own in enumerate(tests.values()):
        able = [item for item in own[0] if _arch(item) in BEHIND]
        if len(own) > 1 and able:
            found.add(able[number % len(able)])
    return found


def _met_elsewhere(dealt: Sequence[pytest.Item], kept: set[pytest.Item]) -> set[pytest.Item]:
    """Return a form for each architecture that none of `kept` is for."""
    found = set()
    for number, arch in enumerate(sorted({*map(_arch, dealt)} - {*map(_arch, kept)})):
        able = [item for item in dealt if _arch(item) == arch]
        found.add(_dealt_to(able[number * len(able) // 4 % len(able)]))  # not always the first
    return found


def _dealt_to(item: pytest.Item) -> pytest.Item:
    """Mark a test as one that no thinning leaves out."""
    item.add_marker("dealt")
    return item


def _arch(item: pytest.Item) -> int:
    return int(_parameters(item)["arch"])


@pytest.fixture(scope="session")
def share() -> Callable[[Sequence[Any], int, Sequence[int]], Sequence[Any]]:
    """Return an architecture's share of forms that are the same for all; or all of them."""
    return lambda whole, arch, every: whole if ALL else whole[every.index(arch) :: len(every)]
