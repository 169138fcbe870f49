"""The rates of this machine's CPU for a plan that may run on it: measured now, or kept before.

A cluster's CPUs may be anywhere: kept rates are taken for the cluster that is this machine's, and
for one whose file says `planning: {probe_cpu: true}`, which has measured what was not kept. A probe
is made anew where `--probe-cpu` asks for it, by the threads that the cluster's CPUs have.
"""

from __future__ import annotations

from collections.abc import Collection

from llmpq.cluster import Cluster
from llmpq.devices.cpu_rates import CpuRates, kept_rates, outdated, probe
from llmpq.devices.this_machine import is_this_machine
from llmpq.workload import Dtype


def rates_for(
    cluster: Cluster, dtype: Dtype, *, profiled: Collection[str] = (), probing: bool = False
) -> list[CpuRates]:
    """Return the rates of the cluster's CPUs that are not profiled, by threads.

    `ValueError` where `probing` (`--probe-cpu`) has nothing to measure.
    """
    threads = _threads(cluster, profiled)
    if probing and not threads:
        cpus = any(device.spec.is_cpu for device in cluster.devices)
        why = "their costs are measured already" if cpus else "there is no CPU among the devices"
        raise ValueError(f"--probe-cpu: {why}, nothing to measure; leave it out")
    if probing:
        return [probe(number, dtype) for number in threads]
    if cluster.planning.probe_cpu:
        return [kept_rates(number, dtype) or probe(number, dtype) for number in threads]
    if not is_this_machine(cluster):
        return []
    kept = [kept_rates(number, dtype) for number in threads]
    return [rates for rates in kept if rates is not None]


def outdated_rates(
    cluster: Cluster,
    dtype: Dtype,
    *,
    profiled: Collection[str] = (),
    taken: Collection[CpuRates] = (),
) -> list[str]:
    """Return a note for each kept rate of this machine that `rates_for` has not `taken`."""
    if not is_this_machine(cluster):
        return []
    known = {rates.threads for rates in taken}
    open_ones = [number for number in _threads(cluster, profiled) if number not in known]
    notes = [outdated(number, dtype) for number in open_ones]
    return [note for note in notes if note is not None]


def _threads(cluster: Cluster, profiled: Collection[str]) -> list[int]:
    """Return what numbers of threads the CPUs have that are not profiled."""
    cpus = (device for device in cluster.devices if device.spec.is_cpu)
    return sorted({cpu.threads or 1 for cpu in cpus if cpu.profile_kind not in profiled})
