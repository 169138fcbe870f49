"""The page for people who come from other programs: every command there is one of ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from llmpq.commands.command_line import CommandParser
from llmpq.planner.__main__ import COMMANDS as PLANNER
from llmpq.profiler.cli.flags import quantize_parser
from llmpq.runtime.cli.main import COMMANDS

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/coming-from.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
LINES = sorted({c for c in re.findall(r"`([^`]+)`", PAGE) if c.startswith("llmpq-")})


def parser_of(line: str) -> tuple[CommandParser, list[str]]:
    """Return the parser of a command line, and its other words."""
    program, *words = shlex.split(line)
    parsers: dict[str, Callable[[], CommandParser]] = {
        "llmpq-algo": PLANNER["plan"].parser,
        "llmpq-dist": COMMANDS["run"].parser,
        "llmpq-quantize": quantize_parser,
    }
    found = parsers[program]
    if program == "llmpq-algo" and words[0] in PLANNER:
        found = PLANNER[words.pop(0)].parser
    elif program == "llmpq-dist" and words[0] in COMMANDS:
        found = COMMANDS[words.pop(0)].parser
    return found(), words


@pytest.mark.parametrize("line", LINES)
def test_every_flag_of_a_command_is_there(line: str) -> None:
    parser, words = parser_of(line)
    parser.read(words)


def test_a_flag_of_another_program_is_refused() -> None:
    parser, words = parser_of("llmpq-dist serve DIR --tensor-split 3,2")
    with pytest.raises(ValueError, match="has no .--tensor-split.: "):
        parser.read(words)


def test_every_row_has_the_task_in_both() -> None:
    assert len(ROWS) > 30 and len(LINES) > 20
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 3 and all(cells), row
    for program in ("vLLM", "llama.cpp", "Ollama"):
        assert f"## From {program}" in PAGE
