"""Pages, --help and sources use the terms of the field, none of a few private ones."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = re.compile(r"\b(nobody|whoever|let in|lasting|wishes)\b", re.IGNORECASE)
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "how-to").glob("*.md"),
    ROOT / "docs" / "reference" / "commands.md",
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_and_help_use_the_fields_words(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [line for line in lines if PRIVATE.search(line)] == []


@pytest.mark.parametrize("room", ["llmpq", "planner", "profiler", "runtime", "kernels"])
def test_sources_use_the_fields_words(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / room).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    ]
    assert found == []
