"""A profiling run: which devices are here, time what is missing, fit, measure links.

Knows no torch: the timing happens in child processes, which are closed when the run ends or fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

from llmpq.costs.cost_model import (
    CostModel,
    LatencyEntry,
    LinkCost,
    Phase,
    Shares,
    SumCost,
    taken_length,
)
from llmpq.costs.kernel_sources import stage_mark
from llmpq.devices.cluster import Cluster, Device
from llmpq.errors import StageLostError, unknown_name
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.timing.cases import (
    CaseTime,
    Conditions,
    Effort,
    Sample,
    Sampling,
    SetUp,
    Target,
    TimedCase,
)
from llmpq.profiler.timing.compile_ahead import COMPILER_BYTES, compile_ahead
from llmpq.profiler.timing.host_links import gpus_of, measure_links
from llmpq.profiler.timing.host_sums import measure_sums
from llmpq.profiler.timing.latency_fit import TARGET_ERROR, Point, fit_latency
from llmpq.profiler.timing.sample_file import SampleLog
from llmpq.profiler.timing.shape_grid import ShapeGrid, cases, fitted_terms
from llmpq.profiler.timing.worker_processes import (
    Group,
    JobFailedError,
    set_up_for,
    visible_gpus,
)
from llmpq.sizes.attended_keys import Windows, chosen_keys, windows_of
from llmpq.sizes.memory import CpuActivations
from llmpq.version import __version__
from llmpq.workload import Dtype

log = logging.getLogger(__name__)

MOST_RESTARTS = 4
"""Of the processes of a device kind, after cases that left their GPU useless to them."""

SHARE_ROUNDS, SHARE_S, SHARE_STEP_S = 5, 0.2, 0.25
"""Of cases that are timed alone and at once in turn: how often, for how long (of quick profiles
less), and of steps of which length: of two processes that begin together most of so long a time is
spent together."""
LEAST_TARGET = 0.01
"""Mean held-out error below which no more detailed fit is tried, however quiet the samples."""


@dataclass(frozen=True, kw_only=True)
class ProfileJob:
    """What to profile, and how hard."""

    model: str
    """Directory or built-in name, as the children read it."""
    spec: ModelSpec
    devices: tuple[Device, ...]
    """One device per profile kind."""
    copies: dict[str, int]
    """Profile kind -> processes that time at once."""
    precisions: tuple[Precision, ...]
    kv: tuple[KVPrecision, ...]
    dtype: Dtype
    grid: ShapeGrid
    sampling: Sampling
    effort: Effort
    links: bool
    """Whether the cluster has links to time: more than one device."""
    cpu_activations: CpuActivations = "exact"
    """What CPUs multiply weights of few bits by."""
    shares: tuple[Shares, ...] = ()
    """Of layers that devices share, of which the first one's part is timed."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Profile kinds of devices whose sums are timed."""

    def cases_of(self, device: Device) -> list[TimedCase]:
        """Return every case of a device kind, the cases of one target together."""
        return cases(
            self.grid,
            device_kind=device.profile_kind,
            dtype=self.dtype,
            precisions=self.precisions,
            kv=self.kv,
            shares=self.shares,
        )


@dataclass(frozen=True, kw_only=True)
class HostProfile:
    """What a run found."""

    costs: CostModel
    noise: dict[Target, float]
    """Median over an entry's samples of their interquartile half-width, relative."""
    copies: dict[str, int]
    failed: dict[TimedCase, str]
    """Cases that could not be measured, with the error; their targets are left out."""
    failed_links: tuple[str, ...] = ()
    """Links, and sums over devices, that could not be measured."""


OnCase = Callable[[TimedCase], None]
"""Hears of every case whose sample is there."""


def run(job: ProfileJob, samples: SampleLog, on_case: OnCase) -> HostProfile:
    """Time every device kind in turn, then the links between them, and fit."""
    entries: list[LatencyEntry] = []
    noise: dict[Target, float] = {}
    failed: dict[TimedCase, str] = {}
    versions: dict[str, str] = {"llmpq": __version__, "sampling": job.sampling.title}
    links: tuple[LinkCost, ...] = ()
    sums: tuple[SumCost, ...] = ()
    failed_links: list[str] = []
    compiled = False  # shares of a GPU run the kernels of the whole one
    with ExitStack() as stack:
        groups = {}
        for device in job.devices:
            kind = device.profile_kind
            groups[kind] = stack.enter_context(_group(job, device))
            machine = groups[kind].ready.machine
            versions[kind] = f"{machine}, {job.copies[kind]} at once"
            taken = _take(job, device, groups[kind], samples, on_case, failed, compiled)
            compiled = compiled or not device.spec.is_cpu
            for target, found in _by_target(taken).items():
                entry = fit_entry(target, found, job.spec)
                share_s = min(SHARE_S, 4 * job.effort.seconds)
                entries.append(entry.at_once(alone_share(groups[kind], found, seconds=share_s)))
                noise[target] = _median([s.timing.noise for s in found])
            if not device.spec.is_cpu:
                groups.pop(kind).close()  # the next kind is timed on the same GPU
        if job.links:
            links = tuple(
                measure_links(
                    job.devices,
                    groups,
                    lambda device: _set_up(job, device),
                    hidden=job.spec.hidden,
                    seconds=50 * job.effort.seconds,
                    failed=failed_links,
                )
            )
    if job.groups:
        sums = tuple(
            measure_sums(
                job.groups,
                job.devices,
                lambda device: _set_up(job, device),
                hidden=job.spec.hidden,
                dtype=job.dtype,
                most_tokens=job.grid.most_tokens,
                failed=failed_links,
            )
        )
    costs = CostModel(
        model=job.spec.name,
        model_fingerprint=job.spec.fingerprint(),
        entries=tuple(entries),
        links=links,
        sums=sums,
        versions=versions,
        cpu_activations=job.cpu_activations,
    )
    return HostProfile(
        costs=costs,
        noise=noise,
        copies=job.copies,
        failed=failed,
        failed_links=tuple(failed_links),
    )


