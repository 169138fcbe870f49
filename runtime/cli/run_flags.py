"""The flags of `llmpq-dist run`: which there are, what they may say, what they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from llmpq.runtime.auto_plan import DEFAULT_NEW_TOKENS
from llmpq.runtime.cli.flags_without_effect import refuse_idle
from llmpq.runtime.cli.speculation_choice import add_speculation_arguments
from llmpq.runtime.launch.launcher import (
    BACKEND_HELP,
    BACKENDS,
    MAX_TIMEOUT_S,
    Deadlines,
    Launch,
)
from llmpq.runtime.launch.planned_kv import AUTO
from llmpq.runtime.launch.stage_settings import LINK_CHOICES
from llmpq.runtime.sampling_params import TokenChoice
from llmpq.runtime.text.batch_rows import Defaults


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `run`."""
    job = parser.add_argument_group("job")
    job.add_argument(
        "--strat_file_name", "--plan", dest="plan", metavar="PLAN",
        help="plan.json of llmpq-algo; the .json may be left out (default: plan for the devices "
        "there are)",
    )  # fmt: skip
    job.add_argument("--model", metavar="DIR", help="model directory (default: the plan's)")
    job.add_argument("-i", "--input", required=True, metavar="FILE", help="prompts")
    job.add_argument("-o", "--output", required=True, metavar="FILE", help="answers, JSONL")
    job.add_argument(
        "--kv-cache-dtype", "--kv_cache_dtype", default=AUTO, metavar="KV",
        help="kv16, kv8, kv4 or kv2 (int8, int4, int2) instead of what the plan says",
    )  # fmt: skip
    job.add_argument(
        "--cluster", metavar="YAML",
        help="check that the plan was made for it; without a plan: plan for its devices",
    )  # fmt: skip
    job.add_argument(
        "--from-ray", "--from_ray", nargs="?", const="auto", metavar="ADDRESS",
        help="without a plan: plan for the devices of this Ray (default address: auto) and run "
        "there",
    )  # fmt: skip
    job.add_argument(
        "--profile", action="store_true",
        help="without a plan: measure this machine first; the costs are kept for later runs",
    )  # fmt: skip
    job.add_argument(
        "--resume", action="store_true", help="keep the rows that --output has, run the others"
    )
    job.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto trace")
    job.add_argument("--report", metavar="FILE", help="write the report as JSON")
    job.add_argument("--json", action="store_true", help="print the report as JSON, not as tables")
    _add_sampling(parser.add_argument_group("tokens (rows may say otherwise)"))
    add_speculation_arguments(parser.add_argument_group("speculation"))
    _add_launch(parser.add_argument_group("launch"))


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    defaults = Defaults()
    group.add_argument(
        "--max_tokens", "--max-tokens", "--max_tokens_to_generate", type=int, metavar="N",
        help=f"new tokens a row (default: the plan's, without a plan {DEFAULT_NEW_TOKENS})",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, default=defaults.temperature, help="0: greedy")
    group.add_argument("--top-k", "--top_k", type=int, metavar="K", help="default: all tokens")
    group.add_argument("--top-p", "--top_p", type=float, default=defaults.top_p, metavar="P")
    group.add_argument("--seed", type=int, default=defaults.seed, help="row i draws from seed + i")
    group.add_argument(
        "--ignore-eos", "--ignore_eos", action="store_true", help="always generate N tokens"
    )


def _add_launch(group: argparse._ArgumentGroup) -> None:
    deadlines, launch = Deadlines(), Launch()
    group.add_argument("--backend", choices=BACKENDS, default=launch.backend, help=BACKEND_HELP)
    group.add_argument(
        "--ray-address", "--ray_address", "--address", metavar="ADDRESS",
        help="run through this Ray ('auto': the one of this machine)",
    )  # fmt: skip
    group.add_argument(
        "--no_auto", "--no-auto", action="store_true",
        help="start nothing: join the Ray that runs already (as --ray-address auto)",
    )  # fmt: skip
    group.add_argument("--master_addr", "--master-addr", metavar="IP",
                       help="where the stages meet (default: the first stage's host where "
                            "--cluster has several nodes, else 127.0.0.1)")  # fmt: skip
    group.add_argument("--layer-cache", metavar="DIR",
                       help="keep quantised layers here: a restart reads them")  # fmt: skip
    group.add_argument("--links", choices=LINK_CHOICES, default="auto",
                       help="between GPUs; auto: the best that works")  # fmt: skip
    group.add_argument("--master_port", "--master-port", type=int, default=launch.master_port,
                       metavar="PORT", help="default: a free one")  # fmt: skip
    for name, default in (
        ("placement", deadlines.placement_s),
        ("load", deadlines.load_s),
        ("step", deadlines.step_s),
    ):
        group.add_argument(
            f"--{name}-timeout", f"--{name}_timeout", type=float, default=default, metavar="S",
            help=f"seconds (default {default:g})",
        )  # fmt: skip


def check_flags(args: argparse.Namespace) -> None:
    """`ValueError` for a value no row could be served with, and for flags without effect."""
    if args.plan is None:
        _check_planning(args)
    else:
        given = {"--from-ray": args.from_ray is not None, "--profile": args.profile}
        refuse_idle(given, "with a plan", "give no plan")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ValueError(
            f"--max_tokens must be at least 1, got {args.max_tokens}; leave it out for the plan's"
        )
    try:
        TokenChoice(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    if not 0 <= args.master_port < 2**16:
        raise ValueError(
            f"--master_port must be 1 to 65535, or 0 for a free one, got {args.master_port}"
        )
    check_timeouts({
        f"--{name}-timeout": getattr(args, f"{name}_timeout")
        for name in ("placement", "load", "step")
    })  # fmt: skip


def _check_planning(args: argparse.Namespace) -> None:
    """Check the flags of a run that makes its plan itself."""
    if args.model is None:
        raise ValueError(
            "give --model DIR to plan for the devices there are, or --strat_file_name PLAN to run "
            "a plan of llmpq-algo"
        )
    if args.from_ray is not None and args.cluster is not None:
        raise ValueError("give the devices in one way: --from-ray or --cluster")
    if args.from_ray is not None and args.profile:
        raise ValueError(
            "--profile measures this machine, --from-ray plans for others: leave --profile out, or "
            "run llmpq-profile on each node and plan with llmpq-algo --costs"
        )
    if args.from_ray is not None and args.ray_address not in (None, args.from_ray):
        raise ValueError("--from-ray and --ray-address name two Rays; leave --ray-address out")


def check_timeouts(seconds: Mapping[str, float]) -> None:
    """`ValueError` for a flag whose seconds nothing can wait."""
    for flag, limit_s in seconds.items():
        if not 0 < limit_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"{flag} must be a positive number of seconds, at most {MAX_TIMEOUT_S}, got "
                f"{limit_s:g}; leave it out for the default"
            )


def launch_of(args: argparse.Namespace) -> Launch:
    """Return where the stages meet."""
    return Launch(
        backend=args.backend,
        ray_address=args.ray_address or args.from_ray or ("auto" if args.no_auto else None),
        master_addr=args.master_addr,
        master_port=args.master_port,
    )


def deadlines_of(args: argparse.Namespace) -> Deadlines:
    """Return how long things may take."""
    return Deadlines(
        placement_s=args.placement_timeout, load_s=args.load_timeout, step_s=args.step_timeout
    )


def defaults_of(args: argparse.Namespace) -> Defaults:
    """Return what a row gets that says nothing else."""
    return Defaults(
        max_tokens=args.max_tokens or (DEFAULT_NEW_TOKENS if args.plan is None else None),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
