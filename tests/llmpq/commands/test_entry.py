"""The installed commands: one sentence for Ctrl-C while they load, and every one is there."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llmpq.commands import entry
from llmpq.errors import ExitCode

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("program", SCRIPTS)
def test_ctrl_c_while_a_command_loads_is_a_sentence(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    module, function = SCRIPTS[program].split(":")
    run = getattr(importlib.import_module(module), function)
    monkeypatch.setattr(entry.importlib, "import_module", interrupted)
    assert run() == entry.INTERRUPTED == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == f"{program}: interrupted\n"


@pytest.mark.parametrize("program", SCRIPTS)
def test_a_command_begins_where_pyproject_says(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, function = SCRIPTS[program].split(":")
    monkeypatch.setattr(sys, "argv", [program, "--version"])
    with pytest.raises(SystemExit) as end:
        getattr(importlib.import_module(module), function)()
    assert end.value.code in (0, None)
    assert capsys.readouterr().out.startswith("llmpq")


def test_little_is_loaded_before_interrupts_are_watched() -> None:
    heavy = "{'pydantic', 'yaml', 'rich', 'argparse', 'torch', 'numpy'} & set(sys.modules)"
    code = f"import sys, llmpq.commands.entry; print({heavy})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"
