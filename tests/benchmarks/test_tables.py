"""The tables in README files are those of the rows; a stale or empty one is noticed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as for a script: its folder comes first
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tables"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "benchmarks"))
    return module


def readmes() -> list[Path]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/*/*.md")]
    return sorted(p for p in found if not {".venv", "llmpq"} & set(p.relative_to(ROOT).parts))


@pytest.mark.parametrize("path", readmes(), ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_are_those_of_the_rows(tables: ModuleType, path: Path) -> None:
    text = path.read_text()
    assert tables.rewrite(text) == text, "run: python benchmarks/tables.py"


@pytest.mark.parametrize("path", sorted((ROOT / "docs/results").glob("*.md")), ids=lambda p: p.name)
def test_pages_of_numbers_are_tables_and_say_where_the_rest_is(path: Path) -> None:
    """Prose about numbers stands in the lab book, which shows no table of rows."""
    text = re.sub(r"<!-- table (\S+) -->.*?<!-- end \1 -->", "", path.read_text(), flags=re.S)
    _, _, *lines = text.splitlines()
    prose = [line for line in lines[1:] if line and not line.startswith(("## ", "[", "\n"))]
    assert prose == [] and f"../lab-book/{path.name}" in text
    assert "<!-- table" not in (ROOT / "docs/lab-book" / path.name).read_text()


def test_every_table_shown_has_rows(tables: ModuleType) -> None:
    shown = "".join(path.read_text() for path in readmes())
    names = [name for name in tables.TABLES if f"<!-- table {name} -->" in shown]
    empty = [name for name in names if tables.TABLES[name].render().count("\n") < 2]
    assert names and not empty


def test_a_changed_number_is_noticed(tables: ModuleType) -> None:
    made = tables.rewrite("<!-- table quality --><!-- end quality -->")
    assert tables.rewrite(made) == made
    digit = next(c for c in made if c.isdigit())
    planted = made.replace(digit, str((int(digit) + 1) % 10))
    assert tables.rewrite(planted) != planted


def test_the_front_page_has_one_full_table(tables: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- table") == 1 and "<!-- table front -->" in text
    lines = tables.TABLES["front"].render().splitlines()[2:]
    assert 4 <= len(lines) <= 6
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert all(cells) and float(cells[-1].removesuffix("x")) > 0


def test_the_index_names_every_script() -> None:
    index = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    assert scripts
    assert [p.name for p in scripts if f"`{p.name}" not in index and p.name != "tables.py"] == []
