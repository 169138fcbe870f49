"""Tables of a profile for people: errors beside every fit, links, an indicator's layers."""

from __future__ import annotations

from collections import Counter

from rich.box import SIMPLE
from rich.table import Table

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase
from llmpq.profiler.timing.cases import Target
from llmpq.profiler.timing.profile_host import HostProfile
from llmpq.sensitivity import Sensitivity
from llmpq.units import format_size


def profile_tables(outcome: HostProfile) -> list[Table]:
    """Return a table a device kind, one line an entry: held-out error, noise, example, range."""
    tables = []
    for kind in outcome.costs.device_kinds:
        title = f"{outcome.costs.model} on {kind}, {outcome.copies[kind]} at once"
        table = Table(title=title, box=SIMPLE)
        table.add_column("part", no_wrap=True)
        for name in ("error", "p95", "noise", "example"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("sampled", no_wrap=True)
        for entry in outcome.costs.entries:
            if entry.device_kind == kind:
                table.add_row(*_entry_cells(entry, outcome.noise))
        tables.append(table)
    return tables


def links_table(costs: CostModel) -> Table:
    """Return one line a link: latency and bandwidth of one message."""
    table = Table(title="links between two processes of this host", box=SIMPLE)
    for name in ("from", "to"):
        table.add_column(name)
    for name in ("latency", "bandwidth"):
        table.add_column(name, justify="right")
    for link in costs.links:
        rate = f"{1e-9 / link.beta_s_per_byte:.2f} GB/s" if link.beta_s_per_byte else "no limit"
        table.add_row(link.source_kind, link.target_kind, format_time(link.alpha_s), rate)
    return table


def sums_table(costs: CostModel) -> Table:
    """Return one line a group of devices: what a sum of few and of many bytes takes."""
    table = Table(title="sums over devices that share a stage", box=SIMPLE)
    table.add_column("devices")
    for name in ("of one token", "of the most tokens"):
        table.add_column(name, justify="right")
    for one in costs.sums:
        kinds = Counter(one.kinds)
        devices = " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
        (_, least), (size, most) = one.times[0], one.times[-1]
        table.add_row(devices, format_time(least), f"{format_size(size)}: {format_time(most)}")
    return table


def node_links_table(costs: CostModel) -> Table:
    """Return one line a direction between two nodes."""
    table = Table(title="links between hosts, each direction", box=SIMPLE)
    for name in ("from", "to"):
        table.add_column(name)
    for name in ("latency", "occupied", "bandwidth"):
        table.add_column(name, justify="right")
    for link in costs.node_links:
        rate = f"{8e-6 / link.beta_s_per_byte:.0f} Mb/s" if link.beta_s_per_byte else "no limit"
        times = format_time(link.alpha_s), format_time(link.occupied_s)
        table.add_row(link.source, link.target, *times, rate)
    return table


MOST_KV = 4
"""Columns of KV precisions that a terminal has room for."""


def omega_table(sensitivity: Sensitivity) -> Table:
    """Return one line a layer: omega of each weight and KV precision, of many those alone that
    have as many bits for keys as for values."""
    many = len(sensitivity.kv) > MOST_KV
    table = Table(
        title=f"{sensitivity.model}: omega, {sensitivity.indicator} indicator",
        caption="KV of more bits for keys than for values: in the file" if many else None,
        box=SIMPLE,
    )
    table.add_column("layer", justify="right")
    columns = {**{p.value: v for p, v in sensitivity.weights.items()}}
    kv_columns = {kv: v for kv, v in sensitivity.kv.items() if not (many and kv.is_apart)}
    columns.update({kv.value: v for kv, v in kv_columns.items()})
    for name in columns:
        table.add_column(name, justify="right")
    for layer in range(sensitivity.num_layers):
        table.add_row(str(layer), *(f"{values[layer]:.4g}" for values in columns.values()))
    return table


def format_time(seconds: float) -> str:
    """Return a time with three digits: `12.3 us`, `1.20 ms`."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def _entry_cells(entry: LatencyEntry, noise: dict[Target, float]) -> tuple[str, ...]:
    target = Target(
        device_kind=entry.device_kind,
        part=entry.part,
        phase=entry.phase,
        precision=entry.precision,
        kv=entry.kv,
        dtype=entry.dtype,
        shares=entry.shares,
    )
    error, (v, length) = entry.held_out_error, _example(entry)
    assert error is not None and entry.sampled_v is not None
    seconds = format_time(entry.seconds(v=v, length=length))
    return (
        target.title.removeprefix(f"{entry.device_kind} "),
        f"{error.mean:.1%}",
        f"{error.p95:.0%}",
        f"{noise[target]:.0%}",
        f"{v}x{length}: {seconds}" if entry.sampled_length else f"{v}: {seconds}",
        _range(entry.sampled_v) + (f"x{_range(r)}" if (r := entry.sampled_length) else ""),
    )


def _example(entry: LatencyEntry) -> tuple[int, int]:
    assert entry.sampled_v is not None
    length = entry.sampled_length or (1, 1)
    return min(8, entry.sampled_v[1]), min(128 if entry.phase is Phase.PREFILL else 512, length[1])


def _range(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"
