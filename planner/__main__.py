"""`llmpq-algo`: reads the command line, nothing else; the work is in planner/cli/commands.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from llmpq.commands.command_line import CommandParser, end_of
from llmpq.errors import nearest
from llmpq.planner.cli import arguments as flags
from llmpq.planner.problem import requests


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = _joined(list(sys.argv[1:] if argv is None else argv))
    command = words.pop(0) if words and words[0] in flags.COMMANDS else "plan"
    return end_of(
        "llmpq-algo",
        lambda: _run(_known(command, words), words),
        interrupted="interrupted",
        spelled=lambda text: PARSERS[command][0]().as_typed(text, words),
    )


PARSERS: dict[str, tuple[Callable[[], CommandParser], type[Any]]] = {
    "plan": (flags.plan_parser, requests.PlanRequest),
    "fits": (flags.fits_parser, requests.FitsRequest),
    "costs": (flags.costs_parser, requests.CostsRequest),
    "simulate": (flags.simulate_parser, requests.SimulateRequest),
    "check": (flags.check_parser, requests.CheckRequest),
    "verify": (flags.verify_parser, requests.VerifyRequest),
    "export": (flags.export_parser, requests.ExportRequest),
    "devices": (flags.devices_parser, requests.ListRequest),
    "models": (flags.models_parser, requests.ModelsRequest),
}
"""The flags of each command, and what they are read into."""


def _known(command: str, words: list[str]) -> str:
    """Return the command; `ValueError` where the first word is nearly the name of one."""
    first = words[0] if command == "plan" and words else "-"
    meant = "" if first.startswith("-") else nearest(first, flags.COMMANDS)
    if meant:
        raise ValueError(f"unknown command '{first}': {meant}see llmpq-algo --help")
    return command


def _run(command: str, words: list[str]) -> int:
    """Read the flags, then import what does the work."""
    parser, request = PARSERS[command]
    words = flags.without_paper_flags(words) if command == "plan" else words
    asked: Any = parser().read_as(request, words)
    from llmpq.planner.cli import commands

    commands.run(command, asked)
    return 0


def _joined(words: list[str]) -> list[str]:
    """Join `--what-if -T4-0` to one word, which argparse would take for two flags."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--what-if", "--what_if"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


if __name__ == "__main__":
    sys.exit(main())
