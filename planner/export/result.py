"""What an exporter returns, and facts about a plan that several of them state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from llmpq.plan import Plan
from llmpq.precision import KVPrecision, Precision


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The text for the engine, and what it cannot say."""

    text: str
    not_expressed: tuple[str, ...]


def layer_counts(plan: Plan) -> list[int]:
    """Return the number of layers of each stage."""
    return [stage.num_layers for stage in plan.stages]


def by_precision(plan: Plan) -> dict[Precision, list[int]]:
    """Return the layers at each precision, most bits first."""
    table: dict[Precision, list[int]] = {}
    for layer, precision in enumerate(plan.precisions):
        table.setdefault(precision, []).append(layer)
    return dict(sorted(table.items(), key=lambda item: -item[0].weight_bits))


def ranges(layers: list[int]) -> str:
    """Return `0-3,7` for [0, 1, 2, 3, 7]."""
    runs = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    spans = [[layer for _, layer in run] for _, run in runs]
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def precision_line(plan: Plan) -> str | None:
    """Say which layers have which precision, None when all are unquantised."""
    table = by_precision(plan)
    if set(table) == {Precision.W16A16}:
        return None
    return "; ".join(f"{p.value}: layers {ranges(layers)}" for p, layers in table.items())


def microbatch_line(plan: Plan) -> str:
    """Say the micro-batches, which other engines' schedulers choose themselves."""
    return (
        f"micro-batches (prefill {plan.prefill_microbatch}, decode {plan.decode_microbatch}): the "
        "engine's scheduler decides"
    )


def kv_line(plan: Plan) -> str | None:
    """Say the KV precision, None when it is the engine's default."""
    kv = plan.workload.kv
    return None if kv is KVPrecision.KV16 else f"KV cache at {kv.bits} bit"
