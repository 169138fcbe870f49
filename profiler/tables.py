"""What a person sees of a profile: errors beside every fit, links, an indicator's layers."""

from __future__ import annotations

from rich.table import Table

from llmpq.cost_model import CostModel, LatencyEntry, Phase
from llmpq.profiler.messages import Target
from llmpq.profiler.session import Outcome
from llmpq.sensitivity import Sensitivity


def profile_table(outcome: Outcome) -> Table:
    """Return one line an entry: an example time, held-out error, noise, sampled range."""
    table = Table(title=f"{outcome.costs.model}: measured costs")
    for name in ("device", "part", "phase", "weights", "KV"):
        table.add_column(name)
    for name in ("samples", "error", "p95", "noise", "regimes", "example"):
        table.add_column(name, justify="right")
    table.add_column("sampled v x length")
    for entry in outcome.costs.entries:
        table.add_row(*_entry_cells(entry, outcome.noise))
    return table


def links_table(costs: CostModel) -> Table:
    """Return one line a link: latency and bandwidth of one message."""
    table = Table(title="links between two processes of this host")
    for name in ("from", "to"):
        table.add_column(name)
    for name in ("latency", "bandwidth"):
        table.add_column(name, justify="right")
    for link in costs.links:
        rate = f"{1e-9 / link.beta_s_per_byte:.2f} GB/s" if link.beta_s_per_byte else "no limit"
        table.add_row(link.source_kind, link.target_kind, format_time(link.alpha_s), rate)
    return table


def omega_table(sensitivity: Sensitivity) -> Table:
    """Return one line a layer: omega of each weight and KV precision."""
    table = Table(title=f"{sensitivity.model}: omega, {sensitivity.indicator} indicator")
    table.add_column("layer", justify="right")
    columns = {**{p.value: v for p, v in sensitivity.weights.items()}}
    columns.update({kv.value: v for kv, v in sensitivity.kv.items()})
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
    )
    is_layer, error = entry.part == "layer", entry.held_out_error
    v, length = _example(entry)
    assert error is not None and entry.sampled_v is not None
    return (
        entry.device_kind,
        entry.part,
        entry.phase.value,
        entry.precision.value if is_layer else "",
        entry.kv.value if is_layer else "",
        str(error.samples),
        f"{error.mean:.1%}",
        f"{error.p95:.1%}",
        f"{noise[target]:.1%}",
        str(len(entry.regimes)),
        f"{format_time(entry.seconds(v=v, length=length))} at {v}x{length}",
        _range(entry.sampled_v) + (f" x {_range(r)}" if (r := entry.sampled_length) else ""),
    )


def _example(entry: LatencyEntry) -> tuple[int, int]:
    assert entry.sampled_v is not None
    length = entry.sampled_length or (1, 1)
    return min(8, entry.sampled_v[1]), min(128 if entry.phase is Phase.PREFILL else 512, length[1])


def _range(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}..{ends[1]}"
