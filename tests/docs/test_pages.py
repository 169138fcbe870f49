"""Pages that are made from the code are current; links between pages lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.export.picture import picture

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not {".venv", "node_modules", "build", "out"} & set(page.relative_to(ROOT).parts)
    and not any(parent.is_symlink() for parent in page.parents)
)


def test_the_reference_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = [str(p) for p, text in module.pages().items() if p.read_text() != text]
    assert stale == [], "run: python docs/make_reference.py"


def test_the_picture_is_that_of_the_plan() -> None:
    plan = Plan.load(ROOT / "docs/plan.json")
    made = picture(plan, ModelSpec.by_name(plan.model.name)).text
    assert (ROOT / "docs/plan.svg").read_text() == made, (
        "run: llmpq-algo export docs/plan.json --to svg -o docs/plan.svg"
    )
    drawn = ElementTree.fromstring(made)
    bars = [r for r in drawn.iter() if r.tag.endswith("rect") and r.get("rx") is None]
    kinds = len({p.weight_bits for p in plan.precisions})
    assert len(bars) == len(plan.precisions) + kinds + 1, "a bar a layer, the legend, the paper"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [t for t in targets if "://" not in t and not t.startswith("mailto:")]
    missing = [t for t in local if not (page.parent / t).exists()]
    assert missing == []


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
    assert lines[0].startswith("# ") and len(lines) <= 90


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 115