def devices_here(cluster: Cluster, wanted: str | None) -> tuple[Device, ...]:
    """Return one device per profile kind that this host can stand for.

    `wanted` is a profile kind of the cluster, or the kind of several; asking for one that is not
    here is an error.
    """
    first = {d.profile_kind: d for d in reversed(cluster.devices)}
    gpus = visible_gpus() if any(not d.spec.is_cpu for d in first.values()) else ()
    here = {
        kind: device
        for kind, device in sorted(first.items())
        if device.spec.is_cpu or gpus_of(device)
    }
    if wanted is not None:
        # A whole GPU's profile kind is its kind, which shares of its SMs have too.
        exact = {k: d for k, d in first.items() if wanted.lower() == k.lower()}
        chosen = exact or {k: d for k, d in first.items() if wanted.lower() == d.kind.lower()}
        if not chosen:
            raise unknown_name("device kind", wanted, first)
        here = {kind: device for kind, device in here.items() if kind in chosen}
    if not here:
        found = ", ".join(gpus) or "no GPU"
        raise ValueError(
            f"none of {', '.join(sorted(first))} is on this host (found: its CPU, {found}); run "
            "llmpq-profile on a host that has them and join the files with llmpq-profile merge"
        )
    for kind in sorted(set(first) - set(here)):
        log.info("%s is not profiled here; join its costs later: llmpq-profile merge", kind)
    return tuple(here.values())


