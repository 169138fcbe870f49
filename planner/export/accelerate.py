"""accelerate's device_map: module name -> device."""

from __future__ import annotations

import json

from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.export.gpu_stages import numbers_line
from llmpq.planner.export.result import (
    Exported,
    drafts_line,
    emulated_line,
    kv_line,
    microbatch_line,
    precision_line,
    said,
)
from llmpq.plans.plan import Plan


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
    table: dict[str, int | str] = {name: devices[0] for name in FAMILIES[spec.family].before}
    for stage, device in zip(plan.stages, devices, strict=True):
        for layer in range(*stage.layers):
            table[f"{FAMILIES[spec.family].layers_at}.{layer}"] = device
    for name in FAMILIES[spec.family].behind:
        # A tied head is the embedding matrix: accelerate keeps it on the embedding's device.
        tied = name == "lm_head" and spec.tied_embeddings
        table[name] = devices[0] if tied else devices[-1]
    precision = precision_line(plan)
    numbers = [str(d) for d in devices if d != "cpu"]
    missing = said(
        numbers_line(plan),
        f"the order of GPUs: numbers {', '.join(numbers)} are nvidia-smi's; set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA begins with the fastest"
        if numbers
        else None,
        "pipelining: layers run one device after the other",
        microbatch_line(plan),
        drafts_line(plan),
        "head on the last stage: it is tied to the embedding, on the first device"
        if spec.tied_embeddings and len(plan.stages) > 1
        else None,
        "computing on the CPU: accelerate keeps those layers in host memory and brings each to a "
        "GPU when it runs"
        if len({"cpu", *devices}) > 1 and "cpu" in devices
        else None,
        kv_line(plan),
        precision and f"precision per layer ({precision}): use a checkpoint that has it",
        emulated_line(plan),
    )
    return Exported(text=json.dumps(table, indent=1) + "\n", not_expressed=missing)
