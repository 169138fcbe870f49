"""The links between the device kinds of one host, timed between two of its processes.

CPU stages answer from their timing processes. GPUs need two of the host's, with a process of their
own each; a link is that of the whole GPUs, whatever share of their SMs a kind may use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import combinations_with_replacement

from llmpq.costs.cost_model import LinkCost
from llmpq.devices.cluster import Device
from llmpq.devices.device_spec import canonical_kind, siblings
from llmpq.profiler.timing.cases import LinkTimings, Ready, SetUp
from llmpq.profiler.timing.latency_fit import fit_link
from llmpq.profiler.timing.worker_processes import (
    Group,
    JobFailedError,
    TimingProcess,
    time_link,
    visible_gpus,
)

log = logging.getLogger(__name__)


def measure_links(
    devices: Sequence[Device],
    groups: Mapping[str, Group],
    set_up: Callable[[Device], SetUp],
    *,
    hidden: int,
    seconds: float,
    failed: list[str],
) -> Iterator[LinkCost]:
    """Measure every pair of kinds, one kind with itself included where there are two of it.

    A link whose trial fails is left out and named in `failed`: plans then take the cluster file's.
    `groups` are the timing processes of the CPU kinds, which are ready.
    """
    measured: dict[tuple[str, str], LinkTimings | None] = {}
    for source, target in combinations_with_replacement(devices, 2):
        pair = (_physical(source), _physical(target))
        if pair not in measured:
            try:
                measured[pair] = _time_pair(source, target, groups, set_up, hidden, seconds)
            except JobFailedError as error:
                log.warning("left out the link %s - %s: %s", *pair, " ".join(str(error).split()))
                failed.append(" - ".join(pair))
                measured[pair] = None
        timings = measured[pair]
        if timings is None:
            continue
        alpha_s, beta_s_per_byte = fit_link(timings.sizes, timings.seconds)
        yield LinkCost(
            source_kind=source.profile_kind,
            target_kind=target.profile_kind,
            alpha_s=alpha_s,
            occupied_s=timings.host_s,
            beta_s_per_byte=beta_s_per_byte,
        )


def gpus_of(device: Device) -> list[int]:
    """Return the host's GPUs that a device can stand for."""
    return [i for i, name in enumerate(visible_gpus()) if _is_kind(name, device)]


def _time_pair(
    source: Device,
    target: Device,
    groups: Mapping[str, Group],
    set_up: Callable[[Device], SetUp],
    hidden: int,
    seconds: float,
) -> LinkTimings | None:
    """Return the timings between two kinds, None where the host has not two devices."""
    if source.spec.is_cpu and target.spec.is_cpu:
        children = groups[source.profile_kind].children[:1]
        children += groups[target.profile_kind].children[-1:]
        if children[0] is children[1]:
            return None
        return time_link(children[0], children[1], hidden=hidden, seconds=seconds)
    gpus: list[int] = []
    with ExitStack() as stack:
        ends = []
        for device in (source, target):
            if device.spec.is_cpu:
                ends.append(groups[device.profile_kind].children[0])
                continue
            free = [gpu for gpu in gpus_of(device) if gpu not in gpus]
            if not free:
                log.info("links between GPUs are not timed: this host has one %s", device.kind)
                return None
            gpus.append(free[0])
            whole = set_up(device).model_copy(update={"sms": None})
            ends.append(stack.enter_context(closing(TimingProcess(whole, gpu=free[0]))))
        for end, device in zip(ends, (source, target), strict=True):
            if not device.spec.is_cpu:
                end.receive(Ready)
        return time_link(ends[0], ends[1], hidden=hidden, seconds=seconds, on_device=len(gpus) == 2)


def _physical(device: Device) -> str:
    """Return what a kind's links are those of."""
    return device.profile_kind if device.spec.is_cpu else device.kind


def _is_kind(name: str, device: Device) -> bool:
    """Whether a GPU's driver name is the device's kind."""
    try:
        kind = canonical_kind(name)
        return device.kind in (kind, *siblings(kind))
    except ValueError:
        return name.lower() == device.kind.lower()
