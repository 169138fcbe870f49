"""Estimated costs of a device that is not profiled, from its peak rates in `gpus.yaml`.

Knows nothing of the runtime's kernels. Every entry is marked `source: estimated`; a profile of the
same key replaces it. Per decoder layer, with v requests of s (or one) new tokens:

    prefill  max(weight bytes / bandwidth + activations / bandwidth, unpacking + flops / rate)
    decode   max(weight bytes / bandwidth, flops / rate) + KV bytes / bandwidth

Every step of a prefill reads all weights, and a step of many rows first unpacks those of few bits:
unpacking is weight bytes / bandwidth, 0 at 16 bits. Steps are padded as the engine pads them, and
beyond the sizes that a GPU has graphs of the host's time to enqueue a layer is the least.

Layers are taken to be equal: of a model whose layers mix tokens in unlike ways an entry is the mean
of its layers. A recurrent layer reads and writes its state of every request, and reads no keys.
Layers with a window read the keys in sight only: an entry says the model's windows. Where an
indexer chooses keys, GPUs read its own ones of all tokens and latents of those it chooses.

A layer with E experts of which each token takes k reads those that its tokens are expected to hit,
E (1 - (1 - k/E)^tokens): a polyline in the tokens beside the terms. A token is taken to choose its
experts by itself and evenly.

GPUs whose tensor cores Triton does not drive (before Ampere) read a weight of few bits as it is
stored for few rows; for more, of other codes than integers, and in float32 (there on every GPU) it
is made dense for the product: its values are written and read beside the packed bytes, so that
fewer bits save memory and no time. Volta's products of few rows are fused multiply-adds. Attention
of prompts multiplies at the float32 rate on those GPUs, and experts run one by one, enqueued by the
host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from llmpq.costs.cost_model import CostModel, LatencyEntry, Part, Phase, Regime
from llmpq.devices.cluster import Device
from llmpq.devices.device_spec import DeviceSpec
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.cost_book import as_group_128
from llmpq.planner.costs.sum_times import estimated_sum, sums_of_layer, with_sums
from llmpq.precision import KVPrecision, Precision, WeightScheme
from llmpq.sizes.attended_keys import (
    chosen_keys,
    chosen_pair_flops,
    index_pair_flops,
    windows_of,
)
from llmpq.sizes.kv_format import kv_cache_bytes
from llmpq.sizes.memory import Quantization, expert_weight_bytes, layer_weight_bytes
from llmpq.sizes.step_padding import CAPTURED_TOKENS
from llmpq.workload import DTYPE_BYTES, Dtype

GPU_FLOOR_S = 40e-6
"""Launch latency of one layer's kernels when nothing else limits it."""
CPU_FLOOR_S = 100e-6
ENQUEUE_S = 0.6e-3
"""Least time of a layer of a GPU's step that no graph holds: its host enqueues kernel by kernel
(0.61 ms at best on an H200's host, launch_s in benchmarks/data/h200-llama-3.1-8b.costs.json)."""
EXPERT_ENQUEUE_S = ENQUEUE_S / 2
"""The same of an expert that runs by itself: two products and what stands around them, of the
some ten launches of a layer. Not measured."""
TORCH_DEQUANTISES = 30
"""Bytes of a weight that torch's operators move to make it dense, beside its codes and its values:
bytes for nibbles and for their order, then float32 (counted in weights/quantized_weight.py)."""
ADDS_SHARE = 0.35
"""Share of the float32 rate at which Volta multiplies few rows of x by packed words: a V100's by
its multiprocessors and clocks, from an H200's times (docs/lab-book/kernels.md)."""
KNOT_ERROR = 0.005
"""Share by which the polyline of the experts hit may stay below the curve, which is concave."""
DEQUANT_SLOWDOWN = 1.1
"""Weight-only kernels unpack before they multiply; costs about 10 % once compute-bound."""


