"""The lines of Python that readers are shown: run as they stand, over stages, and from a wheel."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]
SETUPTOOLS = 77
"""What pyproject.toml asks for; an older one here is replaced by the build, from the index."""
MODEL = '"examples/demo-7m"'

FROM = """
import os, sys

for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "llmpq":
        assert module.__file__.startswith(os.environ["SITE"]), module.__file__
"""


def shown_lines() -> str:
    """The first Python block with the entrance in it, of the first page that has one."""
    for page in ("README.md", "runtime/README.md"):
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S):
            if "from llmpq import LLM" in block:
                return block
    raise AssertionError("no page shows the entrance")


def run(code: str, folder: Path, **environment: str) -> str:
    """Run lines as a user's script in a folder; return what they print."""
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder in which the lines find the model they name."""
    found = tmp_path_factory.mktemp("clone")
    (found / "examples").symlink_to(ROOT / "examples")
    return found


def test_the_lines_are_few_and_name_the_bundled_model():
    code = shown_lines()
    assert MODEL in code and len([line for line in code.splitlines() if line.strip()]) <= 6


def test_the_lines_say_the_same_on_one_and_on_three_stages(
    folder, demo_model, make_plan, monkeypatch, capsys
):
    code = shown_lines()
    greedy = re.sub(r"(, )?temperature=[0-9.]+", "", code)
    greedy = greedy.replace("SamplingParams(", "SamplingParams(temperature=0, ")
    monkeypatch.chdir(folder)
    exec(greedy, {})
    whole = capsys.readouterr().out
    assert len(whole.strip()) > 20
    make_plan(demo_model, (2, 5), batch=4, prompt_len=64, gen_len=512).save_json(
        folder / "plan.json"
    )
    exec(greedy.replace(MODEL, f'{MODEL}, plan="plan.json"'), {})
    assert capsys.readouterr().out == whole


ROOMS = ("clusters", "kernels", "llmpq", "planner", "profiler", "runtime")
PAGES = (
    "pictures/vega/vega.min.js", "pictures/report_page.js", "runtime/serve/page.html",
    "runtime/serve/chat.js", "runtime/serve/markdown/markdown-it.min.js", "clusters/gpus.yaml",
    "kernels/native/layer.cpp",
)  # fmt: skip
"""Some of what is no Python."""


def test_the_lines_run_from_a_wheel_outside_the_repository(tmp_path):
    """The wheel's files alone: neither the repository nor an installed copy is imported."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    if int(importlib.metadata.version("setuptools").split(".")[0]) >= SETUPTOOLS:
        build.append("--no-build-isolation")
    built = subprocess.run(build, capture_output=True, text=True, timeout=200)
    if built.returncode and re.search("connection|resolve|network", built.stderr, re.I):
        pytest.skip("no package index to build a wheel with")
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = tmp_path.glob("llmpq-*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
        packed = set(files.namelist())
    wanted = {
        (
            Path("llmpq") / path.relative_to(source / "llmpq" if room == "llmpq" else source)
        ).as_posix()
        for room in ROOMS
        for path in (source / room).rglob("*")
        if path.is_file() and path.name != "README.md" and "build" not in path.parts
    }
    assert wanted - packed == set(), "files that a wheel lacks"
    assert {f"llmpq/{name}" for name in PAGES} <= packed
    shutil.rmtree(source)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "demo-7m").symlink_to(ROOT / "examples" / "demo-7m")
    printed = run(shown_lines() + FROM, tmp_path, PYTHONPATH=str(site), SITE=str(site))
    assert len(printed.strip()) > 20
