"""`llmpq-dist check plan.json`: the preflight. Looks at every stage's place, loads nothing.

Per stage: host, versions, device, free memory against the plan's, the model's files; between
stages: every link, device links included. Every problem is one line that says what to do.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from llmpq.checkpoints.hub import local_model
from llmpq.child import CallFailed
from llmpq.devices.cluster import Cluster
from llmpq.errors import DeadlineError, ExitCode, StageLostError
from llmpq.plans.plan import Plan, StagePlan
from llmpq.plans.plan_nodes import nodes_of
from llmpq.runtime.cli.plan_file import load_engines
from llmpq.runtime.cli.run_flags import check_timeouts
from llmpq.runtime.cli.tool_flags import CheckOptions
from llmpq.runtime.launch.nodes.node_report import differing, versions_of
from llmpq.runtime.launch.plans.auto_plan import devices_of
from llmpq.runtime.launch.probes import stage_probes
from llmpq.runtime.launch.stages.launcher import StageHandle
from llmpq.runtime.launch.stages.stage_host import meeting_host
from llmpq.units import format_size

_log = logging.getLogger("llmpq.check")


def main(options: CheckOptions) -> int:
    """Look at every stage's place; returns 0 if the plan can run, else the worst outcome's code."""
    check_timeouts({"--timeout": options.timeout})
    engine = options.engine
    plans = load_engines(options.plan).plans
    cluster = None
    if engine.cluster is not None:
        cluster = devices_of(engine)
        plans[0].require_cluster(cluster.name, cluster.fingerprint())
    looks = []
    for plan in plans:
        with stage_probes(plan, cluster, engine.ray_address, engine.deadlines) as (probes, hosts):
            looks.append(look(plan, cluster, probes, hosts, options))
    problems = judge_engines(plans, looks)
    if options.json:
        every: list[dict[str, Any]] = [
            {"places": places, "links": links} for places, links in looks
        ]
        found = every[0]
        if len(plans) > 1:
            found = {"engines": [{"engine": number, **one} for number, one in enumerate(every)]}
        found["problems"] = [text for _, text in problems]
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        for number, (plan, (places, links)) in enumerate(zip(plans, looks, strict=True)):
            show(plan, places, links, console, engine=number if len(plans) > 1 else None)
    for _, text in problems:
        sys.stderr.write(f"{text}\n")
    if problems:
        return max((code for code, _ in problems), key=_SEVERITY.index)
    _log.info("the plan can run here")
    return ExitCode.DONE


_SEVERITY = (ExitCode.USAGE, ExitCode.DOES_NOT_FIT, ExitCode.MISMATCH, ExitCode.STAGE_LOST)


Look = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Places and links of an engine."""


def look(
    plan: Plan,
    cluster: Cluster | None,
    probes: Sequence[StageHandle],
    addresses: Sequence[str],
    options: CheckOptions,
) -> Look:
    """Ask one probe per stage; return places and links."""
    directories = [_directory(plan, cluster, index, options.model) for index in range(len(probes))]
    looks = [probe.call("look", path) for probe, path in zip(probes, directories, strict=True)]
    places = _all(plan, looks, "looking at its host", options.timeout)
    if len(probes) == 1:
        return places, []
    host = meeting_host(options.engine.master_addr, addresses)
    (port,) = _all(
        plan, [probes[0].call("open_rendezvous", host)], "opening the rendezvous", options.timeout
    )
    tries = [
        probe.call("try_links", host, port, own)
        for probe, own in zip(probes, addresses, strict=True)
    ]
    return places, _all(plan, tries, "trying its links", options.timeout)


def _directory(plan: Plan, cluster: Cluster | None, index: int, model: str | None) -> str | None:
    """Return where a stage's node keeps the model."""
    for node in nodes_of(plan, cluster):
        if node.name == plan.places[index].node and node.model_dir is not None:
            return node.model_dir
    path = model or plan.model.path
    return None if path is None else str(local_model(path))


def _all(plan: Plan, calls: Sequence[Future[Any]], doing: str, limit_s: float) -> list[Any]:
    _, waiting = wait(calls, limit_s)
    if waiting:
        names = ", ".join(plan.places[calls.index(call)].device for call in waiting)
        raise DeadlineError(
            f"no answer from {names} while {doing} within {limit_s:.0f} s; look at its host and "
            "firewall, or raise --timeout"
        )
    try:
        return [call.result() for call in calls]
    except CallFailed as failure:
        raise StageLostError(
            f"a stage's place was lost while {doing}: {failure}; look at its host"
        ) from None


