"""What sums over devices that share a stage take: seconds by the bytes of a step's hidden states.

Estimated from the link between the devices: its latency, and a ring's share of the bytes at its
rate. Between GPUs that are no peers bytes go through the host's memory. Of decoded tokens, which
are few bytes, they then pass at the rates of two and of four RTX 3090 on PCIe 3.0 x16, of which
others published step times (docs/lab-book/planner.md), and the fewest at half of it, for NCCL sends
them with as many flags (its LL protocol). Of prompts they are taken to pass at half the link's
rate: in and out of that memory. That is not measured.
"""

from __future__ import annotations

from llmpq.costs.cost_model import Phase, Regime
from llmpq.devices.cluster import Device
from llmpq.devices.joined_devices import PEER_GBPS, members_of
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.imported import Curve, summed

PAIR_GBPS, MORE_GBPS = 32.0, 14.0
"""Rates of sums of decoded tokens at most, over two GPUs that are no peers and over more."""
FLAGGED_BYTES = 128 << 10
"""Bytes up to which they pass at half of that; from twice as many on they pass at all of it."""


def estimated_sum(group: Device, phase: Phase) -> Curve:
    """Return (bytes, seconds) of one sum over a group's devices, by their link."""
    link, count = group.sum_link, len(group.shares)
    assert link is not None, "of devices that share stages"
    ring = 2.0 * (count - 1) / count
    least, most = float(FLAGGED_BYTES), 2.0 * FLAGGED_BYTES
    if link.gbps >= PEER_GBPS or group.joined[0].spec.is_cpu:
        return (0.0, link.seconds(0)), (most, link.seconds(ring * most))
    if phase is Phase.PREFILL:
        half = link.model_copy(update={"gbps": link.gbps / 2})
        return (0.0, half.seconds(0)), (most, half.seconds(ring * most))
    rate = min(link.gbps, PAIR_GBPS if count == 2 else MORE_GBPS)
    few = link.model_copy(update={"gbps": rate})
    level, after = few.seconds(ring * most), few.seconds(ring * 2 * most)
    return (0.0, few.seconds(0)), (least, level), (most, level), (2 * most, after)


def sums_of_layer(spec: ModelSpec, shares: tuple[int, ...]) -> float:
    """Return how many sums a layer has, the mean of a model's: one behind each part that is cut."""
    member, layers = members_of(spec, shares)[0], range(spec.num_layers)
    attention = member.heads is not None and sum(map(spec.attends, layers))
    mlps = member.cuts_mlps and sum(spec.of_layer(layer).has_mlp for layer in layers)
    return (attention + mlps) / spec.num_layers


def with_sums(regime: Regime, sum_times: Curve, token_bytes: int, sums: float) -> Regime:
    """Return what a layer takes with so many sums of its tokens' hidden states."""
    own = tuple((size / token_bytes, sums * seconds) for size, seconds in sum_times)
    curves = [curve for curve in (regime.curve, own) if curve]
    return regime.model_copy(update={"curve": summed(curves)})
