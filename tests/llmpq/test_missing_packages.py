"""A plain install: whatever needs more is one sentence with the extra that brings it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llmpq.missing_packages import missing_package

pytestmark = [pytest.mark.pure, pytest.mark.quick]
ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "demo-7m")
PLAIN = """
import importlib, importlib.util, io, json, re, sys
from contextlib import redirect_stderr, redirect_stdout

class NotInstalled:
    '''Hides what the dependencies of a plain install do not bring.'''
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

HIDDEN = set(json.loads(sys.argv[1]))
for name in [name for name in sys.modules if name.partition(".")[0] in HIDDEN]:
    del sys.modules[name]
sys.meta_path.insert(0, NotInstalled())
ends = []
for module, function, words in json.loads(sys.argv[2]):
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err):
        try:
            code = getattr(importlib.import_module(module), function)(words)
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    ends.append([code, err.getvalue()])
print(json.dumps(ends))
"""
DIST = ("llmpq.runtime.cli.main", "main")
PROFILE = ("llmpq.profiler.__main__", "main")
TEXT = str(ROOT / "examples" / "heldout.txt")
COMMANDS = (
    (*DIST, ["run", "--model", MODEL, "-i", str(ROOT / "examples/prompts.jsonl"), "-o", "OUT"],
     "run"),
    (*DIST, ["serve", "--model", MODEL], "run,serve"),
    (*DIST, ["doctor"], "run"),
    (*DIST, ["check", str(ROOT / "docs" / "plan.json")], "run"),
    (*DIST, ["bench", "--model", "llama-3.1-8b", "--load-format", "dummy"], "run"),
    (*DIST, ["eval", "--model", MODEL, "--text", TEXT], "run"),
    (*DIST, ["convert", MODEL, "OUT"], "run"),
    (*PROFILE, ["--quick", "--model", MODEL, "--cluster", str(ROOT / "clusters/laptop-cpu.yaml"),
                "-o", "OUT/costs.json"], "run"),
    (*PROFILE, ["indicator", "--kind", "variance", "--model", MODEL, "--text", TEXT,
                "-o", "OUT/omega.json"], "run"),
    (*PROFILE, ["tune", "--model", "qwen3-8b"], "run"),
    ("llmpq.profiler.cli.quantize", "main",
     [MODEL, "OUT/q", "--scheme", "w4a16", "--text", TEXT], "run"),
)  # fmt: skip


def hidden() -> list[str]:
    """What the extras bring, and what comes with that: all but the plain dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any("torch" in line for line in project["dependencies"])
    return [
        "torch", "ray", "safetensors", "tokenizers", "transformers", "sklearn", "psutil", "scipy",
        "llguidance", "gguf", "huggingface_hub", "fastapi", "uvicorn", "prometheus_client",
        "triton", "tqdm", "starlette", "jinja2",
    ]  # fmt: skip


def ends_of(commands: list[tuple[str, str, list[str]]], folder: Path) -> list[tuple[object, str]]:
    """Run commands in a process without the extras' packages; return exit codes and stderr."""
    text = json.dumps(commands).replace("OUT", str(folder))
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, json.dumps(hidden()), text],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return [(code, err) for code, err in json.loads(done.stdout.splitlines()[-1])]


def test_every_command_names_the_extra_that_it_needs(tmp_path):
    ends = ends_of([tuple(command[:3]) for command in COMMANDS], tmp_path)
    for (_, _, words, extras), (code, err) in zip(COMMANDS, ends, strict=True):
        said = err.strip().splitlines()
        assert code == 2 and f"pip install 'llmpq[{extras}]'" in said[-1], (words, code, err)
        assert "Traceback" not in err and "is not installed" in said[-1]


def test_names_of_the_front_door_say_what_to_install():
    for name, works in (
        ("LLM", False), ("SamplingParams", False), ("StructuredOutputsParams", False),
        ("RequestOutput", False), ("Plan", True), ("make_plan", True),
    ):  # fmt: skip
        lines = PLAIN.partition("ends = []")[0] + f"from llmpq import {name}\n"
        done = subprocess.run(
            [sys.executable, "-c", lines, json.dumps(hidden())], capture_output=True, text=True
        )
        assert (done.returncode == 0) == works, done.stderr
        if not works:
            last = done.stderr.strip().splitlines()[-1]
            assert f"llmpq.{name}: " in last and "pip install 'llmpq[run]'" in last
            assert len(done.stderr.strip().splitlines()) < 12  # the caller's line and ours


@pytest.mark.parametrize(
    ("module", "extras", "command"),
    [
        ("torch.nn", ("run",), "pip install 'llmpq[run]'"),
        ("fastapi", ("run", "serve"), "pip install 'llmpq[run,serve]'"),
        ("sklearn.linear_model", ("run",), "pip install 'llmpq[run]'"),
        ("prometheus_client", ("run",), "pip install 'llmpq[serve]'"),
        ("gurobipy", ("run",), "pip install 'llmpq[gurobi]'"),
        ("some_parser", ("run",), "pip install some_parser"),
        ("llmpq.nowhere", ("run",), None),
    ],
)
def test_a_module_is_installed_by_its_extra(module, extras, command):
    said = missing_package(ModuleNotFoundError(name=module), extras)
    assert said is None if command is None else said is not None and said.endswith(command)
