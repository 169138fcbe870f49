"""`llmpq-algo`: reads the command line, and calls what does the command's work."""

from __future__ import annotations

import logging
import sys

from llmpq.commands.command_line import Command, run_command
from llmpq.errors import nearest
from llmpq.planner.cli import arguments as flags
from llmpq.planner.problem import requests


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = _joined(list(sys.argv[1:] if argv is None else argv))
    command = words.pop(0) if words and words[0] in COMMANDS else "plan"
    return run_command(
        "llmpq-algo",
        lambda: _run(_known(command, words), words),
        interrupted="interrupted",
        spelled=lambda text: COMMANDS[command].parser().as_typed(text, words),
        own_process=argv is None,
    )


COMMANDS = {
    "plan": Command(
        flags.plan_parser, requests.PlanRequest, "llmpq.planner.cli.plan_command", "plan"
    ),
    "fits": Command(
        flags.fits_parser, requests.FitsRequest, "llmpq.planner.cli.show_fits", "show_fits"
    ),
    "costs": Command(
        flags.costs_parser, requests.CostsRequest, "llmpq.planner.cli.import_costs", "import_costs"
    ),
    "simulate": Command(
        flags.simulate_parser,
        requests.SimulateRequest,
        "llmpq.planner.cli.show_simulation",
        "show_simulation",
    ),
    "check": Command(
        flags.check_parser, requests.CheckRequest, "llmpq.planner.cli.show_check", "show_check"
    ),
    "verify": Command(
        flags.verify_parser, requests.VerifyRequest, "llmpq.planner.cli.certificates", "verify_file"
    ),
    "export": Command(
        flags.export_parser, requests.ExportRequest, "llmpq.planner.export", "export_plan"
    ),
    "devices": Command(
        flags.devices_parser,
        requests.ListRequest,
        "llmpq.planner.problem.discovery",
        "show_devices",
    ),
    "models": Command(
        flags.models_parser, requests.ModelsRequest, "llmpq.planner.cli.show_models", "show_models"
    ),
}
"""Each word after `llmpq-algo`; without one, `plan` is meant."""


def _known(command: str, words: list[str]) -> str:
    """Return the command; `ValueError` where the first word is nearly the name of one."""
    first = words[0] if command == "plan" and words else "-"
    meant = "" if first.startswith("-") else nearest(first, COMMANDS)
    if meant:
        raise ValueError(f"unknown command '{first}': {meant}see llmpq-algo --help")
    return command


def _run(command: str, words: list[str]) -> int:
    """Read the flags, then import what does the work."""
    words = flags.without_paper_flags(words) if command == "plan" else words
    asked = COMMANDS[command].read(words)
    logging.basicConfig(
        level=logging.DEBUG if getattr(asked, "debug", False) else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    COMMANDS[command].work()(asked)
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