def estimate_costs(
    spec: ModelSpec,
    devices: Iterable[Device],
    *,
    dtype: Dtype,
    precisions: Sequence[Precision],
    kvs: Sequence[KVPrecision] = (KVPrecision.KV16,),
    quantization: Quantization,
) -> CostModel:
    """Return a cost model of every device kind, from specifications only."""
    entries: list[LatencyEntry] = []
    seen: set[str] = set()
    for device in devices:
        if device.profile_kind in seen:
            continue
        seen.add(device.profile_kind)
        for precision in precisions:
            stored = as_group_128(quantization, precision, device.spec)
            given: dict[str, Any] = {"device": device, "precision": precision, "dtype": dtype}
            given["quantization"] = stored
            coded = quantization.codes is not None
            found = [mean_of_layers(spec, partial(_prefill, **given, coded=coded))]
            found += [
                mean_of_layers(spec, partial(_decode, kv=kv, **given, coded=coded)) for kv in kvs
            ]
            enqueued = _enqueued(spec, device)
            entries += [
                one.model_copy(update={"regimes": (*one.regimes, *enqueued)}) for one in found
            ]
        entries += _ends(spec, device, dtype, quantization)
    return CostModel(model=spec.name, model_fingerprint=spec.fingerprint(), entries=tuple(entries))


def mean_of_layers(spec: ModelSpec, entry_of: Callable[[ModelSpec], LatencyEntry]) -> LatencyEntry:
    """Return the mean of the entries of a model's layers, where they mix tokens in unlike ways."""
    windows = windows_of(spec)
    if not spec.differs_in_attention and not spec.ffns:
        found = entry_of(spec)
        return found.model_copy(update={"windows": windows}) if windows else found
    kinds = Counter(map(spec.of_layer, range(spec.num_layers)))
    entries = [(entry_of(one), count / spec.num_layers) for one, count in kinds.items()]
    columns = zip(*(entry.regimes for entry, _ in entries), strict=True)
    weights = [share for _, share in entries]
    regimes = tuple(_mean_regime(column, weights) for column in columns)
    return entries[0][0].model_copy(update={"regimes": regimes, "windows": windows})


def _mean_regime(regimes: Sequence[Regime], shares: Sequence[float]) -> Regime:
    terms: dict[str, float] = {}
    for regime, share in zip(regimes, shares, strict=True):
        for term, seconds in regime.terms.items():
            terms[term] = terms.get(term, 0.0) + share * seconds
    knots = sorted({tokens for regime in regimes for tokens, _ in regime.curve})
    curve = [
        (x, sum(s * r.curve_s(x) for r, s in zip(regimes, shares, strict=True))) for x in knots
    ]
    return Regime(terms=terms, curve=tuple(curve))


def _enqueued(spec: ModelSpec, device: Device) -> tuple[Regime, ...]:
    """Return what the host takes for a layer, the mean of all, where experts run one by one: each
    waits for the device to know its tokens, so no graph holds such steps."""
    if not spec.experts or device.spec.is_cpu or device.spec.drives_tensor_cores:
        return ()
    mixtures = sum(spec.of_layer(index).experts > 0 for index in range(spec.num_layers))
    each_s = EXPERT_ENQUEUE_S * mixtures / spec.num_layers
    knots = _hit_knots(spec.experts, spec.experts_per_token)
    curve = tuple((tokens, hit * each_s) for tokens, hit in knots)
    return (Regime(terms={"1": ENQUEUE_S}, curve=curve),)


def state_bytes_moved(spec: ModelSpec, width: int) -> float:
    """Return the bytes of a request's state on a layer like `spec`'s, read and written."""
    return 2.0 * spec.recurrent.state_bytes(width) if spec.recurrent and spec.has_state(0) else 0.0


def packed_rows(device: Device, precision: Precision, dtype: Dtype, *, coded: bool) -> int | None:
    """Return the most rows for which a device reads a layer's weights as they are stored.

    None: any; 0: they are made dense for every product. `coded`: codes that are no integers.
    """
    if device.spec.is_cpu or precision.weight_bits == 16 or precision.activation_bits < 16:
        return None
    most = device.spec.most_packed_rows
    return 0 if dtype == "float32" or (coded and most is not None) else most


Curve = tuple[tuple[float, float], ...]


