"""Who imports whom: the directions between rooms and sub-rooms, and no circle of files.

Read through the package's links (`llmpq/planner` is `planner/`). Imports inside functions count,
and so do modules that a file names as text and passes to `import_module` or `Command`; what stands
under `if TYPE_CHECKING` does not, as it is never run.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("planner", "profiler", "kernels", "runtime", "clusters")

DRAWN = """
llmpq <- kernels <- runtime <- profiler
llmpq <- planner

llmpq <- llmpq/families <- llmpq/checkpoints <- llmpq/models <- llmpq/devices <- llmpq/sizes
llmpq/sizes <- llmpq/costs <- llmpq/plans
llmpq/sizes <- llmpq/pictures <- llmpq/plans
llmpq/checkpoints <- llmpq/commands

kernels/kernel_table <- kernels/arrivals, kernels/multiprocessors, kernels/overlap, kernels/native
kernels/nvrtc <- kernels/arrivals, kernels/multiprocessors, kernels/overlap, kernels/native
kernels/nvrtc <- kernels/compile_missing
kernels/arrivals, kernels/multiprocessors, kernels/overlap, kernels/native <- kernels/formats
kernels/formats <- kernels/gemm
kernels/gemm <- kernels/fused <- kernels/atom
kernels/formats <- kernels/kv, kernels/recurrent
kernels/formats <- kernels/cpu
kernels/atom, kernels/cpu <- kernels/weights

planner/costs <- planner/problem <- planner/evaluate
planner/problem <- planner/export
planner/evaluate <- planner/baselines <- planner/ilp <- planner/exact <- planner/front
planner/evaluate <- planner/check
planner/front, planner/check <- planner/solving <- planner/traffic
planner/traffic, planner/export <- planner/cli <- planner/make, planner/__main__

profiler/timing, profiler/quality, profiler/quantize <- profiler/cli <- profiler/__main__

runtime/options <- runtime/requests <- runtime/steps
runtime/steps <- runtime/cache <- runtime/models <- runtime/weights <- runtime/drafts
runtime/drafts <- runtime/backends <- runtime/engine <- runtime/launch
runtime/steps <- runtime/links <- runtime/engine
runtime/steps <- runtime/text <- runtime/launch
runtime/launch <- runtime/simulate <- runtime/elastic <- runtime/entrypoints
runtime/steps <- runtime/report <- runtime/entrypoints
runtime/entrypoints <- runtime/serve, runtime/tools, runtime/cli (one level)
runtime/cli <- runtime/__main__
"""
"""`a <- b`: b may import a and all that a may. A name is a room, a sub-room or a file of a room.

"(one level)": the names before it, back to the arrow, may import each other (files in a circle may
not). Between rooms only the first two lines count; within a room, that room's. What stands beside a
room's folders is below them all in `llmpq` and `kernels`, and above them all in the others.
"""

ON_FIRST_USE = {
    ("llmpq", "runtime/entrypoints/llm"),
    ("llmpq", "planner/make"),
    ("llmpq", "plans/plan"),
    ("commands/entry", "planner/__main__"),
    ("commands/entry", "profiler/__main__"),
    ("commands/entry", "profiler/cli/quantize"),
    ("commands/entry", "runtime/cli/main"),
    ("runtime/launch/plans/auto_plan", "planner/make"),
    ("runtime/launch/plans/auto_plan", "planner/problem/discovery"),
    ("runtime/launch/plans/auto_plan", "planner/problem/known_plan"),
    ("runtime/elastic/replan", "planner/problem/known_plan"),
    ("planner/evaluate/engine_simulation", "runtime/simulate/simulation"),
    ("planner/evaluate/engine_simulation", "runtime/simulate/step_times"),
}
"""The few imports upward: the front doors, of Python and of the commands, the one place where a run
asks for a plan, and the one where the planner has the runtime's scheduler simulated."""

