"""GPTQModel: precision per layer as a quantize config, for a checkpoint that it writes.

Grids are symmetric: vLLM and Marlin do not read a checkpoint with zero points.
"""

from __future__ import annotations

import json
from typing import Any

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.export.result import (
    Exported,
    by_precision,
    kv_line,
    layers_pattern,
    microbatch_line,
    outliers_line,
    quantised,
    ranges,
    said,
    stages_line,
    zeros_line,
)
from llmpq.plans.plan import Plan
from llmpq.precision import Precision


def gptqmodel(plan: Plan, spec: ModelSpec) -> Exported:
    """Return GPTQModel's quantize config: `dynamic` rules per layer over the commonest bits."""
    table = quantised(plan, "GPTQModel")
    base = max(table, key=lambda p: len(table[p]))
    common = _grid(plan, base)
    dynamic: dict[str, dict[str, Any]] = {}
    plain = by_precision(plan).get(Precision.W16A16)
    if plain:
        dynamic[f"-:{layers_pattern(spec.family, plain, spec.num_layers)}"] = {}
    for precision, layers in table.items():
        own = {key: of for key, of in _grid(plan, precision).items() if of != common[key]}
        if own:
            dynamic[f"+:{layers_pattern(spec.family, layers, spec.num_layers)}"] = own
    config = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        **common,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "dynamic": dynamic,
    }
    rounded = [
        f"activation bits of {precision.value} on layers {ranges(layers)}: GPTQ is weight-only"
        for precision, layers in table.items()
        if precision.activation_bits < 16
    ]
    missing = said(
        stages_line(plan),
        microbatch_line(plan),
        kv_line(plan),
        *rounded,
        outliers_line(plan),
        zeros_line(plan),
        f"serving layers {ranges(table[Precision.W3A16])} at 3 bits with vLLM: it reads GPTQ at "
        "4 and 8 bits, and 3 bits in a checkpoint of --to compressed-tensors"
        if Precision.W3A16 in table
        else None,
    )
    return Exported(text=json.dumps(config, indent=1) + "\n", not_expressed=missing)


def _grid(plan: Plan, precision: Precision) -> dict[str, Any]:
    """Return bits and group size of a precision as this plan stores it."""
    scheme = plan.settings().scheme(precision)
    assert scheme is not None
    size = scheme.group_size
    return {"bits": scheme.bits, "group_size": -1 if size is None else size}
