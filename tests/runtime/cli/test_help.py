"""Every command's help: one screen, at once, without torch or Ray; every flag under --help-all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection
from functools import cache

import pytest

from llmpq.planner.__main__ import COMMANDS as PLANNER
from llmpq.profiler.__main__ import COMMANDS as PROFILER
from llmpq.runtime.cli.main import COMMANDS as DIST
from llmpq.version import __version__

pytestmark = pytest.mark.pure

COMMANDS = [
    "llmpq.planner",
    "llmpq.planner fits",
    "llmpq.planner check",
    "llmpq.planner export",
    "llmpq.planner devices",
    "llmpq.planner models",
    "llmpq.profiler",
    "llmpq.profiler indicator",
    "llmpq.profiler merge",
    "llmpq.profiler tune",
    "llmpq.profiler.cli.quantize",
    "llmpq.runtime",
    *(f"llmpq.runtime {name}" for name in DIST),
]


MORE = ["llmpq.profiler", "llmpq.runtime", "llmpq.runtime bench"]
WATCHED = """
import json, os, runpy, sys, tempfile
import llmpq.commands.command_line, llmpq.plans.plan  # what every command imports

for line in json.load(sys.stdin):
    with tempfile.TemporaryFile("w+") as out:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            sys.argv[:] = line.split()
            try:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                print("\\0", int(end.code or 0), *sys.modules, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        out.seek(0)
        print(json.dumps((line, out.read())), flush=True)
"""
"""Runs each command in a process of its own, and prints what it said and which modules it has."""


@cache
def everything() -> dict[str, str]:
    """What each command prints, then a zero, its exit code and its modules."""
    lines = [f"{command} --help" for command in COMMANDS]
    lines += [f"{command} {flag}" for command in MORE for flag in ("--help-all", "--version")]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        input=json.dumps(lines), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def said(command: str, word: str) -> str:
    text, _, rest = everything()[f"{command} {word}"].partition("\0")
    code, *loaded = rest.split()
    assert code == "0"
    heavy_modules = {"torch", "ray", "triton", "transformers", "numpy", "scipy"}
    assert not heavy_modules & {*loaded}, "help imports what takes a tenth of a second and more"
    return text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_one_screen_with_an_example(command: str) -> None:
    lines = said(command, "--help").splitlines()
    flags = [line for line in lines if line.startswith("  -")]
    assert lines[0].startswith("usage: ") and lines[-1].startswith("example: ")
    assert lines[2].endswith(".") and "exit codes: 0 " in "\n".join(lines)
    assert len(lines) <= 40 and len(flags) <= 14, (len(lines), len(flags))
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", MORE)
def test_every_flag_is_under_help_all(command: str) -> None:
    short, long = said(command, "--help"), said(command, "--help-all")
    assert long.count("  --") > short.count("  --")
    listed = {line.split()[0] for line in long.splitlines() if line.startswith("  -")}
    assert not any("_" in flag for flag in listed), "underscores are accepted, not listed"


@pytest.mark.parametrize("command", MORE)
def test_version(command: str) -> None:
    assert said(command, "--version").split()[-1] == __version__


@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("llmpq.runtime", DIST),
        ("llmpq.planner", PLANNER),
        ("llmpq.profiler", PROFILER),
    ],
)
def test_help_names_every_command(module: str, known: Collection[str]) -> None:
    (listed,) = re.findall(r"^commands, .*?:\n((?:  .*\n)+)", said(module, "--help"), re.M)
    for name in known:
        assert re.search(rf"(?:^| )  ?{name} +\w", listed, re.M), f"{name} is not said"
