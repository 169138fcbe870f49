"""accelerate's device_map: module name -> device."""

from __future__ import annotations

import json

from llmpq.model_spec import Family, ModelSpec
from llmpq.plan import Plan
from llmpq.planner.export.result import Exported, kv_line, microbatch_line, precision_line

LAYERS: dict[Family, str] = {
    "opt": "model.decoder.layers",
    "bloom": "transformer.h",
    "llama": "model.layers",
    "qwen3": "model.layers",
    "mixtral": "model.layers",
}
FIRST: dict[Family, tuple[str, ...]] = {
    "opt": ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    "bloom": ("transformer.word_embeddings", "transformer.word_embeddings_layernorm"),
    "llama": ("model.embed_tokens", "model.rotary_emb"),
    "qwen3": ("model.embed_tokens", "model.rotary_emb"),
    "mixtral": ("model.embed_tokens", "model.rotary_emb"),
}
LAST: dict[Family, tuple[str, ...]] = {
    "opt": ("model.decoder.final_layer_norm", "lm_head"),
    "bloom": ("transformer.ln_f", "lm_head"),
    "llama": ("model.norm", "lm_head"),
    "qwen3": ("model.norm", "lm_head"),
    "mixtral": ("model.norm", "lm_head"),
}


def accelerate(plan: Plan, spec: ModelSpec) -> Exported:
    """Return the device_map of one node's plan as JSON."""
    nodes = {stage.node for stage in plan.stages}
    if len(nodes) > 1:
        raise ValueError(
            f"accelerate's device_map is for one machine, the plan is on {len(nodes)} nodes "
            f"({', '.join(sorted(nodes))}); plan for one node"
        )
    devices: list[int | str] = [
        "cpu" if stage.is_cpu else stage.device_index for stage in plan.stages
    ]
    table: dict[str, int | str] = {name: devices[0] for name in FIRST[spec.family]}
    for stage, device in zip(plan.stages, devices, strict=True):
        for layer in range(*stage.layers):
            table[f"{LAYERS[spec.family]}.{layer}"] = device
    for name in LAST[spec.family]:
        # A tied head is the embedding matrix: accelerate keeps it on the embedding's device.
        tied = name == "lm_head" and spec.tied_embeddings
        table[name] = devices[0] if tied else devices[-1]
    missing = ["pipelining: layers run one device after the other", microbatch_line(plan)]
    if spec.tied_embeddings and len(plan.stages) > 1:
        missing.append("head on the last stage: it is tied to the embedding, on the first device")
    missing += [line for line in (kv_line(plan),) if line]
    precision = precision_line(plan)
    if precision is not None:
        missing.append(f"precision per layer ({precision}): use a checkpoint that has it")
    return Exported(text=json.dumps(table, indent=1) + "\n", not_expressed=tuple(missing))
