"""What to say when nothing fits: which device is short by how much, and the smallest way out.

Feasibility is counted, not searched: with every layer at the fewest bytes and micro-batches of one,
a set of devices holds a model when its capacities, in layers, add up to L. Looks at bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from llmpq.cluster import Device
from llmpq.planner.costs.stage_memory import layer_bytes
from llmpq.planner.formulation.problem import Problem
from llmpq.precision import WEIGHT_ONLY, KVPrecision
from llmpq.units import format_size


@dataclass(frozen=True, kw_only=True)
class StageRoom:
    """How many layers fit at most, and what the rest would take."""

    layers: int
    device: Device
    """The device that is closest to holding what is missing."""
    missing_bytes: int


def too_big(p: Problem) -> bool:
    """Whether no plan can fit, at any precision, order and micro-batches: nothing to search."""
    return room(p).layers < p.spec.num_layers


def room(p: Problem) -> StageRoom:
    """Return how much of the model fits at the fewest bits and the smallest micro-batches."""
    eta, xi = p.prefill_microbatch or 1, p.decode_microbatch or 1
    table, unit = p.capacity(eta, xi).max(axis=-1), int(layer_bytes(p).min())
    devices = [(index, d) for index, cls in enumerate(p.classes) for d in cls.devices]
    most = min(len(devices), p.max_devices or len(devices))
    found: StageRoom | None = None
    for first, last in _ends([index for index, _ in devices]):
        rooms = [
            int(table[index, int(k == first), int(k == last)])
            for k, (index, _) in enumerate(devices)
        ]
        held = [max(0, bytes_left // unit) for bytes_left in rooms]
        some = [first] if first == last else list(range(len(devices)))
        used = sorted(some, key=lambda k: -held[k])[:most]
        total = sum(held[k] for k in used)
        lacking = max(0, p.spec.num_layers - total)
        needs = {k: (held[k] + lacking) * unit - rooms[k] for k in used}
        nearest = min(used, key=lambda k: needs[k])
        if found is None or total > found.layers:
            missing = max(0, needs[nearest]) if lacking else 0
            found = StageRoom(layers=total, device=devices[nearest][1], missing_bytes=missing)
    assert found is not None, "a cluster has at least one device"
    return found


def _ends(class_of: list[int]) -> list[tuple[int, int]]:
    """Return which devices can be first and last stage, one pair of devices per pair of classes.

    A device that is both is the only stage, for which it may have more room than for either.
    """
    members: dict[int, list[int]] = {}
    for device, cls in enumerate(class_of):
        members.setdefault(cls, []).append(device)
    several = [
        (a[-1], b[-1] if a is not b else b[-2])
        for a, b in product(members.values(), repeat=2)
        if a is not b or len(a) > 1
    ]
    return several + [(a[-1], a[-1]) for a in members.values()]


def explain_infeasible(p: Problem) -> str:
    """Return one sentence: the short device, the missing bytes, the smallest changes that fit."""
    found = room(p)
    if found.layers >= p.spec.num_layers and p.offered:
        return (
            f"{p.spec.name} does not fit {p.cluster.name} with every layer as it is stored; give a "
            "smaller --global-bz, add a device, or quantise it to fewer bits with llmpq-quantize"
        )
    if found.layers >= p.spec.num_layers:
        return (
            f"{p.spec.name} fits {p.cluster.name} only without the --pin, --max-devices, --group "
            "or --quality-budget given; loosen one of them"
        )
    short = f"{found.device.name} is short by {format_size(found.missing_bytes)}"
    ways = [way for way in (_fewer_bits(p), _smaller_kv(p), _smaller_batch(p)) if way]
    remedy = ", or ".join(ways) if ways else "add a device or take a smaller model"
    return f"{p.spec.name} does not fit {p.cluster.name}: {short}: {remedy}"


def _fewer_bits(p: Problem) -> str:
    """`3-bit on 5 layers`, if bits that were not allowed would make it fit."""
    if p.offered:  # stored bits stay as they are
        return ""
    now = int(layer_bytes(p).min())
    missing = (p.spec.num_layers - room(p).layers) * now
    for precision in sorted(WEIGHT_ONLY, key=lambda c: -c.weight_bits):
        lower = p.with_changes(choices=(precision,))
        then = int(layer_bytes(lower).min())
        if then >= now or room(lower).layers < p.spec.num_layers:
            continue
        count = min(p.spec.num_layers, -(-missing // (now - then)))
        return f"{precision.weight_bits}-bit on {count} layers (--bits)"
    return ""


def _smaller_kv(p: Problem) -> str:
    """`KV at 8 bit`, if that alone makes it fit."""
    for kv in (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2):
        if kv.bits < p.kv.bits and _fits_with(p, kv=kv):
            return f"KV at {kv.bits} bit (--kv {kv.bits})"
    return ""


def _smaller_batch(p: Problem) -> str:
    """`batch 24`, the largest batch that fits, if any does."""
    low, high = 0, p.workload.batch
    while low < high - 1:
        middle = (low + high) // 2
        if _fits_with(p, batch=middle):
            low = middle
        else:
            high = middle
    return f"batch {low} (--global-bz {low})" if low else ""


def _fits_with(p: Problem, **changes: object) -> bool:
    work = p.workload.model_copy(update=changes)
    free = p.with_changes(workload=work, prefill_microbatch=None, decode_microbatch=None)
    return room(free).layers >= p.spec.num_layers
