"""The Dockerfile builds what it says: linted without a daemon, as CI does; faults are found."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def lint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dockerfile", ROOT / ".ci/dockerfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dockerfile_has_no_fault(lint: ModuleType) -> None:
    assert lint.faults(TEXT, ROOT) == []
    assert "python3 .ci/dockerfile.py" in (ROOT / ".ci/run").read_text(), "CI lints it"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("FROM python:3.12-slim-bookworm AS wheel", "FROM python AS wheel", "no fixed tag"),
        ("python:3.12-slim-bookworm AS base", "python:latest AS base", "no fixed tag"),
        (" AS cuda", "", "AS a name"),
        ("--no-install-recommends ", "", "--no-install-recommends"),
        ("apt-get update \\\n    && ", "", "without update"),
        (" \\\n    && rm -rf /var/lib/apt/lists/*", "", "lists are left"),
        ("pip wheel --no-cache-dir", "pip wheel", "--no-cache-dir"),
        ("USER llmpq\n\nFROM base AS cpu", "FROM base AS cpu", "cuda ends as root"),
        ('ENTRYPOINT ["llmpq-dist"]', "ENTRYPOINT llmpq-dist", "JSON list"),
        ("COPY planner planner", "COPY planer planner", "no such file"),
        ("COPY planner planner", "COPY tests tests", ".dockerignore"),
        ("--from=wheel", "--from=wheels", "no stage before it"),
        ("WORKDIR /src", "WORKDIR src", "not absolute"),
        ("ARG TORCH_INDEX=https://pypi.org/simple\n", "", "no ARG"),
        ("COPY clusters", "ADD clusters", "'ADD' is no instruction"),
    ],
)
def test_a_planted_fault_is_found(lint: ModuleType, old: str, new: str, said: str) -> None:
    assert old in TEXT
    found = lint.faults(TEXT.replace(old, new), ROOT)
    assert any(said in line for line in found), found


def test_what_it_installs_is_what_the_project_has() -> None:
    extras = set(re.findall(r"llmpq\[([\w,]+)\]", TEXT))
    named = {extra for some in extras for extra in some.split(",")}
    assert {"run", "serve", "gpu"} == named <= PROJECT["project"]["optional-dependencies"].keys()
    versions = set(re.findall(r"python:(\d+\.\d+)", TEXT))
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert all(int(v.split(".")[1]) >= int(least.split(".")[1]) for v in versions)
    (entry,) = re.findall(r'ENTRYPOINT \["([\w-]+)"\]', TEXT)
    assert entry in PROJECT["project"]["scripts"]
    copied = set(re.findall(r"^COPY (\w+) \1$", TEXT, flags=re.M))
    linked = {p.name for p in (ROOT / "llmpq").iterdir() if p.is_symlink()}
    assert copied == linked | {"llmpq"}, "the wheel needs every room that is linked"


def test_every_file_of_data_is_in_the_wheel() -> None:
    """Of what git has in the rooms, all but pages matches a pattern of package-data."""
    listed = subprocess.run(
        ["git", "ls-files", "llmpq", "clusters", "kernels", "planner", "profiler", "runtime"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("no git here to list the files")
    data = PROJECT["tool"]["setuptools"]["package-data"]
    missing = []
    for name in listed.stdout.split():
        path = Path(name)
        if path.suffix in (".py", ".md") or (ROOT / path).is_symlink():
            continue
        found = any(fnmatch(path.name, pattern) for pattern in data["*"])
        for folder in path.parents:  # patterns are relative to their package
            package = ".".join(("llmpq", *folder.parts)).replace("llmpq.llmpq", "llmpq")
            inside = str(path.relative_to(folder))
            found |= any(fnmatch(inside, pattern) for pattern in data.get(package, []))
        if not found:
            missing.append(name)
    assert missing == []
