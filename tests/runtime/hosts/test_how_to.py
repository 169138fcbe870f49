"""Every command of docs/how-to/several-machines.md, on two hosts, in the page's order."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.hosts, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/how-to/several-machines.md"
MODULES = {
    "llmpq-dist": "llmpq.runtime",
    "llmpq-algo": "llmpq.planner",
    "llmpq-profile": "llmpq.profiler",
    "ray": "ray.scripts.scripts",
}
FEW_SHAPES = ["--bits", "16", "--max-batch", "4", "--max-len", "48"]
"""Of a profile, whose numbers are not looked at here."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)


def translated(text: str, demo_model: Path) -> str:
    """Return the page's text with this bed's addresses and the demo model."""
    text = text.replace("192.168.1.10", "10.77.0.1").replace("192.168.1.20", "10.77.0.2")
    return re.sub(r"\bDIR\b", str(demo_model), text)


def commands(block: str) -> tuple[dict[str, str], list[list[str]]]:
    """Return what a block exports, and its commands as words."""
    exported: dict[str, str] = {}
    found = []
    for line in block.strip().splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            exported |= dict(word.split("=", 1) for word in words[1:])
        else:
            found.append(words)
    return exported, found


@pytest.fixture(scope="module")
def bed(make_bed) -> Iterator:
    with make_bed(["box", "server"]) as two:
        yield two


def run(bed, host, words: list[str], folder: Path, exported: dict[str, str]):
    small = bed.small(host) if words[:2] == ["ray", "start"] else []
    small += FEW_SHAPES if words[0] == "llmpq-profile" else []
    variables = [f"{name}={value}" for name, value in exported.items()]
    command = ("env", *variables, sys.executable, "-m", MODULES[words[0]], *words[1:], *small)
    done = host.run(*command, folder=folder)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done


def test_every_command_of_the_page_runs(bed, demo_model, tmp_path):
    install, first, second, look, job = (translated(b, demo_model) for b in blocks("sh"))
    extra = re.fullmatch(r"pip install 'llmpq\[(\w+)\]'", install.strip())
    assert extra is not None and f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text()
    (described,) = blocks("yaml")
    shown = [line for line in (ROOT / "docs/clusters/two-machines.yaml").read_text().splitlines()]
    assert described.splitlines() == [line for line in shown if not line.startswith("#")]
    (tmp_path / "two-machines.yaml").write_text(translated(described, demo_model))
    rows = [json.dumps({"prompt": text}) for text in ("import os\n", "def ", "class A")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")

    box, server = bed.hosts
    exported, starts = commands(first)
    for words in starts:
        run(bed, box, words, tmp_path, exported)
    shutil.copy(box.home / ".ray/auth_token", server.home / ".ray/auth_token")
    exported, starts = commands(second)
    for words in starts:
        run(bed, server, words, tmp_path, exported)
    exported = {"RAY_AUTH_MODE": "token"}
    (doctor,) = commands(look)[1]
    assert "server" in run(bed, box, doctor, tmp_path, exported).stdout
    for words in commands(job)[1]:
        run(bed, box, words, tmp_path, exported)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["error"] for answer in answers] == [None] * 3
    costs = json.loads((tmp_path / "costs.json").read_text())
    ways = {(link["source"], link["target"]) for link in costs["node_links"]}
    assert ways == {("box", "server"), ("server", "box")}
    inline = re.search(r"`(llmpq-dist run --model DIR --from-ray [^`]*)`", PAGE.read_text())
    assert inline is not None
    words = shlex.split(translated(inline[1].replace("\n", " "), demo_model))
    words[words.index("answers.jsonl")] = "others.jsonl"
    run(bed, box, words, tmp_path, exported)
    others = [json.loads(line) for line in (tmp_path / "others.jsonl").read_text().splitlines()]
    assert [answer["error"] for answer in others] == [None] * 3
