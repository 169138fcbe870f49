"""The rooms' links, and what may not appear in them. Size is a reader's judgement, not a test's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("planner", "profiler", "kernels", "runtime")


@cache
def sources_of(room: str) -> tuple[Path, ...]:
    return tuple(sorted(p for p in (ROOT / room).rglob("*.py") if not p.parent.is_symlink()))


def sources() -> list[Path]:
    return [path for room in (*ROOMS, "llmpq", "clusters") for path in sources_of(room)]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_kernel(node: ast.FunctionDef) -> bool:
    """Whether a function is compiled by Triton."""
    return any(ast.unparse(d).split("(")[0].endswith(".jit") for d in node.decorator_list)


def test_rooms_are_linked() -> None:
    for room in (*ROOMS, "clusters"):
        link = ROOT / "llmpq" / room
        assert link.is_symlink() and not link.readlink().is_absolute(), room


@pytest.mark.parametrize("room", [*ROOMS, "llmpq", "clusters"])
def test_sources_are_ascii(room: str) -> None:
    assert sources_of(room), "no file was read"
    assert [str(path) for path in sources_of(room) if not path.read_text().isascii()] == []


def test_no_function_for_triton_has_a_string_as_default() -> None:
    """Triton 3.6 cannot call one from another: it takes the string for a tensor."""
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef) and is_kernel(node):
                values = [*node.args.defaults, *node.args.kw_defaults]
                texts = [v for v in values if isinstance(v, ast.Constant) and type(v.value) is str]
                assert not texts, f"{path}: {node.name} has a default in quotes"


def unsafe(tree: ast.AST) -> set[str]:
    """Return the imports and calls that run what was read."""
    modules = {m.split(".")[0] for m in imported_modules(tree)}
    calls = {
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    return modules & {"pickle", "cloudpickle", "dill"} | calls & {"eval", "exec"}


@pytest.mark.parametrize("room", [*ROOMS, "llmpq", "clusters"])
def test_nothing_unpickles_or_evaluates(room: str) -> None:
    found = {str(path.relative_to(ROOT)): unsafe(tree_of(path)) for path in sources_of(room)}
    assert {name: calls for name, calls in found.items() if calls} == {}


ONE_MEANING = {
    "errors": "what a caller reads and with which code: of commands, and over HTTP",
    "reference": "the plain-torch twin of a sub-room's kernels",
}
"""Names that several rooms have for the same thing, and which."""


def twice(named: Iterator[tuple[str, Path]]) -> dict[str, list[str]]:
    """Return the names that stand in several rooms or sub-rooms, and where."""
    places: dict[str, list[str]] = {}
    for name, path in named:
        places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_name_of_a_file_means_one_thing() -> None:
    """Files of command lines and tools aside: they are named for the command."""
    files = (
        (path.stem, path)
        for path in sources()
        if not path.stem.startswith("__") and not {"cli", "tools"} & set(path.parent.parts)
    )
    found = twice(files)
    assert found.keys() == ONE_MEANING.keys(), found


def test_a_name_of_a_public_class_means_one_thing() -> None:
    classes = (
        (node.name, path)
        for path in sources()
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    found = twice(classes)
    assert not found, found


IMPORT = re.compile(r"^ *from (llmpq[\w.]*) import (\([^)]*\)|[^\n(]+)", re.MULTILINE)


@cache
def words_of(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", path.read_text()))


def missing_names(path: Path) -> Iterator[str]:
    """Yield what a file imports of ours whose name stands nowhere in the module."""
    for module, names in IMPORT.findall(path.read_text()):
        place = ROOT / module.replace(".", "/")
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not source.is_file():
            yield module
            continue
        for name in re.findall(r"(\w+)(?: as \w+)?(?:,|\)|$)", re.sub(r"#.*|\s+$", "", names)):
            inside = place / name
            there = inside.is_dir() or inside.with_suffix(".py").is_file()
            if name not in words_of(source) and not there:
                yield f"{module}.{name}"


def test_what_is_imported_is_there() -> None:
    """Benchmarks and tests for GPUs are run seldom; a rename must not pass them by."""
    others = [p for room in ("benchmarks", "tests", "docs") for p in (ROOT / room).rglob("*.py")]
    found = {str(p.relative_to(ROOT)): [*missing_names(p)] for p in [*sources(), *others]}
    assert {path: names for path, names in found.items() if names} == {}
