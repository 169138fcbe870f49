"""The costs a problem is built from: measured where there is a profile, estimated elsewhere.

Decode times are means over the n-1 decode steps, each at its true cache length s + t.

Costs are measured and estimated for integers in groups of 128. A GPU's layer with other codes (a
codebook, E4M3, small groups) takes a factor longer: medians over the shapes of Llama-3.1-8B on an
H200 (d2231297:benchmarks/table_products_gpu.py, docs/lab-book/kernels.md), decode of 1 to 32 rows,
prompts of 512 rows and more. The factor is on everything of a layer but its attention. Factors
below one are Hopper's, whose kernel reads the codes; other GPUs dequantise them and get at least
one. CPUs take all forms alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llmpq.costs.cost_model import CostModel, LatencyEntry, Part, Phase
from llmpq.devices.cluster import Cluster, Device
from llmpq.devices.device_spec import DeviceSpec
from llmpq.errors import nearest
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.attended_keys import attended_keys
from llmpq.sizes.memory import Quantization
from llmpq.workload import Workload, prompt_chunks

OCCUPYING_SHARE = {"cpu": 0.5, "gpu": 0.0}
"""Share of a link's latency that keeps the sender from computing, and messages from one another,
where that was not measured.

Gloo, which any hop with a CPU stage takes: the sending thread packs and copies (0.53 of the latency
on one host, d2231297:benchmarks/link_occupancy.py); the handshake passes while the stages
compute. Between GPUs messages are only enqueued; that is not measured.
"""


@dataclass(frozen=True, kw_only=True)
class LinkTerms:
    """A message of b bytes takes delay + handshake + b * per_byte seconds.

    During all but the delay it occupies its way.
    """

    delay_s: float
    handshake_s: float
    per_byte_s: float

    @classmethod
    def split(
        cls,
        latency_s: float,
        per_byte_s: float,
        *,
        on_cpu: bool,
        occupied_s: float | None = None,
    ) -> LinkTerms:
        """Return the terms of a link's latency; `occupied_s`: what of it was measured to be."""
        share = OCCUPYING_SHARE["cpu" if on_cpu else "gpu"]
        handshake = share * latency_s if occupied_s is None else min(occupied_s, latency_s)
        return cls(delay_s=latency_s - handshake, handshake_s=handshake, per_byte_s=per_byte_s)

    def busy_s(self, num_bytes: float) -> float:
        """Return for how long a message occupies its way."""
        return self.handshake_s + self.per_byte_s * num_bytes

    def seconds(self, num_bytes: float) -> float:
        """Return the time until a message has arrived."""
        return self.delay_s + self.busy_s(num_bytes)