def judge_engines(plans: Sequence[Plan], looks: Sequence[Look]) -> list[tuple[ExitCode, str]]:
    """Return what `judge` does, of engines that run side by side and share their hosts' memory."""
    stages = [stage for plan in plans for stage in plan.places]
    needs = iter(_needs(stages, [place for places, _ in looks for place in places]))
    return [
        problem
        for plan, (places, links) in zip(plans, looks, strict=True)
        for problem in judge(plan, places, links, list(islice(needs, len(places))))
    ]


def judge(
    plan: Plan,
    places: Sequence[Mapping[str, Any]],
    links: Sequence[Mapping[str, Any]],
    needs: Sequence[int] | None = None,
) -> list[tuple[ExitCode, str]]:
    """Return every reason why the plan cannot run as it is, with its exit code.

    `needs`: bytes asked of each place, where other engines share them.
    """
    problems = []
    needs = _needs(plan.places, places) if needs is None else needs
    for stage, place, need in zip(plan.places, places, needs, strict=True):
        where = f"stage {stage.device} on {stage.node} ({place['host']})"
        if place["kind"] != stage.kind and not stage.is_cpu:
            problems.append(
                (
                    ExitCode.MISMATCH,
                    f"{where}: planned for {stage.kind}, found {place['gpu'] or place['kind']}; "
                    "re-plan with llmpq-algo --cluster",
                )
            )
        if place["model_problem"] is not None:
            problems.append((ExitCode.USAGE, f"{where}: {place['model_problem']}"))
        elif place["model_fingerprint"] != plan.model.fingerprint:
            problems.append(
                (
                    ExitCode.MISMATCH,
                    f"{where}: its model is {place['model_fingerprint']}, the plan was made for "
                    f"{plan.model.fingerprint} ({plan.model.name}); copy the right one there",
                )
            )
        if 0 < place["free_bytes"] < need:
            problems.append(
                (
                    ExitCode.DOES_NOT_FIT,
                    f"{where}: {format_size(place['free_bytes'])} free, the plan needs "
                    f"{format_size(need)} there; free some, or re-plan with a larger reserve",
                )
            )
    problems += [(ExitCode.MISMATCH, text) for text in differing_versions(plan, places)]
    for index, link in enumerate(links):
        if link["problem"] is not None:
            after = plan.places[(index + 1) % len(plan.places)].device
            problems.append(
                (
                    ExitCode.STAGE_LOST,
                    f"link {plan.places[index].device} -> {after}: {link['problem']}; open the "
                    "firewall between the hosts or give --master-addr",
                )
            )
    return problems


def _needs(stages: Sequence[StagePlan], places: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the bytes each stage asks of its place, CPU stages of one host through the first."""
    needs = [stage.memory.least_bytes if stage.memory is not None else 0 for stage in stages]
    first_of: dict[str, int] = {}
    for index, (stage, place) in enumerate(zip(stages, places, strict=True)):
        first = first_of.setdefault(place["host"], index) if stage.is_cpu else index
        if first != index:
            needs[first] += needs[index]
            needs[index] = 0
    return needs


def differing_versions(plan: Plan, places: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for every package whose version differs from the first stage's."""
    first, lines = places[0], []
    for stage, place in zip(plan.places[1:], places[1:], strict=True):
        for name, wanted, got in differing(versions_of(first), versions_of(place)):
            lines.append(
                f"stage {stage.device} on {stage.node}: {name} {got}, the first stage has "
                f"{wanted}; install the same version on every node"
            )
    return lines


def show(
    plan: Plan,
    places: Sequence[Mapping[str, Any]],
    links: Sequence[Mapping[str, Any]],
    console: Console,
    *,
    engine: int | None = None,
) -> None:
    """Print the table of places; `engine`: which, of a plan of several."""
    of = "" if engine is None else f", engine {engine}"
    stages = "1 stage" if len(places) == 1 else f"{len(places)} stages"
    table = Table(title=f"plan of {plan.model.name}{of}, {stages}", title_justify="left")
    for column in ("stage", "node", "host", "device", "needs", "free", "torch", "next link"):
        table.add_column(column)
    for index, (stage, place) in enumerate(zip(plan.places, places, strict=True)):
        need = format_size(stage.memory.least_bytes) if stage.memory is not None else "-"
        table.add_row(
            stage.device,
            stage.node,
            place["host"],
            place["gpu"] or place["kind"],
            need,
            format_size(place["free_bytes"]),
            place["packages"].get("torch", "-"),
            _link(links[index]) if links else "-",
        )
    console.print(table)


def _link(link: Mapping[str, Any]) -> str:
    if link["problem"] is not None:
        return "broken"
    between = {None: "", "none": ", GPUs: none"}.get(link["device"], f", GPUs: {link['device']}")
    return f"{link['gloo_us']:.0f} us{between}"
