"""The flags of `llmpq-algo`: ours and the paper's, every `--a-b` also as `--a_b`.

Standard library only, so that `--help` is instant.
"""

from __future__ import annotations

import argparse

from llmpq.planner.limits import MAX_BATCH

DTYPES = ("auto", "float16", "bfloat16", "float32")
METHODS = ("exact", "ilp", "heuristic", "adabits", "uniform", "pipeedge", "flexgen", "all")
EXPORTS = ("vllm", "sglang", "llamacpp", "accelerate", "compressed-tensors", "gptqmodel")
DEFAULT_POINTS = 25
"""Points of a front, unless `--pareto-points` says."""
COMMANDS = ("plan", "check", "export", "devices")

DESCRIPTION = """\
Plan which layers of a model run on which device at which precision.

commands (bare flags mean `plan`):
  plan      make a plan (default)
  check     check a plan, by the entries it carries or against a cluster
  export    write a plan as another engine's settings
  devices   list this machine's devices, or every known card
"""

GROUP_SIZES = "weights that share a scale: 128, or 0 for a channel; w4a4 alone also 64 or 32"

EPILOG = """\
exit codes: 0 done, 2 usage or bad input, 3 bad plan, 4 plan for another model or cluster,
5 does not fit, 130 interrupted
example: llmpq-algo --devices 4090,3090:2,cpu --model qwen3-32b --global_bz 8 --s 512 --n 100
"""


