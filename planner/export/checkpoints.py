"""Per-layer precision as quantisation configs: compressed-tensors and GPTQModel.

Both describe a checkpoint to be written by their own tools from the 16-bit weights.
"""

from __future__ import annotations

import json
from typing import Any

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.export.maps import LAYERS
from llmpq.planner.export.result import Exported, by_precision, kv_line, microbatch_line, ranges
from llmpq.precision import KVPrecision, Precision


def compressed_tensors(plan: Plan, spec: ModelSpec) -> Exported:
    """Return `quantization_config`: a group of layers per precision, by regular expression."""
    root = LAYERS[spec.family].replace(".", "\\.")
    groups: dict[str, Any] = {}
    table = by_precision(plan)
    for precision, layers in table.items():
        if precision is Precision.W16A16:
            continue
        name = f"group_{len(groups)}"
        pattern = f"re:{root}\\.({'|'.join(str(i) for i in layers)})\\..*"
        groups[name] = {
            "targets": [pattern],
            "weights": _weights(plan, precision),
            "input_activations": _activations(precision),
            "output_activations": None,
            "format": "pack-quantized" if precision.activation_bits == 16 else "int-quantized",
        }
    formats = {group["format"] for group in groups.values()}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", *_routers(spec), *_ignored(root, table)],
        "kv_cache_scheme": _kv_scheme(plan),
    }
    missing = [f"stages: {_stages(plan)}", microbatch_line(plan)]
    if plan.workload.kv in (KVPrecision.KV4, KVPrecision.KV2):
        missing.append(
            f"{kv_line(plan)}: servers of compressed-tensors checkpoints take 8 bits at least"
        )
    text = json.dumps({"quantization_config": config}, indent=1) + "\n"
    return Exported(text=text, not_expressed=tuple(missing))


def _weights(plan: Plan, precision: Precision) -> dict[str, Any]:
    group = plan.quantization.group_size
    return {
        "num_bits": precision.weight_bits,
        "type": "int",
        "symmetric": plan.quantization.symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
    }


def _activations(precision: Precision) -> dict[str, Any] | None:
    if precision.activation_bits == 16:
        return None
    return {
        "num_bits": precision.activation_bits,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }


def _ignored(root: str, table: dict[Precision, list[int]]) -> list[str]:
    plain = table.get(Precision.W16A16, [])
    return [f"re:{root}\\.({'|'.join(str(i) for i in plain)})\\..*"] if plain else []


def _routers(spec: ModelSpec) -> list[str]:
    return [r"re:.*\.gate$"] if spec.experts else []


def _kv_scheme(plan: Plan) -> dict[str, Any] | None:
    if plan.workload.kv is not KVPrecision.KV8:
        return None
    return {
        "num_bits": 8,
        "type": "int",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }


def gptqmodel(plan: Plan, spec: ModelSpec) -> Exported:
    """Return GPTQModel's quantize config: `dynamic` rules per layer over the commonest bits."""
    root = LAYERS[spec.family].replace(".", "\\.")
    table = by_precision(plan)
    quantised = {p: layers for p, layers in table.items() if p is not Precision.W16A16}
    if not quantised:
        raise ValueError("the plan quantises no layer; GPTQModel has nothing to do")
    base = max(quantised, key=lambda p: len(quantised[p]))
    dynamic: dict[str, dict[str, Any]] = {}
    for precision, layers in table.items():
        pattern = f"{root}\\.({'|'.join(str(i) for i in layers)})\\..*"
        if precision is Precision.W16A16:
            dynamic[f"-:{pattern}"] = {}
        elif precision is not base:
            dynamic[f"+:{pattern}"] = {"bits": precision.weight_bits}
    group = plan.quantization.group_size
    config = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": base.weight_bits,
        "group_size": -1 if group is None else group,
        "sym": plan.quantization.symmetric,
        "desc_act": False,
        "lm_head": False,
        "dynamic": dynamic,
    }
    missing = [f"stages: {_stages(plan)}", microbatch_line(plan)]
    missing += [line for line in (kv_line(plan),) if line]
    for precision, layers in quantised.items():
        if precision.activation_bits < 16:
            missing.append(
                f"activation bits of {precision.value} on layers {ranges(layers)}: GPTQ is "
                "weight-only"
            )
    return Exported(text=json.dumps(config, indent=1) + "\n", not_expressed=tuple(missing))


def _stages(plan: Plan) -> str:
    parts = [f"{s.device} {s.layers[0]}-{s.layers[1] - 1}" for s in plan.stages]
    return f"{', '.join(parts)} (write them with --to vllm or --to sglang)"
