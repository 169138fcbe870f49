"""What a new user does first: the documented lines and cluster files give plans that check."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.planner.__main__ import main
from llmpq.plans.plan import Plan

pytestmark = [pytest.mark.pure, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "docs" / "clusters"


def _documented() -> list[str]:
    """Every `llmpq-algo` line of the page's blocks and at the top of its cluster files."""
    blocks = re.findall(r"```sh\n(.*?)```", (CLUSTERS / "README.md").read_text(), flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    for path in sorted(CLUSTERS.glob("*.yaml")):
        lines += re.findall(r"^#   (llmpq-algo .*)$", path.read_text(), flags=re.M)
    return lines


LINES = _documented()


def test_three_lines_and_two_files_are_documented() -> None:
    assert sum("--devices" in line for line in LINES) == 3
    assert sum("--cluster" in line for line in LINES) == 2
    assert {path.name for path in CLUSTERS.glob("*.yaml")} == {
        "home.yaml",
        "two-machines.yaml",
        "two-nodes.yaml",
    }


@pytest.mark.parametrize("line", LINES)
def test_a_documented_line_gives_a_plan_that_checks(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(line)
    assert program == "llmpq-algo"
    out = tmp_path / "plan.json"
    quick = ["--time-limit", "2"]  # how good the plan is, is not looked at here
    assert main([*words, *quick, "-o", str(out)]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert "quality loss: " in text
    assert "--devices" not in words or "note: assumed: one machine" in text
    plan = Plan.load(out)
    assert plan.inputs is not None and plan.predicted is not None and plan.predicted.total_s > 0
    monkeypatch.chdir(tmp_path)
    assert main(["check", "plan.json"]) == 0, capsys.readouterr().err


def test_the_home_machine_has_its_bridge_and_the_two_machines_their_ethernet() -> None:
    home = Cluster.load(CLUSTERS / "home.yaml")
    card, first, second, cores = home.devices
    assert home.link(first, second).gbps == 4 * home.link(card, first).gbps == 400
    assert cores.spec.is_cpu and card.reserve_bytes == 2**30
    two = Cluster.load(CLUSTERS / "two-nodes.yaml")
    box, server = two.devices[0], two.devices[-1]
    assert two.link(box, server).gbps == 10 and two.link(server, two.devices[-2]).gbps == 300


def test_readme_has_such_a_line() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"llmpq-algo --devices \S+ .*--model \S+", readme)
