"""Measured costs of devices that share stages: of parts of layers, and of the sums between them.

A profile has what the first device's part of a layer takes, for a few shares of each kind of
device, and what sums over devices of a node take. A group's layer takes as long as the device whose
part of attention takes longest, then the one whose part of the MLP does, and the sums. A device's
part is what it has of the weights: between two parts that were timed its time is interpolated;
a smaller part than any takes as long as the smallest, a larger one than the largest in proportion,
or, where the device alone computes in the same way (a GPU), between that and the whole layer.

Of a CPU the whole layer is one call of our own code and a part is not, so that the two have no
times between them.

Sums that were not timed are estimated from the link between the devices, and the group's times are
estimates then; so are those of tables of other machines where the cluster says another kind of link
(NVLink or none) than theirs was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase, Regime, Shares, SumCost
from llmpq.devices.cluster import Device, Links
from llmpq.devices.joined_devices import (
    PEER_GBPS,
    Parts,
    default_shares,
    group_kinds,
    is_cut,
    members_of,
    weight_parts,
)
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import shares_text
from llmpq.planner.costs.imported import summed
from llmpq.planner.costs.sum_times import estimated_sum, sums_of_layer, with_sums
from llmpq.workload import DTYPE_BYTES

SAME = 1e-9
"""Difference of two shares of weights that are one."""


def with_groups_measured(
    profile: CostModel | None, devices: Iterable[Device], spec: ModelSpec
) -> CostModel | None:
    """Return a profile with the costs of the groups among devices that it has all the parts of."""
    if profile is None:
        return None
    known, entries = set(profile.device_kinds), list[LatencyEntry]()
    for group in devices:
        if group.joined and group.profile_kind not in known:
            known.add(group.profile_kind)
            entries += group_entries(profile, group, spec)
    if not entries:
        return profile
    of_groups = CostModel(
        model=profile.model,
        model_fingerprint=profile.model_fingerprint,
        entries=tuple(entries),
        cpu_activations=profile.cpu_activations,
    )
    return profile.merged(of_groups)


def unmeasured_groups(
    profile: CostModel | None, devices: Sequence[Device], spec: ModelSpec
) -> list[str]:
    """Say of which measured GPUs of a node a profile lacks what it takes to share stages."""
    if profile is None:
        return []
    gpus = [one for one in devices if not one.spec.is_cpu and one.spec.host_share is None]
    gpus = [one for one in gpus if one.profile_kind in profile.device_kinds]
    parts = profile.kinds_with_parts
    lacking = [
        one
        for one in group_kinds(gpus)
        if len(one) == 2 and not (profile.sum_over(one) or parts.issuperset(one))
    ]
    kinds = sorted({kind for one in lacking for kind in one})
    asked = [one for one in default_shares(gpus) if is_cut(spec, one)]
    if not kinds or not asked:
        return []
    return [
        f"the costs have no times of stages that {' and '.join(kinds)} share, and no plan has such "
        f"stages: llmpq-profile --tensor-parallel {','.join(map(shares_text, asked))} on their "
        "machine measures them"
    ]


def has_parts(profile: CostModel | None, group: Device, spec: ModelSpec) -> bool:
    """Whether a profile has what a group's layers are put together from."""
    return profile is not None and next(group_entries(profile, group, spec), None) is not None


def group_entries(profile: CostModel, group: Device, spec: ModelSpec) -> Iterator[LatencyEntry]:
    """Yield the entries of a group: of its layers, and of its ends, which the first device has.

    None where no part of a layer was timed on one of the devices.
    """
    sums = _timed_sums(profile, group)
    first, kind = group.joined[0].profile_kind, group.profile_kind
    count = sums_of_layer(spec, group.shares)
    timed = PartTimes(profile, spec)
    found = list[LatencyEntry]()
    for entry in profile.entries:
        if entry.device_kind != first or entry.part != "layer" or entry.shares:
            continue
        regimes = timed.slowest(entry, group)
        token_bytes = spec.hidden * DTYPE_BYTES[entry.dtype]
        if regimes:
            phase = Phase.PREFILL if entry.phase is Phase.PREFILL else Phase.DECODE
            times = estimated_sum(group, phase) if sums is None else sums.times
            own = tuple(with_sums(one, times, token_bytes, count) for one in regimes)
            one = _of_group(entry, kind, own)
            found.append(one if sums else one.model_copy(update={"source": "estimated"}))
    if not found:
        return
    yield from found
    for entry in profile.entries:
        if entry.device_kind == first and entry.part != "layer":
            yield _of_group(entry, kind, entry.regimes)


def _timed_sums(profile: CostModel, group: Device) -> SumCost | None:
    """Return what sums over a group's devices were timed to take; None where they are estimated.

    Tables of other machines stand for a link that the cluster leaves open, or says alike.
    """
    found = profile.sum_over(device.profile_kind for device in group.joined)
    link = group.sum_link
    if found is None or found.gbps is None or link is None or link == Links().within_node:
        return found
    return found if (found.gbps >= PEER_GBPS) == (link.gbps >= PEER_GBPS) else None


def _of_group(entry: LatencyEntry, kind: str, regimes: Sequence[Regime]) -> LatencyEntry:
    """Return an entry as that of a group, all of whose devices compute at once."""
    changes = {"device_kind": kind, "regimes": tuple(regimes), "alone_share": 1.0}
    return entry.model_copy(update=changes)


