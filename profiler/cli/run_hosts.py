"""`llmpq-profile --ray-address`: every kind on a host that has it, and the links between hosts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from itertools import permutations
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from llmpq.costs.cost_model import CostModel, NodeLinkCost
from llmpq.devices.cluster import Cluster, Device
from llmpq.devices.default_dtype import default_dtype
from llmpq.errors import ExitCode, StageLostError
from llmpq.out_of_memory import first_line
from llmpq.plans.plan import NodePlan, StagePlan
from llmpq.precision import Precision
from llmpq.profiler.cli.flags import ProfileRequest
from llmpq.profiler.cli.run import make_job
from llmpq.profiler.cli.tables import links_table, node_links_table
from llmpq.profiler.timing.cases import LinkJob, LinkTimings, model_spec
from llmpq.profiler.timing.latency_fit import fit_link, fit_rounds
from llmpq.runtime.launch.nodes.node_match import RayNode, WantedNode
from llmpq.runtime.launch.on_ray.actor_class import actor_class
from llmpq.runtime.launch.on_ray.connect import ray_cluster
from llmpq.runtime.launch.on_ray.node_questions import ask_nodes
from llmpq.runtime.launch.on_ray.placement import wait_for_nodes
from llmpq.runtime.launch.on_ray.ray_stage import failure_of
from llmpq.runtime.launch.stages.stage_host import addresses_of
from llmpq.runtime.launch.stages.stage_place import interfaces

_LINK_S = 300.0
"""How long a pair of hosts may take: their largest messages take seconds where networks are slow.
"""

log = logging.getLogger(__name__)
HostWorker = actor_class(
    "llmpq.profiler.timing.host_actor", "HostWorker", ("profile", "address", "port", "link")
)


def main(request: ProfileRequest) -> int:
    """Profile all hosts of a cluster and write one costs.json; exit 8 if something was left out."""
    if request.cluster is None:
        raise ValueError("--ray-address times the hosts of a cluster file: give --cluster YAML")
    cluster, spec = Cluster.load(request.cluster), model_spec(request.model)
    if request.samples is not None:
        raise ValueError("--samples names a file of one host; leave it out with --ray-address")
    request = replace(request, dtype=request.dtype or default_dtype(spec, cluster))
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(request.ray_address))
        nodes = wait_for_nodes(
            [_wanted(cluster, n.name) for n in cluster.nodes], request.wait_nodes
        )
        _require_alike(request, cluster, nodes)
        actors = {name: _actor(node, stack) for name, node in nodes.items()}
        networks = interfaces(request.network_interface, nodes)
        own = {
            name: _answer(
                actor.address.remote(networks[name], nodes[name].address),
                nodes[name],
                "said where it is reached",
            )
            for name, actor in actors.items()
        }
        found = _profile(request, cluster, nodes, actors)
        costs = reduce(
            CostModel.merged,
            [CostModel.parse_data(json.loads(f["costs"]), where="costs") for f in found],
        )
        seconds = 2.0 if request.quick else 20.0
        links = _links(cluster, nodes, own, actors, spec.hidden, seconds)
    costs = costs.model_copy(update={"node_links": tuple(links)})
    costs.save_json(request.output)
    console = Console()
    if costs.links:
        console.print(links_table(costs))
    console.print(node_links_table(costs))
    failed = [title for f in found for title in f["failed"]]
    for title in failed:
        log.warning("not measured: %s", title)
    log.info("wrote %s: %s", request.output, ", ".join(costs.device_kinds))
    return ExitCode.SOME_ROWS_FAILED if failed else ExitCode.DONE


def hosts_of_kinds(devices: Sequence[Device], wanted: str | None) -> dict[str, list[str]]:
    """Return which kinds each node times: every kind once, where most others are, too."""
    kinds_of: dict[str, set[str]] = {}
    for device in devices:
        if wanted is None or wanted in (device.kind, device.profile_kind):
            kinds_of.setdefault(device.node, set()).add(device.profile_kind)
    left = set().union(*kinds_of.values()) if kinds_of else set()
    found: dict[str, list[str]] = {}
    while left:
        node = max(kinds_of, key=lambda name: len(kinds_of[name] & left))
        found[node] = sorted(kinds_of[node] & left)
        left -= kinds_of[node]
    return found


def _wanted(cluster: Cluster, name: str) -> WantedNode:
    """Return a node of the cluster as if it had a stage on each device."""
    node = next(node for node in cluster.nodes if node.name == name)
    stages = tuple(
        StagePlan(
            device=device.name,
            node=name,
            kind=device.kind,
            profile_kind=device.profile_kind,
            threads=device.threads,
            layers=(index, index + 1),
            precisions=(Precision.W16A16,),
        )
        for index, device in enumerate(cluster.devices)
        if device.node == name
    )
    return WantedNode(
        node=NodePlan(name=name, host=node.host, labels=node.labels, model_dir=node.model_dir),
        addresses=frozenset() if node.host is None else addresses_of(node.host),
        stages=stages,
    )


def _require_alike(request: ProfileRequest, cluster: Cluster, nodes: Mapping[str, RayNode]) -> None:
    """Refuse hosts of other versions or another model: their times would be others'."""
    on_disk = request.model if Path(request.model).exists() else None
    models = [next(n.model_dir for n in cluster.nodes if n.name == name) for name in nodes]
    ask_nodes(list(nodes.values()), [model or on_disk for model in models], on_disk)


