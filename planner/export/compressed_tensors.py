"""compressed-tensors: precision per layer as a checkpoint's `quantization_config`.

It describes a checkpoint that the library's own tools write from the 16-bit weights. Grids are
symmetric: Transformers 5 refuses the packed zeros of compressed-tensors 0.20 unless it is asked to
dequantise. The KV cache is the server's to choose: vLLM refuses a cache of integers here.
"""

from __future__ import annotations

import json
from typing import Any

from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.export.result import (
    Exported,
    by_precision,
    kv_line,
    layers_pattern,
    microbatch_line,
    outliers_line,
    quantised,
    said,
    stages_line,
    zeros_line,
)
from llmpq.planner.export.vllm import CACHE_TYPES
from llmpq.plans.plan import Plan
from llmpq.precision import Precision, WeightScheme


def compressed_tensors(plan: Plan, spec: ModelSpec) -> Exported:
    """Return `quantization_config`: a group of layers per precision, by regular expression."""
    table = quantised(plan, "compressed-tensors")
    groups: dict[str, Any] = {}
    for precision, layers in table.items():
        scheme = plan.settings().scheme(precision)
        assert scheme is not None
        _require_whole_groups(spec, scheme, precision)
        groups[f"group_{len(groups)}"] = {
            "targets": [f"re:{layers_pattern(spec.family, layers, spec.num_layers)}"],
            "weights": _weights(scheme),
            "input_activations": _activations(scheme),
            "output_activations": None,
            "format": "int-quantized" if precision is Precision.W8A8 else "pack-quantized",
        }
    formats = {group["format"] for group in groups.values()}
    plain = by_precision(plan).get(Precision.W16A16)
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [
            "lm_head",
            *FAMILIES[spec.family].names.never_quantised(spec),
            *([f"re:{layers_pattern(spec.family, plain, spec.num_layers)}"] if plain else []),
        ],
        "kv_cache_scheme": None,
    }
    kv, of_vllm = kv_line(plan), CACHE_TYPES.get(plan.workload.kv)
    vllm_flag = f" (vLLM: --kv-cache-dtype {of_vllm})" if of_vllm else ""
    missing = said(
        stages_line(plan),
        microbatch_line(plan),
        zeros_line(plan),
        outliers_line(plan),
        kv and f"{kv}: the server's to choose{vllm_flag}",
    )
    text = json.dumps({"quantization_config": config}, indent=1) + "\n"
    return Exported(text=text, not_expressed=missing)


def _weights(scheme: WeightScheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": None,
    }


def _activations(scheme: WeightScheme) -> dict[str, Any] | None:
    if scheme.activation_bits == 16:
        return None
    return {
        "num_bits": scheme.activation_bits,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }


def _require_whole_groups(spec: ModelSpec, scheme: WeightScheme, precision: Precision) -> None:
    """Raise `ValueError` unless the inputs of every linear are whole groups."""
    size = scheme.group_size
    inputs = {"hidden": spec.hidden, "attention": spec.heads * spec.head_dim, "ffn": spec.ffn}
    for name, features in inputs.items():
        if size is not None and features % size:
            raise ValueError(
                f"compressed-tensors wants whole groups of inputs: {precision.value} has groups of "
                f"{size}, the model's {name} size is {features}; plan with --weight-group-size 0, "
                "a scale per channel"
            )
