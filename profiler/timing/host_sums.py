"""Sums over the devices that may share a stage, timed between processes of one host.

Every device has a process of its own, so that all sums of a host take it once; of a GPU whole, also
where kinds have a share of its SMs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

from llmpq.costs.cost_model import SumCost
from llmpq.devices.cluster import Device
from llmpq.profiler.timing.cases import Ready, SetUp
from llmpq.profiler.timing.host_links import gpus_of
from llmpq.profiler.timing.worker_processes import JobFailedError, TimingProcess, time_sums
from llmpq.workload import Dtype

log = logging.getLogger(__name__)


def measure_sums(
    groups: Sequence[tuple[str, ...]],
    devices: Sequence[Device],
    set_up: Callable[[Device], SetUp],
    *,
    hidden: int,
    dtype: Dtype,
    most_tokens: int,
    failed: list[str],
) -> Iterator[SumCost]:
    """Measure the sums of groups of devices, given by profile kinds; `devices` has one of each.

    Groups that the host has too few GPUs for are left out and said; those that fail are named in
    `failed`.
    """
    of_kind = {device.profile_kind: device for device in devices}
    wanted = Counter[str]()
    for group in groups:
        wanted |= Counter(group)
    with ExitStack() as stack:
        found = _processes(wanted, of_kind, set_up, stack)
        for group in groups:
            kinds = Counter(group)
            if any(count > len(found[kind]) for kind, count in kinds.items()):
                log.info("sums of %s are not timed: not all of them are on this host", _text(kinds))
                continue
            children = [child for kind, n in sorted(kinds.items()) for child in found[kind][:n]]
            try:
                timings = time_sums(children, hidden=hidden, dtype=dtype, most_tokens=most_tokens)
            except JobFailedError as error:
                log.warning("left out sums of %s: %s", _text(kinds), " ".join(str(error).split()))
                failed.append(f"sums of {_text(kinds)}")
                continue
            times = tuple(
                (float(size), seconds)
                for size, seconds in zip(timings.sizes, timings.seconds, strict=True)
            )
            yield SumCost(kinds=tuple(sorted(group)), times=times)


def _processes(
    wanted: Mapping[str, int],
    of_kind: Mapping[str, Device],
    set_up: Callable[[Device], SetUp],
    stack: ExitStack,
) -> dict[str, list[TimingProcess]]:
    """Return a process for every device that is wanted, as far as the host has them."""
    found: dict[str, list[TimingProcess]] = {}
    taken: set[int] = set()
    for kind, count in wanted.items():
        device = of_kind[kind]
        gpus: Sequence[int | None] = [None] * count
        if not device.spec.is_cpu:
            gpus = [gpu for gpu in gpus_of(device) if gpu not in taken][:count]
            taken |= {gpu for gpu in gpus if gpu is not None}
        whole = set_up(device).model_copy(update={"sms": None})
        found[kind] = [stack.enter_context(closing(TimingProcess(whole, gpu=gpu))) for gpu in gpus]
    for child in (child for own in found.values() for child in own):
        child.receive(Ready)
    return found


def _text(kinds: Mapping[str, int]) -> str:
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
