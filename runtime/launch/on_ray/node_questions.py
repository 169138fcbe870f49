"""Asks the Ray nodes of a plan what they have, before a stage loads there."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llmpq.errors import StageLostError
from llmpq.runtime.launch.nodes import node_report
from llmpq.runtime.launch.nodes.node_match import RayNode
from llmpq.runtime.launch.on_ray.ray_stage import failure_of
from llmpq.runtime.options.stage_settings import StageSettings

ANSWER_S = 60.0
"""How long a node may take to answer: it starts a process for it, if none is idle."""


def require_same(nodes: Sequence[RayNode], settings: Sequence[StageSettings]) -> None:
    """Refuse nodes, one per stage, with other versions or another model than this host's.

    `PlanMismatchError`, `ValueError` and `StageLostError` name the node.
    """
    folders = [
        None if own.options.load_format != "auto" or own.options.copy_weights else own.model_dir
        for own in settings
    ]
    ask_nodes(nodes, folders, settings[0].driver_model_dir)


def ask_nodes(
    nodes: Sequence[RayNode], models: Sequence[str | None], driver_model: str | None
) -> None:
    """Refuse nodes as `require_same` does; `models`: what each reads, None: nothing there."""
    folders = dict(zip([node.id for node in nodes], models, strict=True))
    # By value: a node's llmpq may be another one, or none.
    ray.cloudpickle.register_pickle_by_value(node_report)
    task = ray.remote(node_report.report)
    asked = [
        task.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(folder)
        for node_id, folder in folders.items()
    ]
    names = {node.id: f"{node.hostname} ({node.address})" for node in nodes}
    done, late = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
    if late:
        silent = [names[node] for node, ref in zip(folders, asked, strict=True) if ref in late]
        raise StageLostError(
            f"no answer from node {' and '.join(silent)} within {ANSWER_S:.0f} s; look at its "
            "load, and at it with: ray status"
        )
    try:
        answers = [ray.get(ref) for ref in asked]
    except ray.exceptions.RayError as error:
        raise StageLostError(
            f"a node could not say what it has: {failure_of(error)}; look at it with: ray status"
        ) from None
    there = [(names[node], answer) for node, answer in zip(folders, answers, strict=True)]
    node_report.require_alike(node_report.report(driver_model), there)