BOTH_WAYS = {
    frozenset({"runtime/backends", "runtime/backends/gpu"}),  # what a GPU's runner is built on
    frozenset({"runtime/cli", "runtime/tools"}),  # a command's module is loaded by name
}
"""The folders that import each other, for good; every other folder is on one level."""

Graph = Mapping[str, frozenset[str]]
"""Module -> modules of this package that it imports."""


def modules() -> dict[str, Path]:
    """Import name -> file, of every module of the package."""
    found = {}
    for top in ("llmpq", *ROOMS):
        for path in sorted((ROOT / top).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            parts = parts if top == "llmpq" else ["llmpq", *parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from executed(other)
        else:
            yield child
            yield from executed(child)


@functools.cache
def imported_by(path: Path) -> frozenset[str]:
    """What a file imports, read once."""
    return frozenset(imported(path.read_text()))


def imported(source: str) -> Iterator[str]:
    """Every module, or name in a module, that a source imports, wherever it does so."""
    named, dynamic = [], False
    for node in executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and is_dynamic(node):
            dynamic = True
            made = (ast.JoinedStr, ast.BinOp)
            assert not any(isinstance(a, made) for a in node.args), (
                f"{ast.unparse(node)}: write the module's whole name, so that it can be found"
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.append(node.value.partition(":")[0])
    if dynamic:
        yield from (name for name in named if name.startswith("llmpq.") and " " not in name)


def is_dynamic(call: ast.Call) -> bool:
    return ast.unparse(call.func).split(".")[-1] in (
        *("import_module", "__import__", "run_module"),
        "Command",  # of commands/command_line.py, which imports it
    )


def graph() -> Graph:
    """All imports between modules of the package."""
    known = modules()
    edges = {}
    for name, path in known.items():
        whole = {module_of(target, known) for target in imported_by(path)}
        edges[name] = frozenset(whole) - {name, ""}
    return edges


def module_of(name: str, known: Mapping[str, Path]) -> str:
    """The module that is read for `import name`, or for `from ... import` of what is in it."""
    return name if name in known else name.rpartition(".")[0] if "." in name else ""


def circles(edges: Graph) -> list[set[str]]:
    """Groups of modules each of which imports, by way of others, every other one (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(group)

    for node in edges:
        if node not in index:
            visit(node)
    return found


def parts_of(module: str) -> tuple[str, str]:
    """A module's room, and its sub-room or file if drawn: ("runtime", "runtime/links")."""
    words = module.split(".")
    if len(words) < 2 or words[1] not in ROOMS or words[1] == "clusters":
        inside = "/".join(words[:2])  # clusters: data beside the nouns
        return "llmpq", inside if inside in drawn() else "llmpq"
    inside = "/".join(words[1:3])
    return words[1], inside if inside in drawn() or len(words) > 3 else words[1]


@functools.cache
def drawn() -> set[str]:
    return {name for pair in allowed_within() for name in pair}


@functools.cache
def allowed_within() -> set[tuple[str, str]]:
    """All pairs (importer, imported) that the drawing allows."""
    pairs: set[tuple[str, str]] = set()
    for line in DRAWN.replace("\\\n", "").splitlines():
        levels = [part for part in line.split("<-") if part.strip()]
        names = [[n.strip() for n in p.replace("(one level)", "").split(",")] for p in levels]
        for level, group in zip(levels, names, strict=True):
            if "(one level)" in level:
                pairs |= {(a, b) for a in group for b in group}
        for below, above in zip(names, names[1:], strict=False):
            pairs |= {(a, b) for a in above for b in below}
    while True:
        more = {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs
        if not more:
            return pairs
        pairs |= more


def at_the_door(module: str, target: str) -> bool:
    named = tuple(m.removeprefix("llmpq.").replace(".", "/") for m in (module, target))
    return named in ON_FIRST_USE


def both_ways(edges: Graph) -> set[frozenset[str]]:
    """Folders each of which imports the other; what is loaded on first use aside."""
    known = modules()

    def folder(module: str) -> str:
        return str(known[module].parent.relative_to(ROOT))

    found = {
        (folder(module), folder(target))
        for module, targets in edges.items()
        for target in targets
        if target in known and not at_the_door(module, target)
    }
    return {frozenset((a, b)) for a, b in found if a != b and (b, a) in found}


def wrong_edges(edges: Graph) -> list[str]:
    """Imports that the drawing does not allow, each as `importer -> imported`."""
    pairs = allowed_within()
    wrong = []
    for module, targets in edges.items():
        room, inside = parts_of(module)
        for target in targets:
            other_room, other = parts_of(target)
            if target == "llmpq" and module != "llmpq":
                good = False  # names of the front door are for users
            elif at_the_door(module, target):
                good = True
            elif room == other_room:
                good = inside == other or (inside, other) in pairs
            else:
                good = (room, other_room) in pairs
            if not good:
                wrong.append(f"{module} -> {target}")
    return wrong


@pytest.fixture(scope="module")
def edges() -> Graph:
    return graph()


def test_imports_follow_the_rooms(edges: Graph) -> None:
    assert len(edges) > 200, "the links to the rooms were not followed"
    assert wrong_edges(edges) == []


def test_every_folder_is_on_one_level(edges: Graph) -> None:
    assert both_ways(edges) == BOTH_WAYS


def test_no_files_in_a_circle(edges: Graph) -> None:
    assert circles(edges) == []


def test_planner_and_nouns_leave_torch_alone() -> None:
    for name, path in modules().items():
        if parts_of(name)[0] in ("llmpq", "planner"):
            roots = {target.split(".")[0] for target in imported_by(path)}
            assert not roots & {"torch", "triton"}, name
        assert not {t.split(".")[0] for t in imported_by(path)} & set(ROOMS), name


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("llmpq.planner.make", "llmpq.runtime.steps.step"),
        ("llmpq.kernels.weights.weight", "llmpq.runtime.steps.step"),
        ("llmpq.planner.exact.search", "llmpq.planner.solving.worker"),
        ("llmpq.planner.evaluate.fits", "llmpq.planner.cli.report"),
        ("llmpq.runtime.links.message", "llmpq.runtime.tools.bench"),
        ("llmpq.runtime.models.llama", "llmpq.runtime.drafts.ngram"),
        ("llmpq.kernels.formats.kv_block", "llmpq.kernels.kv.low_bit.attend"),
        ("llmpq.kernels.kv.low_bit.attend", "llmpq"),
        ("llmpq.precision", "llmpq.kernels.overlap"),
        ("llmpq.sizes.memory", "llmpq.plans.plan"),
        ("llmpq.units", "llmpq.devices.cluster"),
    ],
)
def test_a_wrong_direction_is_caught(module: str, target: str) -> None:
    assert wrong_edges({module: frozenset({target})}) == [f"{module} -> {target}"]


def test_a_right_direction_is_let_through() -> None:
    for module, target in (
        ("llmpq.runtime.engine.stage_loop", "llmpq.runtime.models.layers"),
        ("llmpq.profiler.timing.cases", "llmpq.runtime.steps.step"),
        ("llmpq.kernels.kv.low_bit.attend", "llmpq.kernels.formats.kv_block"),
        ("llmpq.runtime.launch.plans.auto_plan", "llmpq.planner.make"),
    ):
        assert wrong_edges({module: frozenset({target})}) == []


def test_every_way_to_import_is_read() -> None:
    source = """
from typing import TYPE_CHECKING
from importlib import import_module
if TYPE_CHECKING:
    import llmpq.plans.plan
HERE = {"a": "llmpq.planner.make:make_plan"}
def f(name):
    from llmpq.kernels import overlap
    return import_module(HERE[name])
"""
    found = set(imported(source))
    assert {
        "llmpq.kernels.overlap",
        "llmpq.planner.make",
    } <= found and "llmpq.plans.plan" not in found
    with pytest.raises(AssertionError, match="whole name"):
        list(imported("import_module(f'llmpq.{x}')"))


def test_a_circle_is_found() -> None:
    edges = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert circles(edges) == [{"a", "b", "c"}]
