"""What `llmpq-algo` does after its flags are read; results on stdout, one sentence on stderr."""

from __future__ import annotations

import argparse
import logging
import sys

from llmpq.errors import ExitCode, LlmpqError


def run(command: str, args: argparse.Namespace) -> int:
    """Run a command; turn outcomes into exit codes with one sentence on stderr."""
    logging.basicConfig(
        level=logging.DEBUG if getattr(args, "debug", False) else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    commands = {"plan": _plan, "check": _check, "export": _export, "devices": _devices}
    try:
        commands[command](args)
    except LlmpqError as error:
        return _fail(str(error), int(error.exit_code))
    except (ValueError, OSError) as error:
        return _fail(str(error), int(ExitCode.USAGE))
    except KeyboardInterrupt:
        return _fail("interrupted", int(ExitCode.INTERRUPTED))
    return int(ExitCode.DONE)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"llmpq-algo: {message}\n")
    return code


def _plan(args: argparse.Namespace) -> None:
    from llmpq.planner.make import make_and_show

    make_and_show(args)


def _check(args: argparse.Namespace) -> None:
    from llmpq.plan import Plan
    from llmpq.planner.check import check_plan
    from llmpq.planner.request import model_of_plan, read_cluster

    plan = Plan.load(args.plan)
    check_plan(plan, spec=model_of_plan(args, plan), cluster=read_cluster(args), costs=None)
    sys.stdout.write(f"{args.plan}: {len(plan.stages)} stages, complete, fits\n")


def _export(args: argparse.Namespace) -> None:
    from llmpq.planner.export import export_plan

    export_plan(args)


def _devices(args: argparse.Namespace) -> None:
    from llmpq.planner.discovery import show_devices

    show_devices(args)