@dataclass(frozen=True, kw_only=True)
class CostBook:
    """A profile (possibly of a few device kinds only) over an estimate of all of them."""

    estimate: CostModel
    profile: CostModel | None = None
    scale: dict[str, float] = field(default_factory=dict)
    """Device kind, or a device's name -> factor on its times: what the +-10 % study changes, and
    what was measured of one device."""
    quantization: Quantization = Quantization()
    """Of the plan: the output matrix has a precision of its own."""
    alone: frozenset[str] = frozenset()
    """Kinds of CPU that have no other on their nodes."""

    def entry(
        self,
        device: Device,
        part: Part,
        phase: Phase,
        work: Workload,
        precision: Precision = Precision.W16A16,
    ) -> LatencyEntry:
        """Return the entry of a key with the factor of its codes: measured, else estimated."""
        found = self._found(device, part, phase, work, precision)
        if device.profile_kind in self.alone:
            found = found.alone()
        return with_code_factor(found, device.spec, self.quantization) if part == "layer" else found

    def _found(
        self, device: Device, part: Part, phase: Phase, work: Workload, precision: Precision
    ) -> LatencyEntry:
        if part == "head":
            precision = self.quantization.head(on_cpu=device.spec.is_cpu)
        kinds = [work.kv] if work.kv is KVPrecision.KV16 else [work.kv, KVPrecision.KV16]
        if part == "layer" and phase is Phase.DECODE:
            kinds = kinds[:1]  # a cache of other bits reads other bytes: no stand-in
        for model in (self.profile, self.estimate):
            for kv in kinds if model is not None else ():
                assert model is not None
                found = model.find(
                    device.profile_kind,
                    part=part,
                    phase=phase,
                    precision=precision,
                    kv=kv,
                    dtype=work.dtype,
                )
                if found is not None:
                    return found
        raise ValueError(
            f"no cost of {device.profile_kind} {part} {phase.value} {precision.value} "
            f"{work.kv.value} {work.dtype}: profile it with llmpq-profile, or leave the precision "
            "out with --bits"
        )

    def estimated(self, device: Device, precisions: tuple[Precision, ...], work: Workload) -> bool:
        """Whether any layer time of a device at these precisions is an estimate."""
        return any(
            self.entry(device, "layer", phase, work, precision).source == "estimated"
            for precision in precisions
            for phase in (Phase.PREFILL, Phase.DECODE)
        )

    def measures(self, device: Device) -> bool:
        """Whether a device is of a kind that was measured."""
        return self.profile is not None and device.profile_kind in self.profile.kinds_measured

    def factor(self, device: Device) -> float:
        """Return the factor on a device's times."""
        return self.scale.get(device.name, 1.0) * self.scale.get(device.profile_kind, 1.0)

    def layer_prefill_s(
        self, device: Device, b: Precision, work: Workload, eta: int, chunk: int | None
    ) -> float:
        """Mean time of one layer for a step of a prefill micro-batch."""
        entry = self.entry(device, "layer", Phase.PREFILL, work, b)
        return float(np.mean(chunk_times(entry, work, eta, chunk))) * self.factor(device)

    def layer_decode_s(self, device: Device, b: Precision, work: Workload, xi: int) -> float:
        """Mean time of one layer for one decode micro-batch over t = 1..n-1."""
        entry = self.entry(device, "layer", Phase.DECODE, work, b)
        return mean_decode_s(entry, work, xi) * self.factor(device)

    def ends_prefill_s(
        self, device: Device, work: Workload, eta: int, chunk: int | None
    ) -> tuple[float, float]:
        """Mean times of the embedding and of the head for a step of a prefill micro-batch."""
        embedding = self.entry(device, "embedding", Phase.PREFILL, work)
        head = self.entry(device, "head", Phase.PREFILL, work)
        factor = self.factor(device)
        return (
            float(np.mean(chunk_times(embedding, work, eta, chunk))) * factor,
            float(np.mean(chunk_times(head, work, eta, chunk))) * factor,
        )

    def ends_decode_s(self, device: Device, work: Workload, xi: int) -> tuple[float, float]:
        """Times of the embedding and of the head for one decode micro-batch."""
        factor = self.factor(device)
        embedding = self.entry(device, "embedding", Phase.DECODE, work)
        head = self.entry(device, "head", Phase.DECODE, work)
        return (
            mean_decode_s(embedding, work, xi) * factor,
            mean_decode_s(head, work, xi) * factor,
        )

    def link(self, cluster: Cluster, source: Device, target: Device) -> LinkTerms:
        """Return what messages between two devices cost, measured if they were.

        A link that the cluster gives for these very devices comes before one of their nodes, which
        comes before one of their kinds.
        """
        same_node = source.node == target.node
        measured = self.profile if cluster.own_link(source, target) is None else None
        between = measured and not same_node and measured.node_link(source.node, target.node)
        if between:
            return LinkTerms(
                delay_s=max(0.0, between.alpha_s - between.occupied_s),
                handshake_s=min(between.alpha_s, between.occupied_s),
                per_byte_s=between.beta_s_per_byte,
            )
        cost = measured and measured.link(
            source.profile_kind, target.profile_kind, same_node=same_node
        )
        on_cpu = source.spec.is_cpu or target.spec.is_cpu
        if cost:
            return LinkTerms.split(
                cost.alpha_s, cost.beta_s_per_byte, on_cpu=on_cpu, occupied_s=cost.occupied_s
            )
        link = cluster.link(source, target)
        return LinkTerms.split(link.latency_us * 1e-6, 8 / (link.gbps * 1e9), on_cpu=on_cpu)

    def warnings(self, devices: tuple[Device, ...], work: Workload) -> list[str]:
        """Name the device kinds whose shapes lie outside what was sampled, at any precision."""
        tokens = work.prompt_len + work.gen_len

        def outside(entry: LatencyEntry) -> bool:
            if entry.part != "layer" or entry.dtype != work.dtype or entry.kv is not work.kv:
                return False
            if entry.phase is Phase.PREFILL:  # of which micro-batches are small as need be
                return entry.sampled_length is not None and (
                    work.prompt_len > entry.sampled_length[1]
                )
            return entry.phase is Phase.DECODE and entry.extrapolates(v=work.batch, length=tokens)

        profile = () if self.profile is None else self.profile.entries
        measured = [entry for entry in profile if entry.source == "profile"]
        kinds = {entry.device_kind for entry in measured if outside(entry)}
        # Tables of others are not padded either, and have no sampled shapes.
        own = [entry for entry in measured if entry.sampled_v is not None]
        older = {entry.device_kind for entry in own if entry.padding == "none"}
        notes = []
        for kind in dict.fromkeys(d.profile_kind for d in devices):
            if kind in kinds:
                notes.append(
                    f"{kind}: batch {work.batch} x {tokens} tokens lies outside the profile's "
                    f"samples; times are extrapolated (llmpq-profile --max-batch {work.batch} "
                    f"--max-len {tokens})"
                )
            if kind in older:
                notes.append(
                    f"{kind}: measured by an older llmpq-profile, which timed another engine than "
                    "the one that serves; profile it again"
                )
        return notes

    def unprofiled(self, devices: tuple[Device, ...]) -> list[str]:
        """Explain which device kinds the profile does not know."""
        if self.profile is None:
            return []
        known = self.profile.device_kinds
        return [
            f"the profile has no '{kind}': {nearest(kind, known)}its times are estimated"
            for kind in sorted({d.profile_kind for d in devices} - set(known))
        ]