def _made_dense(
    spec: ModelSpec, device: Device, precision: Precision, dtype: Dtype, *, coded: bool
) -> Curve:
    """Return what making a layer's weights dense takes, by new tokens; nothing where none is.

    Of experts those that are hit, from as many tokens on as send each more rows than are packed.
    """
    most = packed_rows(device, precision, dtype, coded=coded)
    if most is None:
        return ()
    by_kernel = device.spec.most_packed_rows != 0 and dtype != "float32"
    each = 2 * DTYPE_BYTES[dtype] + (0 if by_kernel else TORCH_DEQUANTISES)
    one_s = each / bandwidth(device)
    linears = spec.linears()
    always = sum(one.num_weights for one in linears if not one.of_expert)
    curve = _from(most, ((1.0, always * one_s),))
    if spec.experts:
        expert = sum(one.num_weights for one in linears if one.name.startswith("experts.0."))
        knots = _hit_knots(spec.experts, spec.experts_per_token)
        hits = tuple((tokens, hit * expert * one_s) for tokens, hit in knots)
        curve = _sum(curve, _from(most * spec.experts // spec.experts_per_token, hits))
    return curve


def _from(tokens: int, curve: Curve) -> Curve:
    """Return a polyline that is zero up to so many tokens, and goes on level behind its end."""
    whole = Regime(terms={}, curve=(*curve, (curve[-1][0] + 1, curve[-1][1])))
    first = (tokens + 1.0, whole.curve_s(tokens + 1.0))
    rest = tuple(point for point in whole.curve if point[0] > first[0])
    level = rest or ((first[0] + 1, first[1]),)
    return (*(((float(tokens), 0.0),) if tokens else ()), first, *level)


def _sum(*curves: Curve) -> Curve:
    """Return the sum of polylines."""
    some = [Regime(terms={}, curve=curve) for curve in curves if curve]
    knots = sorted({tokens for one in some for tokens, _ in one.curve})
    return tuple((tokens, sum(one.curve_s(tokens) for one in some)) for tokens in knots)


def _adds(
    spec: ModelSpec, device: Device, precision: Precision, dtype: Dtype, coded: bool
) -> Curve:
    """Return what few rows take by fused multiply-adds, on GPUs that have no other way."""
    most = packed_rows(device, precision, dtype, coded=coded)
    if not most or device.spec.capability != "7.0":
        return ()
    rate = (device.spec.fp32_tflops or device.spec.fp16_tflops / 2) * 1e12 * ADDS_SHARE
    row_s = _linear_flops(spec) / (rate * _share(device))
    return ((1.0, row_s), (float(most), most * row_s), (most + 1.0, most * row_s))


def attention_flops(spec: ModelSpec) -> float:
    """Return the operations of a pair of tokens, halved as attention is causal."""
    if spec.indexer is not None:
        return (chosen_pair_flops(spec) + index_pair_flops(spec)) / 2
    return 2.0 * spec.heads * spec.head_dim if spec.attends(0) else 0.0


def rate_flops(device: Device, precision: Precision, dtype: Dtype) -> float:
    """Return the matrix rate a precision reaches on a device, in flop/s."""
    spec = device.spec
    peak = spec.fp16_tflops
    if dtype == "float32":
        peak = spec.fp32_tflops or spec.fp16_tflops / 2
    elif precision is Precision.W8A8:
        peak = spec.int8_tops or spec.fp16_tflops
    elif precision is Precision.W4A4:
        peak = spec.int4_tops or spec.int8_tops or spec.fp16_tflops
    slowdown = DEQUANT_SLOWDOWN if precision.weight_bits < 16 else 1.0
    return peak * 1e12 * spec.matmul_efficiency * _share(device) / slowdown


def bandwidth(device: Device) -> float:
    """Return the memory bandwidth a device reaches, in bytes/s."""
    return device.spec.mem_gbps * 1e9 * device.spec.memory_efficiency


def _share(device: Device) -> float:
    """Return how many times the spec's compute a device has: CPU threads, or a share of the SMs."""
    if device.threads:
        return float(device.threads)
    if device.emulate is not None and device.emulate.sms and device.spec.sms:
        return min(1.0, device.emulate.sms / device.spec.sms)
    return 1.0


def _floor(spec: DeviceSpec) -> float:
    return CPU_FLOOR_S if spec.is_cpu else GPU_FLOOR_S


def _linear_flops(spec: ModelSpec) -> float:
    """Flops of one token through one layer's matrices; of experts, through those it is sent to."""
    own = spec.recurrent.flops() if spec.recurrent and spec.has_state(0) else 0.0
    return 2.0 * spec.weights_per_token + own


def experts_hit(experts: int, per_token: int, tokens: float) -> float:
    """Return how many of a layer's experts a number of tokens is expected to be sent to."""
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


@cache
def _hit_knots(experts: int, per_token: int) -> tuple[tuple[float, float], ...]:
    """Return (tokens, experts hit) between which straight lines are within KNOT_ERROR; then all."""
    hits = np.empty(0)

    def near(low: int, high: int) -> bool:
        nonlocal hits
        while len(hits) <= high:
            more = range(len(hits), 2 * high)
            hits = np.append(hits, [experts_hit(experts, per_token, v) for v in more])
        start, end, between = hits[low], hits[high], np.arange(1, high - low)
        line = start + (end - start) * between / (high - low)
        return bool((line >= (1 - KNOT_ERROR) * hits[low + 1 : high]).all())

    knots, at = [(1.0, float(per_token))], 1
    while experts - knots[-1][1] > KNOT_ERROR * experts:
        after = at + 1
        while near(at, after + 1):
            after += 1
        knots.append((float(after), experts_hit(experts, per_token, after)))
        at = after
    return (*knots, (at + 1.0, float(experts)), (at + 2.0, float(experts)))


def _weight_reads(
    spec: ModelSpec, precision: Precision, dtype: Dtype, quantization: Quantization
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Return the bytes every pass reads, and those of the experts by the number of tokens."""
    width = DTYPE_BYTES[dtype]
    weights = layer_weight_bytes(spec, precision, quantization, width)
    if not spec.experts:
        return float(weights), ()
    expert = expert_weight_bytes(spec, precision, quantization, width)
    knots = _hit_knots(spec.experts, spec.experts_per_token)
    return float(weights - spec.experts * expert), tuple((v, hit * expert) for v, hit in knots)


def _prefill(
    spec: ModelSpec,
    device: Device,
    precision: Precision,
    dtype: Dtype,
    quantization: Quantization,
    coded: bool,
) -> LatencyEntry:
    width = DTYPE_BYTES[dtype]
    dense = _made_dense(spec, device, precision, dtype, coded=coded)
    weights, experts = _weight_reads(spec, precision, dtype, quantization)
    activations = 12.0 * spec.hidden * width
    attention = attention_flops(spec)
    floor, rate, speed = (
        _floor(device.spec),
        rate_flops(device, precision, dtype),
        bandwidth(device),
    )
    by_tensor_cores = device.spec.is_cpu or device.spec.drives_tensor_cores
    plain = rate_flops(device, Precision.W16A16, dtype if by_tensor_cores else "float32")
    memory = Regime(
        terms={"1": floor + weights / speed, "v*s": activations / speed},
        curve=_sum(_over(experts, speed), dense),
    )
    packed = precision.weight_bits < 16
    compute = Regime(
        terms={
            "1": floor + (weights / speed if packed else 0.0),
            "v*s": _linear_flops(spec) / rate,
            "v*s^2": attention / plain,
        },
        curve=_sum(_over(experts, speed), dense) if packed else (),
    )
    regimes = [_with_sums(one, spec, device, width, Phase.PREFILL) for one in (memory, compute)]
    if not device.spec.is_cpu:
        captured = float(CAPTURED_TOKENS)
        regimes.append(
            Regime(
                terms={},
                curve=((captured, 0.0), (captured + 1, ENQUEUE_S), (captured + 2, ENQUEUE_S)),
            )
        )
    entry = _entry(device, "layer", Phase.PREFILL, precision, dtype, *regimes)
    return _unpadded(spec, _of_chosen_keys(spec, device, entry))


def _decode(
    spec: ModelSpec,
    kv: KVPrecision,
    device: Device,
    precision: Precision,
    dtype: Dtype,
    quantization: Quantization,
    coded: bool,
) -> LatencyEntry:
    width = DTYPE_BYTES[dtype]
    dense = _made_dense(spec, device, precision, dtype, coded=coded)
    weights, experts = _weight_reads(spec, precision, dtype, quantization)
    kv_token = kv_token_bytes(spec, kv, width)
    floor, rate, speed = (
        _floor(device.spec),
        rate_flops(device, precision, dtype),
        bandwidth(device),
    )
    reading = {"v*(t+s)": kv_token / speed}
    state = {"v": state_bytes_moved(spec, width) / speed}
    terms = {"1": floor + weights / speed, **reading, **(state if state["v"] else {})}
    memory = Regime(terms=terms, curve=_sum(_over(experts, speed), dense))
    compute = Regime(terms={"1": floor, "v": _linear_flops(spec) / rate, **reading}, curve=dense)
    regimes = [memory, compute]
    adds = _adds(spec, device, precision, dtype, coded)
    if adds:
        regimes.append(Regime(terms={"1": floor, **reading}, curve=adds))
    summed = [_with_sums(regime, spec, device, width, Phase.DECODE) for regime in regimes]
    entry = _entry(device, "layer", Phase.DECODE, precision, dtype, *summed, kv=kv)
    return _unpadded(spec, _of_chosen_keys(spec, device, entry))


def _with_sums(regime: Regime, spec: ModelSpec, device: Device, width: int, phase: Phase) -> Regime:
    """Return what a layer takes with its sums over devices that share it."""
    if len(device.shares) < 2:
        return regime
    count = sums_of_layer(spec, device.shares)
    return with_sums(regime, estimated_sum(device, phase), spec.hidden * width, count)


def _of_chosen_keys(spec: ModelSpec, device: Device, entry: LatencyEntry) -> LatencyEntry:
    """Return a layer's entry with what a GPU's indexer leaves of keys."""
    chosen = chosen_keys(spec, of_pairs=entry.phase is Phase.PREFILL)
    return entry if device.spec.is_cpu else entry.model_copy(update={"windows": chosen})


def _unpadded(spec: ModelSpec, entry: LatencyEntry) -> LatencyEntry:
    """Return a layer's entry without padding if it has experts: padding is sent to no others."""
    return entry.model_copy(update={"padding": "none"}) if spec.experts else entry


def kv_token_bytes(spec: ModelSpec, kv: KVPrecision, width: int) -> float:
    """Return the bytes of a layer's cache that a token takes, scales among them."""
    if not spec.attends(0):
        return 0.0
    tokens = 1024
    return (
        kv_cache_bytes(
            kv,
            slots=1,
            max_len=tokens,
            kv_heads=spec.kv_heads,
            vectors=spec.kv_vectors,
            head_dim=spec.head_dim,
            dtype_bytes=width,
        )
        / tokens
    )


def _over(reads: tuple[tuple[float, float], ...], speed: float) -> tuple[tuple[float, float], ...]:
    """Return the seconds that reading bytes takes, point by point."""
    return tuple((tokens, num_bytes / speed) for tokens, num_bytes in reads)


def _ends(
    spec: ModelSpec, device: Device, dtype: Dtype, quantization: Quantization
) -> list[LatencyEntry]:
    """Embedding and head, both phases; the head works on the last position of each request.

    Of devices that share a stage the first has it alone.
    """
    kind = device.profile_kind
    device = replace(device.joined[0], profile_kind=kind) if device.joined else device
    width, speed = DTYPE_BYTES[dtype], bandwidth(device)
    floor = _floor(device.spec)
    token = 3.0 * spec.hidden * width / speed
    rows = Regime(terms={"1": floor / 4, "v*s": token})
    row = Regime(terms={"1": floor / 4, "v": token})
    plain = Precision.W16A16
    entries = [
        _entry(device, "embedding", Phase.PREFILL, plain, dtype, rows),
        _entry(device, "embedding", Phase.DECODE, plain, dtype, row),
    ]
    for precision in quantization.heads(on_cpu=device.spec.is_cpu):
        regimes = _head(spec, device, dtype, quantization.scheme(precision))
        entries += [
            _entry(device, "head", phase, precision, dtype, *regimes)
            for phase in (Phase.PREFILL, Phase.DECODE)
        ]
    return entries


def _head(
    spec: ModelSpec, device: Device, dtype: Dtype, scheme: WeightScheme | None
) -> tuple[Regime, Regime]:
    """Return what an output matrix takes: its bytes read, its products."""
    width, floor, matrix = DTYPE_BYTES[dtype], _floor(device.spec), spec.vocab * spec.hidden
    stored = matrix * width if scheme is None else scheme.nbytes(spec.vocab, spec.hidden, width)
    read = (spec.head_params - matrix) * width + stored
    slower = 1.0 if scheme is None else DEQUANT_SLOWDOWN
    rate = rate_flops(device, Precision.W16A16, dtype)
    return (
        Regime(terms={"1": floor + read / bandwidth(device)}),
        Regime(terms={"1": floor, "v": 2.0 * matrix * slower / rate}),
    )


def _entry(
    device: Device,
    part: Part,
    phase: Phase,
    precision: Precision,
    dtype: Dtype,
    *regimes: Regime,
    kv: KVPrecision = KVPrecision.KV16,
) -> LatencyEntry:
    return LatencyEntry(
        device_kind=device.profile_kind,
        part=part,
        phase=phase,
        precision=precision,
        kv=kv,
        dtype=dtype,
        regimes=regimes,
        padding="cpu" if device.spec.is_cpu else "gpu",
        source="estimated",
    )