@dataclass(frozen=True)
class PartTimes:
    """What parts of layers take on the devices of a profile."""

    profile: CostModel
    spec: ModelSpec

    def of(self, entry: LatencyEntry) -> LatencyEntry | None:
        """Return an entry of a part as the other parts have it; None where there are none."""
        attention, mlps = self._shares_of_time
        parts = self._parts(entry.shares, 0)
        fraction = attention * parts[0] + mlps * parts[1]
        found = self._part(entry, entry.device_kind, fraction)
        return None if found is None else entry.model_copy(update={"regimes": found})

    def slowest(self, whole: LatencyEntry, group: Device) -> list[Regime]:
        """Return regimes whose maximum is what a group's layer takes but for its sums.

        `whole`: of the key of precision and phase. None where a device's parts were not timed.
        """
        attention, mlps = self._shares_of_time
        members = {
            (device.profile_kind, *self._parts(member.shares, member.index))
            for device, member in zip(
                group.joined, members_of(self.spec, group.shares), strict=True
            )
        }
        own: dict[tuple[str, float], tuple[Regime, ...]] = {}
        for kind, *parts in members:
            fraction = attention * parts[0] + mlps * parts[1]
            for part in {*parts, fraction}:
                found = self._part(whole, kind, part)
                if found is None:
                    return []
                own[kind, part] = found
        regimes = list[Regime]()
        for one, other in product(sorted(members), repeat=2):
            if one == other:
                fraction = attention * one[1] + mlps * one[2]
                regimes += own[one[0], fraction]
            else:
                regimes += _mixed(own[one[0], one[1]], own[other[0], other[2]], attention)
        return _without_smaller(regimes)

    @property
    def _shares_of_time(self) -> tuple[float, float]:
        """Shares of a layer's weights, as of its time: attention's and the MLP's."""
        attention, mlps = weight_parts(self.spec)
        return attention / (attention + mlps), mlps / (attention + mlps)

    def _parts(self, shares: Shares, index: int) -> tuple[float, float]:
        """Return what one of the devices has of attention and of the MLP."""
        whole: Parts = weight_parts(self.spec)
        own = weight_parts(members_of(self.spec, shares)[index].own)
        return own[0] / max(1, whole[0]), own[1] / max(1, whole[1])

    def _part(self, whole: LatencyEntry, kind: str, fraction: float) -> tuple[Regime, ...] | None:
        """Return what a part of a layer takes on a device; None where none was timed."""
        attention, mlps = self._shares_of_time
        known: list[tuple[float, LatencyEntry]] = []
        for entry in self.profile.entries:
            like = (entry.part, entry.phase, entry.precision, entry.kv, entry.dtype)
            wanted = (whole.part, whole.phase, whole.precision, whole.kv, whole.dtype)
            if entry.device_kind == kind and like == wanted and entry.shares:
                parts = self._parts(entry.shares, 0)
                known.append((attention * parts[0] + mlps * parts[1], entry))
        if not known:
            return None
        alone = self.profile.find(
            kind, phase=whole.phase, precision=whole.precision, kv=whole.kv, dtype=whole.dtype
        )
        if alone is not None and alone.padding != "cpu":
            known.append((1.0, alone))
        known.sort(key=lambda pair: pair[0])
        above = next((at for at, (own, _) in enumerate(known) if own >= fraction - SAME), None)
        if above is None:
            own, entry = known[-1]
            return tuple(_times(regime, fraction / own) for regime in entry.regimes)
        own, entry = known[above]
        if above == 0 or own - fraction <= SAME:
            return entry.regimes
        before, less = known[above - 1]
        return _mixed(entry.regimes, less.regimes, (fraction - before) / (own - before))


def _mixed(one: Sequence[Regime], other: Sequence[Regime], share: float) -> tuple[Regime, ...]:
    """Return regimes whose maximum is a share of the first's and the rest of the other's."""
    return tuple(_sum(_times(a, share), _times(b, 1 - share)) for a, b in product(one, other))


def _times(regime: Regime, factor: float) -> Regime:
    terms = {term: factor * value for term, value in regime.terms.items()}
    curve = tuple((tokens, factor * seconds) for tokens, seconds in regime.curve)
    return Regime(terms=terms, curve=curve)


def _sum(one: Regime, other: Regime) -> Regime:
    terms = {
        term: one.terms.get(term, 0.0) + other.terms.get(term, 0.0)
        for term in (*one.terms, *(term for term in other.terms if term not in one.terms))
    }
    curves = [regime.curve for regime in (one, other) if regime.curve]
    return Regime(terms=terms, curve=summed(curves) if curves else ())


def _without_smaller(regimes: Sequence[Regime]) -> list[Regime]:
    """Return regimes without those that are nowhere the largest, as their terms show."""
    kept = list[Regime]()
    for regime in regimes:
        if not any(_is_below(regime, other) for other in kept):
            kept = [other for other in kept if not _is_below(other, regime)]
            kept.append(regime)
    return kept


def _is_below(one: Regime, other: Regime) -> bool:
    """Whether no term of a regime without a curve is above another's."""
    if one.curve:
        return one == other
    return all(value <= other.terms.get(term, 0.0) for term, value in one.terms.items())
