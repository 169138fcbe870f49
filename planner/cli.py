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
    from llmpq.planner.check import check_alone, check_plan
    from llmpq.planner.named_inputs import model_of_plan, names_devices, read_cluster

    plan = Plan.load(args.plan)
    alone = plan.inputs is not None
    if names_devices(args) or not alone:
        if not names_devices(args):
            raise ValueError(
                f"'{args.plan}' carries no device, link and cost entries (an older llmpq made it, "
                "or a hand): name the devices it should fit with --cluster or --devices"
            )
        check_plan(plan, spec=model_of_plan(args, plan), cluster=read_cluster(args), costs=None)
    elif args.model or args.model_name or args.model_size:
        model_of_plan(args, plan)
    times = check_alone(plan) if alone else None
    sys.stdout.write(f"{args.plan}: {len(plan.stages)} stages, complete, fits\n")
    if times is not None:
        sys.stdout.write(
            f"recomputed from its own entries: {times.total_s:.3f} s (prefill "
            f"{times.prefill_s:.3f}, decode {times.decode_s:.3f})\n"
        )


def _export(args: argparse.Namespace) -> None:
    from llmpq.planner.export import export_plan

    export_plan(args)


def _devices(args: argparse.Namespace) -> None:
    from llmpq.planner.discovery import show_devices

    show_devices(args)
