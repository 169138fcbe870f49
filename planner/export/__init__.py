"""A plan as other engines' settings, with what they cannot express said; one file per engine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable

from llmpq.file_form import save_text
from llmpq.models.model_spec import ModelSpec
from llmpq.pictures.plan_cards import cards_svg
from llmpq.planner.export.accelerate import accelerate
from llmpq.planner.export.compressed_tensors import compressed_tensors
from llmpq.planner.export.gptqmodel import gptqmodel
from llmpq.planner.export.llamacpp import llamacpp
from llmpq.planner.export.result import Exported
from llmpq.planner.export.sglang import sglang
from llmpq.planner.export.vllm import vllm
from llmpq.planner.problem.named_inputs import model_of_plan
from llmpq.planner.problem.requests import ExportRequest
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology, read_plan

WRITERS: dict[str, Callable[[Plan, ModelSpec], Exported]] = {
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "accelerate": accelerate,
    "compressed-tensors": compressed_tensors,
    "gptqmodel": gptqmodel,
    "svg": lambda plan, spec: Exported(text=cards_svg(plan), not_expressed=()),
}


def export_plan(request: ExportRequest) -> None:
    """Write a plan for an engine to `-o` or stdout; the rest goes to stderr, a line each."""
    plan = read_plan(request.plan)
    shared = [stage.device for stage in plan.stages if stage.devices]
    if shared and request.to not in SHARES:
        raise ValueError(
            f"stage {shared[0]} is shared by several devices (tensor parallel), which --to "
            f"{request.to} cannot say; export to {', '.join(SHARES[:-1])} or {SHARES[-1]}, or plan "
            "with --tensor-parallel 1"
        )
    if isinstance(plan, Topology):
        exported = _engines(request, plan)
    else:
        exported = WRITERS[request.to](plan, model_of_plan(request, plan))
    if request.output:
        save_text(request.output, exported.text)
    else:
        sys.stdout.write(exported.text)
    for line in exported.warnings:
        sys.stderr.write(f"warning: {line}\n")
    for line in exported.not_expressed:
        sys.stderr.write(f"not expressed: {line}\n")


FIRST_PORT = 8000
SERVERS = ("vllm", "sglang", "llamacpp")
"""Engines whose settings end in a command of a server."""
CHECKPOINTS = ("compressed-tensors", "gptqmodel")
"""What is written once for all engines, where they have the same precisions."""


SHARES = (*SERVERS, *CHECKPOINTS)
"""What may be written of plans whose stages several devices share."""


def _engines(request: ExportRequest, topology: Topology) -> Exported:
    """Return a plan of several engines: a server for each, or the checkpoint that all serve."""
    plans, count = topology.plans, len(topology.engines)
    write, spec = WRITERS[request.to], model_of_plan(request, plans[0])
    if request.to in CHECKPOINTS and len({plan.precisions for plan in plans}) == 1:
        return write(plans[0], spec)
    if request.to not in SERVERS:
        raise ValueError(
            f"--to {request.to} writes one engine's plan, this one has {count}"
            + (" with different precisions" if request.to in CHECKPOINTS else "")
            + f"; plan with llmpq-algo --engines 1, or export with --to {' or '.join(SERVERS)}"
        )
    nodes = [_node_of(plan, number, request.to) for number, plan in enumerate(plans)]
    each = [_one_of(plan, number, spec, request.to) for number, plan in enumerate(plans)]
    files = each[0].files
    if any(one.files != files for one in each):
        raise ValueError(
            f"--to {request.to} makes one file of a plan's precisions, engines of this one have "
            "different ones; plan with --bits for all, or export with --to vllm or sglang"
        )
    ports = range(FIRST_PORT, FIRST_PORT + count)
    lines = [*files] if len(set(nodes)) == 1 else []
    lines += [
        f"# {count} engines, a server each; a load balancer sends them these shares of requests:"
    ]
    blocks: dict[str, list[str]] = {node: [] for node in nodes}
    parts = request_shares(topology)
    for number, (one, part, port) in enumerate(zip(each, parts, ports, strict=True)):
        own = [line for line in one.text.rstrip().splitlines() if line not in files]
        blocks[nodes[number]] += [
            f"# engine {number}, port {port}: {part:.1%}",
            "(",
            "\n".join(own) + f" --port {port}",
            ") &",
        ]
    if len(blocks) == 1:
        lines += [*blocks[nodes[0]], "wait"]
    else:
        lines += ["# on every node: sh THIS-FILE NODE", 'case "$1" in']
        for node, block in blocks.items():
            lines += [f"{shlex.quote(node)})", *files, *block, "wait ;;"]
        wrong = shlex.quote(f"expected one of the nodes {', '.join(blocks)}")
        lines += [f"*) echo {wrong} >&2; exit 2 ;;", "esac"]
    missing = dict.fromkeys(
        ["dealing rows to engines of unequal speed: each command is a server of its own"]
        + [line for one in each for line in one.not_expressed]
    )
    return Exported(
        text="\n".join([*lines, ""]),
        not_expressed=tuple(missing),
        warnings=tuple(dict.fromkeys(line for one in each for line in one.warnings)),
    )


def _one_of(plan: Plan, number: int, spec: ModelSpec, to: str) -> Exported:
    """Return what is written of an engine; `ValueError` says which one cannot be."""
    try:
        return WRITERS[to](plan, spec)
    except ValueError as error:
        raise ValueError(f"engine {number} of the plan: {error}") from None


def request_shares(topology: Topology) -> list[float]:
    """Return the share of the requests of each engine: its rows, or under live traffic its speed.

    Of live traffic rows are those at once, of a slow engine as many as of a quick one.
    """
    speeds = [share.tokens_per_s for share in topology.engines if share.plan.traffic]
    known = [speed for speed in speeds if speed]
    each = known if len(known) == len(topology.engines) else [s.rows for s in topology.engines]
    return [one / sum(each) for one in each]


def _node_of(plan: Plan, number: int, to: str) -> str:
    """Return the node of an engine; `ValueError` where it is on several."""
    nodes = list(dict.fromkeys(stage.node for stage in plan.stages))
    if len(nodes) > 1:
        raise ValueError(
            f"--to {to} writes servers of one machine each, the plan's engine {number} is on "
            f"{len(nodes)} nodes ({', '.join(nodes)}); plan with llmpq-algo --engines 1, or run "
            "the plan with llmpq-dist"
        )
    return nodes[0]
