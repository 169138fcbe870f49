"""Ray for placement: start it or join it, reserve one bundle per stage, say what is missing.

A bundle that no node can hold stays pending for ever without a word, so every reservation is
checked against the nodes first and has a deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from llmpq.cluster import Cluster
from llmpq.errors import StageLostError
from llmpq.plan import Plan, StagePlan
from llmpq.ray_address import require_ray
from llmpq.runtime.launch.own_ray import joined_ray, own_ray

_CPU_SHARE = 0.001
"""CPU a CPU stage's bundle asks for: a bundle may not be empty, and stages may share cores."""


@contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Join the Ray at `address`, or start one on 127.0.0.1 that ends with the block.

    A Ray this process has joined before is used and left running.
    """
    if ray.is_initialized():
        yield
        return
    if address is not None:
        try:
            require_ray(address)
        except ValueError as error:
            raise StageLostError(str(error)) from None
    with own_ray() if address is None else joined_ray(address):
        yield


def bundle_of(stage: StagePlan) -> dict[str, float]:
    """Return the resources of a stage's bundle: a GPU, or a token share of a CPU."""
    if stage.is_cpu:
        return {"CPU": _CPU_SHARE}
    return {"GPU": 1, "CPU": _CPU_SHARE}


def reserve(plan: Plan, cluster: Cluster | None, *, timeout_s: float) -> PlacementGroup:
    """Reserve one bundle per stage, in stage order; `StageLostError` names what is missing."""
    bundles = [bundle_of(stage) for stage in plan.stages]
    selectors = [_labels(cluster, stage) for stage in plan.stages]
    _check_resources(plan, selectors)
    group = placement_group(
        bundles, strategy="PACK", bundle_label_selector=selectors if any(selectors) else None
    )
    if not group.wait(timeout_seconds=timeout_s):
        remove_placement_group(group)
        raise StageLostError(
            f"the {len(bundles)} stages could not be placed within {timeout_s:.0f} s: "
            f"{_wanted(plan, selectors)}; {_offered()}. Add nodes, free resources "
            "or re-plan with llmpq-algo --cluster"
        )
    return group


def _labels(cluster: Cluster | None, stage: StagePlan) -> dict[str, str]:
    if cluster is None:
        return {}
    for node in cluster.nodes:
        if node.name == stage.node:
            return dict(node.labels)
    return {}


def _check_resources(plan: Plan, selectors: Sequence[Mapping[str, str]]) -> None:
    """Refuse at once what the cluster as a whole does not have."""
    gpus_wanted = sum(not stage.is_cpu for stage in plan.stages)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus_wanted > gpus:
        names = ", ".join(stage.device for stage in plan.stages if not stage.is_cpu)
        raise StageLostError(
            f"the plan needs {gpus_wanted} GPUs ({names}), Ray's cluster has {gpus}; add nodes "
            "with: ray start --address HOST:PORT, or re-plan for the devices there are"
        )
    alive = [node for node in ray.nodes() if node["Alive"]]
    for stage, wanted in zip(plan.stages, selectors, strict=True):
        if wanted and not any(wanted.items() <= node.get("Labels", {}).items() for node in alive):
            raise StageLostError(
                f"stage {stage.device} needs a node with labels {dict(wanted)}, none of the "
                f"{len(alive)} nodes has them; start it with: ray start --address HOST:PORT "
                f"--labels {','.join(f'{k}={v}' for k, v in wanted.items())}"
            )


def _wanted(plan: Plan, selectors: Sequence[Mapping[str, str]]) -> str:
    parts = []
    for stage, labels in zip(plan.stages, selectors, strict=True):
        what = "a CPU" if stage.is_cpu else "1 GPU"
        parts.append(f"{stage.device} needs {what}" + (f" on {dict(labels)}" if labels else ""))
    return ", ".join(parts)


def _offered() -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    return "; ".join(
        f"{name}: {free.get(name, 0):g} free of {total.get(name, 0):g}" for name in ("CPU", "GPU")
    )