def alone_kinds(devices: Sequence[Device]) -> frozenset[str]:
    """Return the kinds of CPU each of whose devices is the only CPU of its node."""
    cpus = [device for device in devices if device.spec.is_cpu]
    on_node = Counter(device.node for device in cpus)
    together = {device.profile_kind for device in cpus if on_node[device.node] > 1}
    return frozenset(device.profile_kind for device in cpus) - together


def chunk_times(entry: LatencyEntry, work: Workload, eta: int, chunk: int | None) -> np.ndarray:
    """Return the time of each step that the prompts of a micro-batch take."""
    chunks = prompt_chunks(work.prompt_len, chunk)
    starts, lengths = np.array(chunks, dtype=np.float64).T
    times = np.empty(len(chunks))
    for length in {chunks[0][1], chunks[-1][1]}:
        own = lengths == length
        lines = entry.chunk_lines(v=eta, length=length)
        keys = entry.keys_before(starts[own], float(length))
        times[own] = np.max([base + slope * keys for base, slope in lines], axis=0)
    return np.maximum(times, entry.launch_s)


def mean_decode_s(entry: LatencyEntry, work: Workload, xi: int) -> float:
    """Return the mean of an entry over the decode steps t = 1..n-1 (zero when there are none)."""
    steps = work.gen_len - 1
    if steps < 1:
        return 0.0
    lengths = work.prompt_len + np.arange(1, steps + 1, dtype=np.float64)
    return float(np.mean(decode_times(entry, lengths, xi)))


def decode_times(entry: LatencyEntry, lengths: np.ndarray, xi: int) -> np.ndarray:
    """Return the time of a decode entry at each cache length: the device's, or the host's."""
    keys = attended_keys(lengths, entry.windows)
    times = [base + slope * keys for base, slope in entry.decode_lines(v=xi)]
    return np.maximum(np.max(np.stack(times), axis=0), entry.launch_s)


GROUP = 128
FACTORS: dict[str, dict[Phase, float]] = {
    "small": {Phase.DECODE: 1.06, Phase.PREFILL: 0.95},
    "small3": {Phase.DECODE: 1.10, Phase.PREFILL: 1.20},
    "mxfp4": {Phase.DECODE: 1.06, Phase.PREFILL: 0.93},
    "nvfp4": {Phase.DECODE: 1.18, Phase.PREFILL: 1.18},
    "nf4": {Phase.DECODE: 1.62, Phase.PREFILL: 1.11},
    "fp4": {Phase.DECODE: 1.62, Phase.PREFILL: 1.11},
    "iq4": {Phase.DECODE: 1.69, Phase.PREFILL: 1.13},
    "e4m3": {Phase.DECODE: 1.13, Phase.PREFILL: 1.09},
}
"""Form -> phase -> time over that of integers of as many bits in groups of 128 (H200)."""
BITS = {"e4m3": 8}
"""Bits of a form; of others 4."""


def form_of(quantization: Quantization, precision: Precision) -> str | None:
    """Return the form of a layer's codes; None for 16 bits and integers in groups of 128."""
    if precision.activation_bits != 16 or precision.weight_bits not in (3, 4, 8):
        return None
    codes = quantization.codes
    if codes is not None and BITS.get(codes, 4) == precision.weight_bits:
        return codes
    small = quantization.group_size is not None and quantization.group_size < GROUP
    if not small:
        return None
    return "small3" if precision.weight_bits == 3 else "small"


def as_group_128(
    quantization: Quantization, precision: Precision, device: DeviceSpec
) -> Quantization:
    """Return the settings that a layer's cost is estimated at: integers in groups of 128.

    `FACTORS` were measured with the bytes of scales: those are not counted twice.
    """
    if device.is_cpu or form_of(quantization, precision) is None:
        return quantization
    return replace(quantization, group_size=GROUP, codes=None, stored=())


def with_code_factor(
    entry: LatencyEntry, device: DeviceSpec, quantization: Quantization
) -> LatencyEntry:
    """Return a layer's entry with the factor of its codes."""
    form = None if device.is_cpu else form_of(quantization, entry.precision)
    if form is None:
        return entry
    own = FACTORS[form]
    factor = own[Phase.PREFILL if entry.phase is Phase.PREFILL else Phase.DECODE]
    if device.unpacks_weights:
        factor = max(factor, 1.0)
    return entry if factor == 1.0 else entry.with_products(factor)
