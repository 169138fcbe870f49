"""`llmpq-algo`: reads the command line, and calls what does the command's work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from llmpq.commands.command_line import CommandParser, run_command
from llmpq.errors import DoesNotFitError, nearest
from llmpq.planner.cli import arguments as flags
from llmpq.planner.problem import requests


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = _joined(list(sys.argv[1:] if argv is None else argv))
    command = words.pop(0) if words and words[0] in flags.COMMANDS else "plan"
    return run_command(
        "llmpq-algo",
        lambda: _run(_known(command, words), words),
        interrupted="interrupted",
        spelled=lambda text: PARSERS[command][0]().as_typed(text, words),
        own_process=argv is None,
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
    logging.basicConfig(
        level=logging.DEBUG if getattr(asked, "debug", False) else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    _worker(command)(asked)
    return 0


def _worker(command: str) -> Callable[[Any], None]:
    """Return what does a command's work, imported here: --help opens without a solver."""
    if command == "plan":
        return _plan
    if command == "fits":
        from llmpq.planner.cli.show_fits import show_fits

        return show_fits
    if command == "costs":
        from llmpq.planner.cli.import_costs import import_costs

        return import_costs
    if command == "simulate":
        from llmpq.planner.cli.show_simulation import show_simulation

        return show_simulation
    if command == "check":
        from llmpq.planner.cli.show_check import show_check

        return show_check
    if command == "verify":
        from llmpq.planner.cli.certificates import verify_file

        return verify_file
    if command == "export":
        from llmpq.planner.export import export_plan

        return export_plan
    if command == "devices":
        from llmpq.planner.problem.discovery import show_devices

        return show_devices
    from llmpq.planner.cli.show_models import show_models

    return show_models


def _plan(request: requests.PlanRequest) -> None:
    """Plan a batch job or live traffic, or list the front; the answer on stdout."""
    if request.has_traffic:
        from llmpq.planner.cli.show_traffic import show_traffic

        show_traffic(request)
        return
    if request.objective in requests.TRAFFIC_OBJECTIVES:
        raise ValueError(
            f"--objective {request.objective} is of live traffic: give --trace FILE, or --prompt, "
            "--gen and --rate"
        )
    from llmpq.planner.cli.long_search import line_if_long
    from llmpq.planner.cli.show_plan import make_and_show, read_job

    job = read_job(request)
    try:
        if request.pareto:
            from llmpq.planner.cli.show_front import show_front

            show_front(request, job)
        else:
            with line_if_long("looking for the best plan", job.options.asked_s):
                make_and_show(request, job)
    except DoesNotFitError:
        for note in job.notes:
            if note.startswith("assumed: "):
                sys.stderr.write(f"llmpq-algo: {note}\n")
        raise


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
