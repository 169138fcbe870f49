"""What the README says happens: its commands run, its demo leaves the files it names."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def readme_commands() -> list[str]:
    """Every `$ llmpq-... ` line of the README's console blocks, in order."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ llmpq-")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the demo once, as `make demo` does, in a folder that looks like a clone."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("examples", "clusters"):
        (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "examples/demo.py", "--out", "out/demo"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, done.stdout


def readable(text: str) -> bool:
    """Whether a text is mostly words and punctuation, not control characters or broken UTF-8."""
    shown = sum(c.isprintable() or c in "\n\t\f" for c in text)
    return len(text) > 20 and shown == len(text) and "\ufffd" not in text and " " in text


def test_unreadable_text_is_noticed() -> None:
    assert readable("def main():\n    return parser.parse_args()\n")
    assert not readable("\x00\x01 \ufffd\ufffd" * 9)
    assert not readable("short")


def test_demo_plans_two_stages_and_forces_four_bits(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    plan = json.loads((folder / "out/demo/plan.json").read_text())
    assert len(plan["stages"]) == 2
    bits = {bits for stage in plan["stages"] for bits in stage["precisions"]}
    assert bits == {"w4a16", "w16a16"}, "not all layers fit at 16 bits, and some do"


def test_demo_leaves_its_files_and_readable_text(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    for name in (
        "plan.json",
        "costs.json",
        "omega.json",
        "outputs.jsonl",
        "trace.json",
        "report.json",
        "plan.html",
        "run.html",
    ):
        assert (folder / "out/demo" / name).stat().st_size > 0, name
    rows = [json.loads(line) for line in (folder / "out/demo/outputs.jsonl").open()]
    prompts = [json.loads(line) for line in (ROOT / "examples/prompts.jsonl").open()]
    assert [r["custom_id"] for r in rows] == [p["custom_id"] for p in prompts]
    texts = [row["response"]["body"]["choices"][0]["text"] for row in rows]
    assert all(readable(text) for text in texts)
    assert "predicted for their tokens / measured" in printed and "out/demo" in printed


def test_the_five_lines_of_python_print_what_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand; test_front_door.py runs them as a script."""
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 5
    monkeypatch.chdir(ROOT)
    exec(code, {})
    (said,) = re.findall(r"continues Python: `(.*?)`", text)
    assert capsys.readouterr().out.strip() == said


@pytest.mark.parametrize("command", readme_commands())
def test_readme_command_runs(demo: tuple[Path, str], command: str) -> None:
    folder, _ = demo
    words = shlex.split(command)
    if words[0] == "llmpq-algo" and "-o" in words:
        words += ["--time-limit", "5"]  # how good the plan is, is not looked at here
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("command", ["llmpq-algo", "llmpq-profile", "llmpq-dist"])
def test_help_of_every_command(command: str) -> None:
    done = subprocess.run(
        [str(BIN / command), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: " + command)
