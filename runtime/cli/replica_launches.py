"""`llmpq-dist serve --replicas N`: a plan for every replica, made before anything is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.devices.this_machine import read_gpus, visible
from llmpq.runtime.auto_plan import devices_of
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.serve_flags import ServeOptions
from llmpq.runtime.options import PLANNING, EngineOptions
from llmpq.runtime.plan_choice import Chosen, choose_plan
from llmpq.runtime.serve.replicas.device_shares import gpus_of_copies, shares_of
from llmpq.runtime.serve.replicas.replica_server import ReplicaLaunch


def launches_of(options: ServeOptions) -> list[ReplicaLaunch]:
    """Return how each replica is started; `ValueError` where the devices are too few."""
    plans = _copies(options) if options.plan is not None else _planned(options)
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


def _copies(options: ServeOptions) -> list[tuple[Chosen, tuple[int, ...]]]:
    plan = load_plan(str(options.plan))
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
    """Return what a replica's `LLM` gets, as JSON data: the plan, and options but what made it."""
    given = options.engine.given()
    for name in ("revision", "cluster", *PLANNING):
        given.pop(name, None)
    return {"plan": chosen.plan.dump_json(), "options": EngineOptions(**given).to_data()}
