"""Costs of a CPU that is not profiled, from probed rates (llmpq/costs/cpu_rates.py).

Per decoder layer, r rows through its matrices (v*s in a prefill, v in a decode step), w weights:

    floor + w * seconds_per_weight(bits, r) + KV bytes / bandwidth, or attention's flops / rate

A layer with E experts of which each token takes k reads those that its rows are expected to hit;
each gets its share of the rows. Entries are marked `source: estimated`: a profile replaces them.

Rates are of this machine's processor, so cached ones are taken for the cluster that is this machine
and for one whose file says `planning: {probe_cpu: true}`, which measures those that are missing.
`--probe-cpu` measures all anew, for the numbers of threads that the cluster's CPUs have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase, Regime
from llmpq.costs.cpu_rates import CpuRates, ProductRate, kept_rates, outdated, probe
from llmpq.devices.cluster import Cluster, Device
from llmpq.devices.this_machine import is_this_machine
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.roofline import (
    CPU_FLOOR_S,
    attention_flops,
    estimate_costs,
    experts_hit,
    kv_token_bytes,
    mean_of_layers,
    state_bytes_moved,
)
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision
from llmpq.sizes.memory import Quantization
from llmpq.workload import DTYPE_BYTES, Dtype

Curve = tuple[tuple[float, float], ...]
_SPREAD_ROWS = (2, 8, 32, 128, 512, 1024)
"""Rows between those that were measured: where experts are hit, times are not straight."""


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


def estimated_costs(
    spec: ModelSpec,
    devices: Sequence[Device],
    rates: Sequence[CpuRates],
    *,
    dtype: Dtype,
    precisions: Sequence[Precision],
    kvs: Sequence[KVPrecision],
    quantization: Quantization,
) -> CostModel:
    """Return estimates of all devices: of probed CPUs by their rates, of others by the roofline."""
    estimate = estimate_costs(
        spec, devices, dtype=dtype, precisions=precisions, kvs=kvs, quantization=quantization
    )
    probed = probed_costs(
        spec, devices, rates, dtype=dtype, precisions=precisions, kvs=kvs, quantization=quantization
    )
    return estimate.merged(probed)


def probed_costs(
    spec: ModelSpec,
    devices: Iterable[Device],
    rates: Sequence[CpuRates],
    *,
    dtype: Dtype,
    precisions: Sequence[Precision],
    kvs: Sequence[KVPrecision],
    quantization: Quantization,
) -> CostModel:
    """Return the layers and heads of CPUs whose threads were probed; nothing of other devices."""
    by_threads = {r.threads: r for r in rates if r.dtype == dtype}
    kinds = {d.profile_kind: d for d in devices if d.spec.is_cpu}
    entries: list[LatencyEntry] = []
    for kind, device in kinds.items():
        known = by_threads.get(device.threads or 1)
        if known is None:
            continue
        for precision in precisions:
            if precision in WEIGHT_ONLY:
                costs_of = partial(
                    _Costs,
                    rates=known,
                    kind=kind,
                    dtype=dtype,
                    precision=precision,
                    quantization=quantization,
                )
                entries += _layer_entries(spec, costs_of, kvs)
        for head in quantization.heads(on_cpu=True):
            entries += _Costs(spec, known, kind, dtype, head, quantization).head()
    return CostModel(model=spec.name, model_fingerprint=spec.fingerprint(), entries=tuple(entries))


def _layer_entries(
    spec: ModelSpec, costs_of: Callable[[ModelSpec], _Costs], kvs: Sequence[KVPrecision]
) -> list[LatencyEntry]:
    """Return the prefill entry and one decode entry for each KV precision, means over layers."""

    def decode(layer: ModelSpec, kv: KVPrecision) -> LatencyEntry:
        return costs_of(layer).decode(kv)

    return [
        mean_of_layers(spec, lambda layer: costs_of(layer).prefill()),
        *(mean_of_layers(spec, partial(decode, kv=kv)) for kv in kvs),
    ]


class _Costs:
    """One model on one CPU at one precision."""

    def __init__(
        self,
        spec: ModelSpec,
        rates: CpuRates,
        kind: str,
        dtype: Dtype,
        precision: Precision,
        quantization: Quantization,
    ) -> None:
        self.spec = spec
        self.rates = rates
        self.kind = kind
        self.dtype = dtype
        self.precision = precision
        self.product = _rate(rates, precision, quantization)

    def prefill(self) -> LatencyEntry:
        """Return a layer's prompt."""
        spec, rows = self.spec, self.product.per_weight[-1][0]
        plain = _rate(self.rates, Precision.W16A16, Quantization())
        flops = 2 * rows / plain.seconds(rows)
        attention = attention_flops(spec)
        activations = 12.0 * spec.hidden * DTYPE_BYTES[self.dtype]
        terms = {
            "1": CPU_FLOOR_S,
            "v*s": activations / self._bytes_per_s,
            "v*s^2": attention / flops,
        }
        return self._entry(Phase.PREFILL, Regime(terms=terms, curve=self._curve()))

    def decode(self, kv: KVPrecision) -> LatencyEntry:
        """Return a layer's decode step."""
        read = kv_token_bytes(self.spec, kv, DTYPE_BYTES[self.dtype]) / self._bytes_per_s
        terms = {"1": CPU_FLOOR_S, "v*(t+s)": read}
        state = state_bytes_moved(self.spec, DTYPE_BYTES[self.dtype]) / self._bytes_per_s
        if state:
            terms["v"] = state
        return self._entry(Phase.DECODE, Regime(terms=terms, curve=self._curve()), kv)

    def head(self) -> list[LatencyEntry]:
        """Return the head in both phases: it multiplies one row of each request."""
        weights = self.spec.vocab * self.spec.hidden
        (_, one), (rows, many) = self.product.per_weight[0], self.product.per_weight[-1]
        regimes = (
            Regime(terms={"1": CPU_FLOOR_S + weights * one}),
            Regime(terms={"1": CPU_FLOOR_S, "v": weights * many / rows}),
        )
        return [
            LatencyEntry(
                device_kind=self.kind,
                part="head",
                phase=phase,
                precision=self.precision,
                dtype=self.dtype,
                regimes=regimes,
                padding="cpu",
                source="estimated",
            )
            for phase in (Phase.PREFILL, Phase.DECODE)
        ]

    @property
    def _bytes_per_s(self) -> float:
        return self.rates.mem_gbps * 1e9

    def _curve(self) -> Curve:
        """Return the seconds of all matrices by the rows that pass through the layer."""
        spec = self.spec
        measured = [rows for rows, _ in self.product.per_weight]
        if not spec.experts:
            weights = float(sum(shape.num_weights for shape in spec.linears()))
            return _points(measured, lambda rows: weights * self.product.seconds(rows))
        of_experts = float(sum(s.num_weights for s in spec.linears() if s.of_expert))
        others = spec.weights_per_token - of_experts * spec.experts_per_token / spec.experts

        def seconds(rows: float) -> float:
            hit = experts_hit(spec.experts, spec.experts_per_token, rows)
            each = (
                of_experts
                / spec.experts
                * self.product.seconds(max(1.0, rows * spec.experts_per_token / hit))
            )
            return others * self.product.seconds(rows) + hit * each

        return _points(sorted({*chain(measured, _SPREAD_ROWS)}), seconds)

    def _entry(
        self, phase: Phase, regime: Regime, kv: KVPrecision = KVPrecision.KV16
    ) -> LatencyEntry:
        return LatencyEntry(
            device_kind=self.kind,
            part="layer",
            phase=phase,
            precision=self.precision,
            kv=kv,
            dtype=self.dtype,
            regimes=(regime,),
            padding="none" if self.spec.experts else "cpu",
            source="estimated",
        )


def _points(rows: Sequence[int], seconds: Callable[[float], float]) -> Curve:
    """Return a polyline that is never falling, and in proportion to the rows beyond the last."""
    points: list[tuple[float, float]] = []
    for at in rows:
        points.append((float(at), max(seconds(at), points[-1][1] if points else 0.0)))
    last, value = points[-1]
    return (*points, (2 * last, max(value, seconds(2 * last))))


def _rate(rates: CpuRates, precision: Precision, quantization: Quantization) -> ProductRate:
    bits = precision.weight_bits
    found = rates.product(bits, quantization.cpu_activations)
    if found is None:
        raise ValueError(f"the cached rates of this CPU lack {bits} bits; measure with --probe-cpu")
    return found
