"""Pages that are made from the code are current; links between pages lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from llmpq.pictures.plan_cards import cards_svg
from llmpq.plans.plan import Plan

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not {".venv", "node_modules", "build", "out"} & set(page.relative_to(ROOT).parts)
    and not any(parent.is_symlink() for parent in page.parents)
)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_code(reference: ModuleType) -> None:
    stale = [str(p) for p, text in reference.pages().items() if p.read_text() != text]
    assert stale == [], "run: python docs/make_reference.py"


def test_every_command_that_takes_a_model_takes_its_revision(reference: ModuleType) -> None:
    taking = [p for p in reference.parsers() if "--model " in p.help_text(everything=True)]
    assert len(taking) > 9
    for parser in taking:
        assert "--revision NAME" in parser.help_text(everything=True), parser.program
    given = taking[0].read_given(["--model", "me/demo", "--revision", "v1"])
    assert given["model"] == "me/demo@v1"
    with pytest.raises(ValueError, match="no effect without --model"):
        taking[0].read_given(["--revision", "v1"])


def test_the_picture_is_that_of_the_plan() -> None:
    plan = Plan.load(ROOT / "docs/plan.json")
    made = cards_svg(plan)
    assert (ROOT / "docs/plan.svg").read_text() == made, (
        "run: llmpq-algo export docs/plan.json --to svg -o docs/plan.svg"
    )
    drawn = ElementTree.fromstring(made)
    titles = [t.text or "" for t in drawn.iter() if t.tag.endswith("title")]
    bars = [f"layer {i}, {p.value}" for i, p in enumerate(plan.precisions)]
    assert [title for title in titles if title.startswith("layer")] == bars, "a bar a layer"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [t for t in targets if "://" not in t and not t.startswith("mailto:")]
    missing = [t for t in local if not (page.parent / t).exists()]
    assert missing == []


def named_files(text: str) -> list[str]:
    """The files of code and data that a text names in backticks, with or without their folders."""
    return re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|h|cpp)|(?:[\w.-]+/)+[\w-]+\.yaml)`", text)


FILES = [
    f"/{path.relative_to(ROOT)}"
    for top in ROOT.iterdir()
    if top.is_dir() and not top.is_symlink() and not top.name.startswith(".") and top.name != "out"
    for path in top.rglob("*.*")
]


OTHERS = {"pack_quantized/helpers.py"}
"""Files of other projects that docstrings and comments name."""


def is_there(name: str) -> bool:
    """Whether a file has a name, or a path that ends with it."""
    return any(file.endswith(f"/{name}") for file in FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # what it tells of may be gone by now
    names = {name.removeprefix("llmpq/") for name in named_files(page.read_text())}
    assert [name for name in names if not is_there(name)] == []


def test_files_that_docstrings_and_comments_name_are_there() -> None:
    named = re.compile(r"(?<![\w./:-])((?:\w+/)*\w+\.py)\b")  # not COMMIT:PATH
    missing = []
    for path in (ROOT / file[1:] for file in FILES if file.endswith(".py")):
        prose = " ".join(re.findall(r'"""[\s\S]*?"""|# .*', path.read_text()))
        names = {name.removeprefix("llmpq/") for name in named.findall(prose)}
        missing += [(path.name, name) for name in names - OTHERS if not is_there(name)]
    assert missing == []


def defined(path: Path) -> set[str]:
    """Names of the functions, classes, constants and fields of a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


WHERE = [
    line.strip("|").split(" | ")
    for line in (ROOT / "docs/where-is-what.md").read_text().splitlines()
    if line.startswith("| ") and "`" in line
]


@pytest.mark.parametrize("row", WHERE, ids=lambda row: row[0].strip())
def test_where_is_what_names_what_is_there(row: list[str]) -> None:
    question, files, names = row
    assert 1 <= len(named_files(files)) <= 3, "README, the page and three files: five to open"
    known: set[str] = set()
    for file in named_files(files + names):
        known |= defined(ROOT / file) if file.endswith(".py") else set()
    asked = re.findall(r"`([A-Za-z_][\w.]*)`", question + names)
    assert [w for w in asked if not set(w.split(".")) <= known] == []


def test_the_changelog_is_a_list_under_a_version() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert versions and all(re.fullmatch(r"## \d+\.\d+\.\d+", line) for line in versions)
    assert not any(line.startswith("### ") for line in lines), "newest first, in one list"


@pytest.mark.parametrize(
    "room", ["llmpq", "planner", "profiler", "kernels", "runtime", "clusters", "examples", "tests"]
)
def test_every_room_has_a_page_of_its_own(room: str) -> None:
    lines = (ROOT / room / "README.md").read_text().splitlines()
    assert lines[0].startswith("# ")
