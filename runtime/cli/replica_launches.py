"""A plan for every engine behind one port, made before anything is started.

`llmpq-dist serve --replicas N` plans for shares of the devices, or copies a plan; a plan of several
engines says what each has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.devices.this_machine import read_gpus, visible
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.runtime.cli.plan_file import load_engines
from llmpq.runtime.cli.serve_flags import ServeOptions
from llmpq.runtime.launch.plans.auto_plan import devices_of
from llmpq.runtime.launch.plans.plan_choice import Chosen, choose_plan
from llmpq.runtime.options.engine_options import PLANNING, EngineOptions
from llmpq.runtime.serve.replicas.device_shares import gpus_of_copies, shares_of
from llmpq.runtime.serve.replicas.replica_server import ReplicaLaunch


def launches_of(options: ServeOptions) -> list[ReplicaLaunch]:
    """Return how each replica is started; `ValueError` where the devices are too few."""
    plan = None if options.plan is None else load_engines(str(options.plan))
    if isinstance(plan, Topology):
        plans = _engines(options, plan)
    else:
        plans = _planned(options) if plan is None else _copies(options, plan)
    speeds = [
        None if one.plan.predicted is None else one.plan.predicted.output_tokens_per_s
        for one, _ in plans
    ]
    known = [speed for speed in speeds if speed]
    return [
        ReplicaLaunch(
            model=str(chosen.directory),
            engine=_engine(options, chosen),
            gpus=gpus,
            speed=speed if speed and len(known) == len(plans) else 1.0,
        )
        for (chosen, gpus), speed in zip(plans, speeds, strict=True)
    ]


def _engines(options: ServeOptions, topology: Topology) -> list[tuple[Chosen, tuple[int, ...]]]:
    """Return each engine of a plan, and its GPUs; through a Ray, which gives them, none."""
    if options.engine.ray_address is not None:
        return [(choose_plan(options.model, plan, options.engine), ()) for plan in topology.plans]
    nodes = sorted({stage.node for stage in topology.stages})
    if len(nodes) > 1:
        raise ValueError(
            f"the plan's engines are on {len(nodes)} nodes ({', '.join(nodes)}): give the Ray that "
            "joins them with --ray-address HOST:PORT"
        )
    if options.engine.backend == "ray":
        raise ValueError(
            f"--backend ray: the plan has {len(topology.engines)} engines, each a process of its "
            "own; give the Ray that they are to join with --ray-address HOST:PORT, or leave it out"
        )
    most = max((s.device_index for s in topology.places if not s.is_cpu), default=-1) + 1
    seen = len(visible(read_gpus()))
    if most > seen:
        raise ValueError(
            f"the plan's engines are on {most} GPUs, this machine has {seen}; plan for its devices"
        )
    found = []
    for plan in topology.plans:
        gpus = tuple(sorted(s.device_index for s in plan.places if not s.is_cpu))
        stages = tuple(
            s if s.is_cpu else s.model_copy(update={"device_index": gpus.index(s.device_index)})
            for s in plan.stages
        )
        own = plan.model_copy(update={"stages": stages})
        found.append((choose_plan(options.model, own, options.engine), gpus))
    return found


def _copies(options: ServeOptions, plan: Plan) -> list[tuple[Chosen, tuple[int, ...]]]:
    chosen = choose_plan(options.model, plan, options.engine)
    gpus = gpus_of_copies(plan, options.replicas, len(visible(read_gpus())))
    return [(chosen, own) for own in gpus]


def _planned(options: ServeOptions) -> list[tuple[Chosen, tuple[int, ...]]]:
    """Plan for each share; equal shares are planned once."""
    engine, made = options.engine, dict[str, Chosen]()
    found = []
    for share in shares_of(devices_of(engine), options.replicas):
        key = share.cluster.dump_json()
        if key not in made:
            made[key] = choose_plan(options.model, None, replace(engine, cluster=share.cluster))
        found.append((made[key], share.gpus))
    return found


def _engine(options: ServeOptions, chosen: Chosen) -> dict[str, Any]:
    """Return what a replica's `LLM` gets, as JSON data: the plan, and options but what made it.

    Through a Ray also the cluster, which says how the nodes are found.
    """
    given = options.engine.given()
    found_here = () if options.engine.ray_address is not None else ("cluster",)
    for name in ("revision", *found_here, *PLANNING):
        given.pop(name, None)
    return {"plan": chosen.plan.dump_json(), "options": EngineOptions(**given).to_data()}
