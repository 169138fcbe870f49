"""Where a stage is, as it reports itself before it loads: host, address, device."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmpq.devices.cluster import Cluster
from llmpq.devices.device_spec import canonical_kind
from llmpq.devices.this_machine import processor_name
from llmpq.errors import PlanMismatchError, unknown_name
from llmpq.plans.plan import Plan, StagePlan
from llmpq.plans.plan_nodes import nodes_of
from llmpq.runtime.launch.stages.stage_host import process_space
from llmpq.runtime.options.stage_settings import StageSettings

DeviceOf = tuple[str, int, str, int | None, int | None]
"""A device, and how much of it a stage uses: node, number there, kind, threads, SMs."""


def device_of(stage: StagePlan) -> DeviceOf:
    """Return a stage's device."""
    return stage.node, stage.device_index, stage.kind, stage.threads, stage.sms


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """What a stage says of itself."""

    pid: int
    space: str
    """Where `pid` counts."""
    host: str
    address: str | None
    """At which other hosts' stages reach it; None where all are on one host."""
    device: str
    """The device's name, as its driver or system reports it."""
    uuid: str | None
    """Of a GPU: the card itself."""

    def as_report(self) -> dict[str, str | None]:
        """Return what a report says of it."""
        return {
            "host": self.host,
            "address": self.address,
            "device_name": self.device,
            "device_uuid": self.uuid,
        }


def place_of(stage: StagePlan, gpu: int | None, address: str | None) -> StagePlace:
    """Return this process's place; `PlanMismatchError` if its GPU is not of the plan's kind.

    `gpu`: number of its GPU as torch counts, None on a CPU.
    """
    host, device, uuid = socket.gethostname(), processor_name(), None
    if gpu is not None:
        device, uuid = _gpu(stage, gpu, host)
    return StagePlace(
        pid=os.getpid(),
        space=process_space(),
        host=host,
        address=address,
        device=device,
        uuid=uuid,
    )


def _gpu(stage: StagePlan, number: int, host: str) -> tuple[str, str]:
    """Return the name and the UUID of a GPU of the plan's kind."""
    import torch  # the driver, which reads places, does without

    wanted = f"stage {stage.device} was planned for {stage.kind}"
    if not torch.cuda.is_available():
        raise PlanMismatchError(
            f"{wanted}, host {host} offers this process no GPU; re-plan with llmpq-algo --cluster"
        )
    found, properties = (
        torch.cuda.get_device_name(number),
        torch.cuda.get_device_properties(number),
    )
    try:
        kind = canonical_kind(found, properties.total_memory)
    except ValueError:
        kind = found
    if kind != stage.kind:
        raise PlanMismatchError(
            f"{wanted}, got '{found}' on host {host}; re-plan with llmpq-algo --cluster"
        )
    return found, f"GPU-{properties.uuid}"


def settings_of_stages(
    plan: Plan, cluster: Cluster | None, settings: StageSettings
) -> list[StageSettings]:
    """Return every device's settings: a node may keep the model, and be reached, in its own way."""
    folders = {node.name: node.model_dir for node in nodes_of(plan, cluster)}
    networks = interfaces(settings.options.network_interface, folders)
    return [
        replace(
            settings,
            driver_model_dir=settings.model_dir,
            options=replace(
                settings.options,
                cluster=None,
                copy_weights=settings.options.copy_weights and folders[stage.node] is None,
            ),
            model_dir=folders[stage.node] or settings.model_dir,
            network_interface=networks[stage.node],
        )
        for stage in plan.places
    ]


def interfaces(asked: str | None, nodes: Iterable[str]) -> dict[str, str | None]:
    """Return the network interface of every node: one name for all, or NODE=NAME,NODE=NAME."""
    known = list(nodes)
    if asked is None or "=" not in asked:
        return dict.fromkeys(known, asked)
    found: dict[str, str | None] = dict.fromkeys(known)
    for part in asked.split(","):
        node, _, name = part.partition("=")
        if node not in found:
            raise unknown_name("node of --network-interface", node, known)
        if not name:
            raise ValueError(f"--network-interface {asked}: expected NAME, or NODE=NAME,NODE=NAME")
        found[node] = name
    return found