def default_copies(cluster: Cluster, device: Device) -> int:
    """Return how many stages of this device's node share its cores or its host's GPUs.

    CPU stages of one node run at once and share memory bandwidth, so they are timed at once; GPUs
    have their own memory and are timed one at a time.
    """
    if not device.spec.is_cpu:
        return 1
    stages = sum(d.node == device.node and d.spec.is_cpu for d in cluster.devices)
    return max(1, min(stages, _num_cores() // (device.threads or 1)))


def _num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def conditions_of(
    device: Device,
    spec: ModelSpec,
    machine: str,
    *,
    sampling: Sampling,
    copies: int = 1,
    rest_s: float = 0.0,
    cpu_activations: CpuActivations = "exact",
) -> Conditions:
    """Return what samples of a device are taken under by the sources that are here."""
    on_cpu = device.spec.is_cpu
    return Conditions(
        model_fingerprint=spec.fingerprint(),
        machine=machine,
        copies=copies,
        rest_s=rest_s,
        sampling=sampling,
        cpu_activations=cpu_activations if on_cpu else "exact",
        padding="cpu" if on_cpu else "gpu",
        kernels=stage_mark(on_cpu=on_cpu),
    )


def _set_up(job: ProfileJob, device: Device) -> SetUp:
    return set_up_for(
        device,
        job.model,
        sampling=job.sampling,
        effort=job.effort,
        cpu_activations=job.cpu_activations,
    )


def _group(job: ProfileJob, device: Device) -> Group:
    gpus: Sequence[int | None] = (None,) if device.spec.is_cpu else gpus_of(device)
    return Group(_set_up(job, device), copies=job.copies[device.profile_kind], gpus=gpus)


def _take(
    job: ProfileJob,
    device: Device,
    group: Group,
    samples: SampleLog,
    on_case: OnCase,
    failed: dict[TimedCase, str],
    compiled: bool,
) -> list[Sample]:
    """Return the samples of a device kind, timing those that are not on disk.

    `compiled`: whether its kernels are there.
    """
    wanted = job.cases_of(device)
    conditions = conditions_of(
        device,
        job.spec,
        group.ready.machine,
        copies=1 if device.spec.is_cpu else job.copies[device.profile_kind],
        rest_s=job.effort.rest_s,
        sampling=job.sampling,
        cpu_activations=job.cpu_activations,
    )
    done = samples.taken(wanted, conditions)
    if not (device.spec.is_cpu or compiled):
        absent = [case for case in wanted if case not in done]
        set_up, gpu = _set_up(job, device), gpus_of(device)[0]
        compile_ahead(set_up, absent, gpu, processes=_compilers(device))
    for _, together in groupby(wanted, key=lambda case: case.target):
        missing = []
        for case in together:
            if case in done:
                on_case(case)
            else:
                missing.append(case)
        for case, timing in _rounds(group, missing, failed, on_cpu=device.spec.is_cpu):
            done[case] = Sample(conditions=conditions, case=case, timing=timing)
            samples.append(done[case])
            on_case(case)
    without = {case.target for case in failed}
    return [sample for case, sample in done.items() if case.target not in without]


def _rounds(
    group: Group, missing: Sequence[TimedCase], failed: dict[TimedCase, str], *, on_cpu: bool
) -> Iterator[tuple[TimedCase, CaseTime]]:
    """Time the cases of a target; on a CPU alone, in two rounds, keeping the faster timing of each.

    Other programs only add time, and seldom at both moments. Cases that cannot be measured are
    put into `failed`.
    """

    def timed(case: TimedCase) -> CaseTime | None:
        try:
            return group.time(case, alone=on_cpu)
        except JobFailedError as error:
            failed[case] = str(error)
            if error.lost:
                _restart(group, failed)
            return None

    first = {case: timed(case) for case in missing} if on_cpu else {}
    for case in missing:
        found = [t for t in (first.get(case), None if case in failed else timed(case)) if t]
        if case not in failed:
            yield case, min(found, key=lambda timing: timing.seconds)


def alone_share(group: Group, found: Sequence[Sample], *, seconds: float = SHARE_S) -> float:
    """Return the share of a target's time at once that it takes on one copy while the others wait.

    CPU stages of a host share its memory: two that read 50 MB of weights a layer, on two cores,
    take 1.13 times as long a decode step as one (5.4 and 6.0 ms of 8 rows), and 1.01 times as long
    a step of 96 tokens. Of the cases with the shortest and the longest step that is not too long,
    together; in turns, as a machine's speed changes within seconds.
    """
    if len(group.children) == 1:
        return 1.0
    steps = sorted(found, key=lambda one: one.timing.seconds * one.timing.layers)
    short = [one for one in steps if one.timing.seconds * one.timing.layers < SHARE_STEP_S]
    timed = (short or steps[:1])[0].case, (short or steps[:1])[-1].case
    shares = []
    for _ in range(SHARE_ROUNDS):
        alone_s = sum(group.time(case, alone=True, seconds=seconds).seconds for case in timed)
        shares.append(alone_s / sum(group.time(case, seconds=seconds).seconds for case in timed))
    return min(1.0, _median(shares))


def _restart(group: Group, failed: dict[TimedCase, str]) -> None:
    """Start a group's processes anew; `StageLostError` where that does not help."""
    if group.restarts == MOST_RESTARTS:
        *_, (case, error) = failed.items()
        raise StageLostError(
            f"the GPU refused further work after {case.title} ({error}), as after "
            f"{MOST_RESTARTS} cases before it; samples taken so far are on disk"
        )
    group.restart()


def _compilers(device: Device) -> int:
    """Return how many processes may compile at once: one a core, as far as the GPU has room."""
    return max(1, min(_num_cores(), device.spec.memory // COMPILER_BYTES))


def _by_target(samples: Sequence[Sample]) -> dict[Target, list[Sample]]:
    found: dict[Target, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.case.target, []).append(sample)
    return found


def fit_entry(target: Target, samples: Sequence[Sample], spec: ModelSpec) -> LatencyEntry:
    """Fit one entry; the past length of embedding and head in decode is no part of its range.

    Attention is fitted to the keys in sight of the layers that were timed, the model's first ones;
    the entry is of all the model's layers.
    """
    samples = [s for s in samples if not s.case.launch]
    width, padding = samples[0].conditions.padded_to, samples[0].conditions.padding

    def windows(layers: int) -> Windows:
        if target.part != "layer":
            return ()
        chosen = chosen_keys(spec, of_pairs=target.phase is Phase.PREFILL)
        return chosen if chosen and padding != "cpu" else windows_of(spec, range(layers))

    points = [
        Point(
            v=s.case.v,
            length=int(taken_length(target.phase, s.case.length, width)),
            q_len=s.case.q_len,
            start=s.case.start,
            windows=windows(s.timing.layers),
            seconds=s.timing.seconds,
        )
        for s in samples
    ]
    terms = fitted_terms(target)
    # Quiet samples (a GPU's graphs: 0.2 %) are worth a closer fit than noisy ones.
    noise = _median([s.timing.noise for s in samples])
    wanted = min(TARGET_ERROR, max(LEAST_TARGET, noise))
    fit = fit_latency(target.phase, points, terms=terms, target=wanted, padding=padding)
    lengths = [p.start + p.length for p in points]
    has_length = terms is None or "v*s" in terms
    return LatencyEntry(
        device_kind=target.device_kind,
        part=target.part,
        phase=target.phase,
        precision=target.precision,
        kv=target.kv,
        dtype=target.dtype,
        shares=target.shares,
        regimes=fit.regimes,
        padding=padding,
        padded_to=width,
        windows=windows(spec.num_layers),
        sampled_v=(min(p.v for p in points), max(p.v for p in points)),
        sampled_length=(min(lengths), max(lengths)) if has_length else None,
        held_out_error=fit.held_out,
        source="profile",
    )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