def _actor(node: RayNode, stack: ExitStack) -> Any:
    actor = (
        ray.remote(HostWorker)
        .options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        .remote()
    )
    stack.callback(ray.kill, actor)
    return actor


def _profile(
    request: ProfileRequest,
    cluster: Cluster,
    nodes: Mapping[str, RayNode],
    actors: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Time every kind on one host that has it, hosts at once; return costs and what failed."""
    asked = {}
    for name, kinds in hosts_of_kinds(cluster.devices, request.device).items():
        node = next(node for node in cluster.nodes if node.name == name)
        own = replace(request, model=node.model_dir or request.model)
        log.info("%s times %s", nodes[name].shown(), ", ".join(kinds))
        job = _job_of(own, cluster, name, kinds)
        asked[name] = actors[name].profile.remote(job)
    return [_answer(ref, nodes[name], "timed its devices") for name, ref in asked.items()]


def _job_of(request: ProfileRequest, cluster: Cluster, name: str, kinds: Sequence[str]) -> Any:
    """Return what a node times: the conditions are the whole cluster's, the devices its own."""
    own = {d.profile_kind: d for d in reversed(cluster.devices) if d.node == name}
    job = make_job(request, cluster, devices=tuple(own[kind] for kind in kinds))
    return replace(job, links=len(kinds) > 1 or job.links)


def _links(
    cluster: Cluster,
    nodes: Mapping[str, RayNode],
    own: Mapping[str, str],
    actors: Mapping[str, Any],
    hidden: int,
    seconds: float,
) -> list[NodeLinkCost]:
    """Measure the link of every two nodes in both directions, one after the other.

    `own`: the address at which each is reached.
    """
    found = []
    on_gpu = {d.node for d in cluster.devices if not d.spec.is_cpu}
    for source, target in permutations(nodes, 2):
        here = own[source]
        port = _answer(actors[source].port.remote(here), nodes[source], "given a port")
        ends = []
        for rank, name in enumerate((source, target)):
            job = LinkJob.model_validate(
                {
                    "rank": rank,
                    "port": port,
                    "hidden": hidden,
                    "seconds": seconds,
                    "host": here,
                    "own": own[name],
                    "on_device": {source, target} <= on_gpu,
                }
            )
            ends.append(actors[name].link.remote(job.model_dump()))
        answers = [
            _answer(ref, nodes[name], "measured its links", limit_s=_LINK_S)
            for ref, name in zip(ends, (source, target), strict=True)
        ]
        timings = LinkTimings.model_validate(answers[0])
        if timings.rounds_s:
            alpha_s, beta_s_per_byte, occupied_s = fit_rounds(
                timings.sizes, timings.rounds_s, timings.burst_s
            )
        else:  # from GPU to GPU: messages are only enqueued
            alpha_s, beta_s_per_byte = fit_link(timings.sizes, timings.seconds)
            occupied_s = 0.0
        found.append(
            NodeLinkCost(
                source=source,
                target=target,
                alpha_s=alpha_s,
                occupied_s=occupied_s,
                beta_s_per_byte=beta_s_per_byte,
            )
        )
    return found


def _answer(ref: Any, node: RayNode, doing: str, *, limit_s: float | None = None) -> Any:
    """Return a host's answer; `StageLostError` names the host that has not given one."""
    try:
        return ray.get(ref, timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        reason = f"no answer within {limit_s:.0f} s"
    except ray.exceptions.RayError as error:
        failure = failure_of(error)
        if isinstance(failure.cause, ValueError):  # what was asked for is not there
            raise ValueError(f"{node.shown()}: {first_line(failure.cause)}") from None
        reason = str(failure)
    raise StageLostError(
        f"{node.shown()} has not {doing}: {reason}; look at the host and the network (all ports "
        "must be open between the hosts) and run it again, samples taken so far are on disk"
    )
