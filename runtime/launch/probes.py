"""Starts what looks at hosts before anything is loaded: a probe per stage, or a survey per node.

On this machine they are child processes, at a Ray's address actors of it. Both are called alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from llmpq.child import Child
from llmpq.commands.ray_address import import_ray
from llmpq.devices.cluster import Cluster
from llmpq.plans.plan import Plan
from llmpq.runtime.launch.nodes.local_node import all_here, this_node, wanted_nodes
from llmpq.runtime.launch.process_launcher import environment_of
from llmpq.runtime.launch.stages.fork_server import STAGE_PROCESS
from llmpq.runtime.launch.stages.launcher import StageHandle
from llmpq.runtime.launch.stages.stage_host import LOCAL_HOST
from llmpq.runtime.options.engine_options import Deadlines

Probes = tuple[Sequence[StageHandle], Sequence[str]]
"""What can be called, and the address that the others reach each at."""
PROBE_CALLS = ("look", "open_rendezvous", "try_links")
SURVEY_CALLS = ("look", "try_gpus", "try_copies", "open_rendezvous", "try_links")


@contextmanager
def stage_probes(
    plan: Plan, cluster: Cluster | None, ray_address: str | None, deadlines: Deadlines
) -> Iterator[Probes]:
    """Yield a `StageProbe` at every stage's place; errors are those of starting the stages."""
    num_stages = len(plan.places)
    arguments = [(index, num_stages, not stage.is_cpu) for index, stage in enumerate(plan.places)]
    with ExitStack() as stack:
        if ray_address is None:
            all_here(wanted_nodes(plan, cluster), this_node())
            names = ("index", "num_stages", "on_gpu")
            children = [
                _child(stack, {"probe": dict(zip(names, own, strict=True))}, environment_of(stage))
                for own, stage in zip(arguments, plan.places, strict=True)
            ]
            yield children, [LOCAL_HOST] * num_stages
            return
        import_ray(ray_address)
        import ray

        from llmpq.runtime.launch.on_ray.actor_class import actor_class
        from llmpq.runtime.launch.on_ray.connect import ray_cluster
        from llmpq.runtime.launch.on_ray.placement import give_back, reserve
        from llmpq.runtime.launch.on_ray.ray_stage import RayStage

        stack.enter_context(ray_cluster(ray_address))
        placed = reserve(
            plan,
            cluster,
            joined=True,
            wait_s=deadlines.wait_nodes_s,
            timeout_s=deadlines.placement_s,
        )
        stack.callback(give_back, [one.group for one in placed.values()])
        probe = ray.remote(
            actor_class("llmpq.runtime.launch.stages.stage_probe", "StageProbe", PROBE_CALLS)
        )
        actors: list[StageHandle] = []
        for own, stage in zip(arguments, plan.places, strict=True):
            actor = RayStage(probe.options(**placed[own[0]].options(stage)).remote(*own))
            stack.callback(actor.kill)
            actors.append(actor)
        yield actors, [placed[index].node.address for index in range(num_stages)]


@contextmanager
def node_surveys(ray_address: str | None) -> Iterator[Probes]:
    """Yield a `NodeSurvey` per node of a Ray, or of this machine; two where there is one node."""
    with ExitStack() as stack:
        if ray_address is None:
            yield (
                [_child(stack, {"survey": {"index": i, "num_nodes": 2}}) for i in range(2)],
                [LOCAL_HOST] * 2,
            )
            return
        import_ray(ray_address)
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from llmpq.runtime.launch.on_ray.actor_class import actor_class
        from llmpq.runtime.launch.on_ray.connect import ray_cluster
        from llmpq.runtime.launch.on_ray.ray_stage import RayStage

        stack.enter_context(ray_cluster(ray_address))
        nodes = [node for node in ray.nodes() if node["Alive"]]
        places = nodes if len(nodes) > 1 else nodes * 2
        survey = ray.remote(
            actor_class("llmpq.runtime.launch.stages.node_survey", "NodeSurvey", SURVEY_CALLS)
        )
        actors: list[StageHandle] = []
        for index, node in enumerate(places):
            options = survey.options(
                num_cpus=0,
                max_concurrency=2,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            actor = RayStage(options.remote(index, len(places), see_all=True))
            stack.callback(actor.kill)
            actors.append(actor)
        yield actors, [node["NodeManagerAddress"] for node in places]


def _child(
    stack: ExitStack, first: dict[str, object], environment: dict[str, str] | None = None
) -> Child:
    child = Child(STAGE_PROCESS, first, environment=environment)
    stack.callback(child.wait)
    stack.callback(child.kill)
    return child
