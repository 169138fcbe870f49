"""`flexgen`: what offloading would take, estimated; not a plan this project runs.

Layers are split evenly over the devices in the order given, at the most precise choice there is (16
bits, unless --bits leaves them out) or the fastest within a budget. What does not fit a device
lives in host memory or on disk; a linear program chooses which share of weights and KV is where, so
that the slowest of computing, reading over PCIe and reading from disk is fastest (they overlap).
Generation goes through a layer for the whole block of requests before the next (FlexGen's zig-zag),
so weights are read once per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.costs.cost_model import Phase
from llmpq.devices.cluster import Device
from llmpq.planner.baselines.uniform import by_precision
from llmpq.planner.costs.cost_book import mean_decode_s
from llmpq.planner.ilp.milp import LinearModel, solve_milp
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import DENSE, PACKED
from llmpq.precision import Precision
from llmpq.sizes.kv_format import kv_cache_bytes
from llmpq.sizes.memory import layer_weight_bytes

PCIE_GBPS = 12.0
"""Host to device, 1e9 bytes/s: what FlexGen measured on a T4 (PCIe 3 x16)."""
DISK_GBPS = 2.0
"""NVMe reads, 1e9 bytes/s."""
HOST_BYTES = 100 * 2**30
"""Host memory a device's share of the node can use."""


@dataclass(frozen=True, kw_only=True)
class OffloadEstimate:
    """Predicted time of the offloaded job, and how much of it stays where it is computed."""

    total_s: float
    on_device: float
    """Share of all weights and KV that stay on devices."""
    precision: str
    """The precision of every layer, such as `w16a16`."""
    sum_omega: float


def estimate_flexgen(p: Problem, budget: float | None = None) -> OffloadEstimate:
    """Return the estimate: prefill and n-1 decode steps of an even, offloading pipeline.

    With a `budget` of the sum of omega, at the precision within it that is the fastest.
    """
    if budget is None:
        return _estimate(p, by_precision(p)[0])
    each = [_estimate(p, choice) for choice in by_precision(p, budget)]
    return min(each, key=lambda estimate: estimate.total_s)


def _estimate(p: Problem, choice: int) -> OffloadEstimate:
    devices = p.cluster.devices
    share = -(-p.spec.num_layers // len(devices))
    each = [_stage(p, cls.first, share, p.choices[choice]) for cls in p.classes]
    stages = [each[c] for c, cls in enumerate(p.classes) for _ in cls.devices]
    prefills, decodes, shares_held = zip(*stages, strict=True)
    mp = md = len(devices)  # the batch is cut by the number of stages, as in the paper
    prefill = sum(prefills) + (mp - 1) * max(prefills)
    decode = max(md * max(decodes), sum(decodes))
    held = sum(shares_held) / len(stages)
    steps = max(0, p.workload.gen_len - 1)
    return OffloadEstimate(
        total_s=prefill + steps * decode,
        on_device=held,
        precision=p.choices[choice].value,
        sum_omega=float(p.omega[:, choice].sum()),
    )


def _stage(
    p: Problem, device: Device, layers: int, precision: Precision
) -> tuple[float, float, float]:
    """Return prefill and decode seconds of one micro-batch, and the share on the device."""
    work = p.workload
    micro = -(-work.batch // len(p.cluster.devices))
    weights = layers * layer_weight_bytes(p.spec, precision, p.quantization, work.dtype_bytes)
    kv = layers * kv_cache_bytes(
        work.kv,
        slots=work.batch,
        max_len=work.max_len,
        kv_heads=p.spec.kv_heads,
        vectors=p.spec.kv_vectors,
        head_dim=p.spec.head_dim,
        dtype_bytes=work.dtype_bytes,
    )
    sort = PACKED if precision.weight_bits < 16 else DENSE
    index = next(i for i, c in enumerate(p.classes) if device in c.devices)
    room = max(0, int(p.capacity(micro, micro)[index, :, :, sort].min()))
    prefill_entry = p.costs.entry(device, "layer", Phase.PREFILL, work, precision)
    decode_entry = p.costs.entry(device, "layer", Phase.DECODE, work, precision)
    compute_prefill = layers * prefill_entry.seconds(v=micro, length=work.prompt_len)
    compute_decode = layers * mean_decode_s(decode_entry, work, micro)
    model = LinearModel()
    time_left = model.variable("seconds", cost=1.0)
    shares = {
        (what, where): model.variable(f"{what}_{where}")
        for what in ("weights", "kv")
        for where in ("device", "host", "disk")
    }
    sizes = {"weights": float(weights), "kv": float(kv)}
    for what in sizes:
        places = [(shares[what, w], 1.0) for w in ("device", "host", "disk")]
        model.equal(f"all_{what}", places, 1.0)
    for where, limit in (("device", room), ("host", HOST_BYTES)):
        used = [(shares[what, where], sizes[what] / 2**30) for what in sizes]
        model.at_most(f"room_{where}", used, limit / 2**30)
    # Per micro-batch: weights are read once per token for the block, KV of this micro-batch only.
    per_step = {"weights": weights * micro / work.batch, "kv": kv * micro / work.batch}
    roads: tuple[tuple[str, float, tuple[str, ...]], ...] = (
        ("pcie", PCIE_GBPS, ("host", "disk")),
        ("disk", DISK_GBPS, ("disk",)),
    )
    for name, speed, sources in roads:
        moved = [
            (shares[what, w], -per_step[what] / (speed * 1e9)) for what in sizes for w in sources
        ]
        model.at_least(name, [(time_left, 1.0), *moved], 0.0)
    model.at_least("compute", [(time_left, 1.0)], compute_decode)
    result = solve_milp(model, relax=True)
    assert result.values is not None, "disk is unbounded, so the program has a solution"
    held = sum(result.values[shares[w, "device"]] * sizes[w] for w in sizes) / (weights + kv)
    streamed = per_step["weights"] * (1 - result.values[shares["weights", "device"]])
    prefill = max(compute_prefill, streamed / (PCIE_GBPS * 1e9))
    decode = float(result.values[time_left])
    return prefill, decode if math.isfinite(decode) else math.inf, float(held)
