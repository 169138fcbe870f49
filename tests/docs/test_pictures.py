"""Pictures of README and docs are those of the committed plan and rows."""

from __future__ import annotations

import importlib
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))  # as for a script: its folder comes first
    yield importlib.import_module("make_pictures")
    sys.modules.pop("make_pictures", None)


def test_every_picture_is_what_its_plan_and_rows_draw(
    pictures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_pictures.py", "--check"])
    assert pictures.main() == 0, "run: python docs/make_pictures.py"
    shown = "".join(p.read_text() for p in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    for name in pictures.PICTURES:
        assert f"{name})" in shown, f"no page shows {name}"


def test_bars_are_as_long_as_their_rates(pictures: ModuleType) -> None:
    drawn = ElementTree.fromstring(pictures.speed_svg())
    bars = [float(r.get("width")) for r in drawn.iter() if r.get("height") == "15"]
    assert len(bars) == 2 * len(pictures.LINES) and max(bars) == pictures.BAR
    for line, ours, theirs in zip(pictures.LINES, bars[::2], bars[1::2], strict=True):
        ratio = float(line.cells()[4].removesuffix("x"))
        assert ours / theirs == pytest.approx(ratio, abs=0.01)


def test_screenshots_are_small_and_shown() -> None:
    shown = "".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
    for name in ("report-plan", "report-run", "page"):
        for view in ("light", "dark", "390", "print"):
            picture = ROOT / "docs" / f"{name}-{view}.webp"
            assert picture.read_bytes()[8:12] == b"WEBP" and picture.stat().st_size < 150_000
            assert f"{picture.name})" in shown, f"no page shows {picture.name}"
    assert not list((ROOT / "docs").glob("*.png"))


def test_the_run_that_is_shown_is_a_report() -> None:
    from llmpq.pictures.run_page import run_page
    from llmpq.plans.plan import Plan

    report = json.loads((ROOT / "docs/run.json").read_text())
    plan = Plan.model_validate_json(json.dumps(report["plan"]))
    assert report["completed"] == 48 and "demo-7m on" in run_page(report, plan)