def plan_parser() -> argparse.ArgumentParser:
    """Return the parser of `llmpq-algo [plan]`."""
    parser = argparse.ArgumentParser(
        prog="llmpq-algo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _what_to_plan(parser)
    _how_to_choose(parser)
    _how_to_solve(parser)
    _what_to_print(parser)
    return parser


def _what_to_plan(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model, devices, job")
    add_model(group)
    add_cluster(group)
    _flag(
        group,
        "--global-bz",
        "--global-batch-size",
        "--batch",
        type=int,
        default=16,
        help=f"requests in flight, at most {MAX_BATCH:,}",
    )
    _flag(group, "--s", "--prompt-len", type=int, default=512, help="prompt tokens per request")
    _flag(group, "--n", "--gen-len", type=int, default=100, help="tokens to generate per request")
    _flag(
        group,
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto: float32 on a cluster of CPUs, else the model's own",
    )
    _flag(group, "--costs", help="costs.json of llmpq-profile; without it times are estimated")
    _flag(group, "--fit", "--fit-cost-model", action="store_true", help="paper's flag; always on")


def add_model(group: argparse._ArgumentGroup) -> None:
    """Add the ways to name a model."""
    _flag(group, "--model", help="Hugging Face directory, or a known name such as qwen3-32b")
    _flag(group, "--model-name", help="paper's form: opt, with --model-size 30b")
    _flag(group, "--model-size", help="paper's form: 30b")


def add_cluster(group: argparse._ArgumentGroup) -> None:
    """Add the ways to describe devices; without any, this machine's."""
    _flag(
        group, "--devices", help="devices of one machine, such as 4090,3090:2,cpu (default: here)"
    )
    _flag(group, "--cluster", help="cluster YAML: several machines, links, reserves")
    _flag(group, "--device-names", nargs="+", help="paper's form: T4 V100, one node per kind")
    _flag(group, "--device-numbers", nargs="+", type=int, help="paper's form: 3 1")
    _flag(group, "--from-ray", nargs="?", const="auto", help="devices of a running Ray cluster")


def _how_to_choose(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quality and constraints")
    _flag(group, "--omega-file", help="omega.json of llmpq-profile indicator")
    _flag(group, "--theta", type=float, help="seconds one unit of omega is worth (default 1)")
    _flag(group, "--quality-budget", type=float, help="fastest plan with sum omega at most this")
    _flag(group, "--pareto", action="store_true", help="list the front of time and sum omega")
    _flag(group, "--pareto-points", type=int, help=f"points at most (default {DEFAULT_POINTS})")
    _flag(group, "--bits", default=None, help="precisions allowed: 3,4,8,16 or w8a8,w4a16")
    _flag(group, "--kv", "--kv-cache-dtype", default="16", help="KV bits allowed, such as 16,8,4")
    _flag(group, "--reserve", help="memory to leave free on every device, such as 1GiB")
    _flag(group, "--pin", action="append", default=[], metavar="LAYERS=DEVICE", help="0-3=T4-0")
    _flag(group, "--max-devices", type=int, help="use at most this many devices")
    _flag(group, "--group", "--group-size", type=int, default=1, help="layers that share a choice")
    _flag(group, "--prefill-microbatch", type=int, help="fix the prefill micro-batch")
    _flag(group, "--decode-microbatch", type=int, help="fix the decode micro-batch")
    _flag(group, "--symmetric", action="store_true", help="symmetric weight quantisation")
    _flag(group, "--weight-group-size", type=int, default=128, help=GROUP_SIZES)
    _flag(group, "--outliers", type=int, help="w4a4: channels in 8 bits (hidden/32, at most 128)")


def _how_to_solve(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("solving")
    _flag(group, "--method", choices=METHODS, help="default exact; all: side by side")
    _flag(
        group,
        "--shaq-efficient",
        "--llm-pq-efficient",
        "--llm_pq-efficient",
        action="store_true",
        help="paper's flag for --method heuristic",
    )
    _flag(
        group,
        "--objective",
        choices=("makespan", "paper"),
        default="makespan",
        help="makespan: the true pipeline time; paper: its eq. (4)",
    )
    solvers = ("highs", "pulp-highs", "cbc", "gurobi")
    _flag(group, "--solver", choices=solvers, help="of --method ilp (default highs)")
    _flag(
        group,
        "--gap",
        "--ilp-tolerance",
        type=float,
        default=1e-6,
        help="relative gap to prove, 0 to 1",
    )
    _flag(
        group, "--time-limit", "--ilp-time-limit", type=float, default=60.0, help="seconds, or inf"
    )
    _flag(
        group,
        "--speculate",
        metavar="MODE",
        help="add drafts to the plan: auto (if any fit and pay), qspec, w4kv4, planes, kv4, ngram",
    )


def _what_to_print(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    _flag(group, "--output", "-o", help="plan JSON to write")
    _flag(group, "--json", action="store_true", help="print the plan as JSON, nothing else")
    _flag(group, "--explain", action="store_true", help="say why this plan, and how sure it is")
    _flag(
        group,
        "--what-if",
        action="append",
        default=[],
        metavar="CHANGE",
        help="re-plan with +V100, -T4-0 or batch=16 and compare (may repeat)",
    )
    _flag(group, "--debug", action="store_true", help="log what the solver does")


def _flag(group: argparse._ArgumentGroup, *names: str, **options: object) -> None:
    """Add a flag under both of its spellings."""
    spellings = list(names)
    spellings += [n[:2] + n[2:].replace("-", "_") for n in names if n.startswith("--")]
    group.add_argument(*dict.fromkeys(spellings), **options)  # type: ignore[arg-type]


def check_parser() -> argparse.ArgumentParser:
    """Return the parser of `llmpq-algo check`."""
    parser = argparse.ArgumentParser(prog="llmpq-algo check", allow_abbrev=False)
    parser.add_argument("plan", help="plan JSON")
    add_model(parser.add_argument_group("model, if not the plan's own"))
    add_cluster(parser.add_argument_group("devices it should fit, if not those it was made for"))
    return parser


def export_parser() -> argparse.ArgumentParser:
    """Return the parser of `llmpq-algo export`."""
    parser = argparse.ArgumentParser(prog="llmpq-algo export", allow_abbrev=False)
    parser.add_argument("plan", help="plan JSON")
    parser.add_argument("--to", choices=EXPORTS, required=True, help="the engine to write for")
    parser.add_argument("-o", "--output", help="file to write instead of printing")
    add_model(parser.add_argument_group("model, where the plan's own name does not say it"))
    return parser


def devices_parser() -> argparse.ArgumentParser:
    """Return the parser of `llmpq-algo devices`."""
    parser = argparse.ArgumentParser(prog="llmpq-algo devices", allow_abbrev=False)
    parser.add_argument("--known", action="store_true", help="list the table of known cards")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--from-ray", "--from_ray", nargs="?", const="auto", help="ask Ray instead")
    parser.add_argument("--yaml", action="store_true", help="print a cluster YAML to start from")
    return parser
