"""`llmpq-dist serve --ray-serve`: a plan for every replica, made before anything is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.cluster import Cluster
from llmpq.devices.this_machine import read_gpus, this_machine, visible
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.serve_flags import ServeOptions, engine_options
from llmpq.runtime.launch.plans.planned_kv import AUTO
from llmpq.runtime.plan_choice import Chosen, Wishes, choose_plan
from llmpq.runtime.serve.replicas.device_shares import gpus_of_copies, shares_of
from llmpq.runtime.serve.replicas.replica_server import ReplicaLaunch


def launches_of(options: ServeOptions) -> list[ReplicaLaunch]:
    """Return how each replica is started; `ValueError` where the devices are too few."""
    plans = _copies(options) if options.plan is not None else _planned(options)
    speeds = [None if one.plan.predicted is None else one.plan.predicted.output_tokens_per_s
              for one, _ in plans]  # fmt: skip
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
    wishes = replace(_wishes(options), max_num_seqs=None, dtype=AUTO)
    chosen = choose_plan(options.model, plan, options.cluster, wishes)
    gpus = gpus_of_copies(plan, options.replicas, len(visible(read_gpus())))
    return [(chosen, own) for own in gpus]


def _wishes(options: ServeOptions) -> Wishes:
    engine = engine_options(options)
    return Wishes(
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_pool=engine["kv_pool"],
        speculate=engine["speculate"],
        prefer=options.prefer,
    )


def _planned(options: ServeOptions) -> list[tuple[Chosen, tuple[int, ...]]]:
    """Plan for each share; equal shares are planned once."""
    cluster = this_machine() if options.cluster is None else Cluster.load(options.cluster)
    wishes = _wishes(options)
    made: dict[str, Chosen] = {}
    found = []
    for share in shares_of(cluster, options.replicas):
        key = share.cluster.dump_json()
        if key not in made:
            made[key] = choose_plan(options.model, None, share.cluster, wishes)
        found.append((made[key], share.gpus))
    return found


def _engine(options: ServeOptions, chosen: Chosen) -> dict[str, Any]:
    """Return what a replica's `LLM` is given; a plan of slots says itself how long requests are."""
    given = {**engine_options(options), "plan": chosen.plan.dump_json()}
    if chosen.pooled:
        given["max_model_len"] = options.max_model_len
    return given
