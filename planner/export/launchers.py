"""Partition strings and command lines of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.export.result import (
    Exported,
    by_precision,
    kv_line,
    layer_counts,
    microbatch_line,
    precision_line,
    ranges,
)
from llmpq.precision import KVPrecision, Precision

GGUF_TYPES = {
    Precision.W16A16: "f16",
    Precision.W8A16: "q8_0",
    Precision.W8A8: "q8_0",
    Precision.W4A16: "q4_k",
    Precision.W4A4: "q4_k",
    Precision.W3A16: "q3_k",
}
GGUF_FILES = {"f16": "F16", "q8_0": "Q8_0", "q4_k": "Q4_K_S", "q3_k": "Q3_K_S"}


def vllm(plan: Plan, spec: ModelSpec) -> Exported:
    """Return the pipeline partition and serve command of vLLM."""
    lines = _pipeline_lines("vLLM", "VLLM_PP_LAYER_PARTITION", plan)
    stages = len(plan.stages)
    command = f"vllm serve {_model(plan)} --pipeline-parallel-size {stages}"
    nodes = {stage.node for stage in plan.stages}
    if len(nodes) > 1:
        command += " --distributed-executor-backend ray"
    command += f" --dtype {plan.workload.dtype} --max-model-len {plan.workload.max_len + 1}"
    command += f" --max-num-seqs {plan.workload.batch}"
    lines.append(command)
    missing = [
        "which device runs which stage: ranks follow CUDA_VISIBLE_DEVICES and Ray's placement, so "
        f"start them in the order {', '.join(s.device for s in plan.stages)}",
        microbatch_line(plan),
        "memory per stage: vLLM gives every stage the KV blocks of the fullest one",
    ]
    return _with_precision(plan, lines, missing)


def sglang(plan: Plan, spec: ModelSpec) -> Exported:
    """Return the pipeline partition and launch command of SGLang."""
    lines = _pipeline_lines("SGLang", "SGLANG_PP_LAYER_PARTITION", plan)
    nodes = len({stage.node for stage in plan.stages})
    command = f"python -m sglang.launch_server --model-path {_model(plan)}"
    command += f" --pp-size {len(plan.stages)} --dtype {plan.workload.dtype}"
    command += f" --max-running-requests {plan.workload.batch}"
    if nodes > 1:
        command += f" --nnodes {nodes} --node-rank 0 --dist-init-addr HOST:PORT"
    lines.append(command)
    missing = [
        f"which device runs which stage: start ranks as {', '.join(s.device for s in plan.stages)}",
        microbatch_line(plan),
    ]
    return _with_precision(plan, lines, missing)


def llamacpp(plan: Plan, spec: ModelSpec) -> Exported:
    """Return the quantise and serve commands of llama.cpp; layers per device, bits per layer."""
    table = by_precision(plan)
    most = max(table, key=lambda p: len(table[p]))
    types = [
        f"--tensor-type 'blk\\.({'|'.join(str(i) for i in layers)})\\..*={GGUF_TYPES[p]}'"
        for p, layers in table.items()
        if p is not most
    ]
    quantise = ["llama-quantize", *types, "model-f16.gguf", "model-plan.gguf"]
    quantise.append(GGUF_FILES[GGUF_TYPES[most]])
    counts = layer_counts(plan)
    # llama.cpp counts the output matrix as one more layer, on the last device.
    split = [*counts[:-1], counts[-1] + 1]
    serve = (
        f"llama-server -m model-plan.gguf -ngl {sum(split)} --split-mode layer "
        f"--tensor-split {','.join(str(n) for n in split)} "
        f"--ctx-size {plan.workload.batch * (plan.workload.max_len + 1)} "
        f"--parallel {plan.workload.batch}"
    )
    cache = {KVPrecision.KV8: "q8_0", KVPrecision.KV4: "q4_0"}.get(plan.workload.kv)
    if cache:
        serve += f" --cache-type-k {cache} --cache-type-v {cache}"
    devices = ", ".join(f"{s.device} ({s.node}:{s.device_index})" for s in plan.stages)
    lines = [f"# devices in this order (--device, or --rpc for other nodes): {devices}"]
    lines += [" ".join(quantise), serve]
    missing = [microbatch_line(plan)]
    if plan.workload.kv is KVPrecision.KV2:
        missing.append("KV cache at 2 bit: the closest is q4_0")
    for precision in (Precision.W8A8, Precision.W4A4):
        if precision in table:
            missing.append(
                f"activation bits of {precision.value} on layers {ranges(table[precision])}: "
                "weights only"
            )
    missing.append("block sizes: GGUF types have blocks of 32 or 256, not the plan's groups")
    return Exported(text="\n".join(lines) + "\n", not_expressed=tuple(missing))


def _model(plan: Plan) -> str:
    return plan.model.path or plan.model.name


def _pipeline_lines(engine: str, variable: str, plan: Plan) -> list[str]:
    """Return the partition as an exported variable, devices in a comment."""
    stages = ", ".join(f"{s.device}@{s.node}" for s in plan.stages)
    partition = ",".join(str(n) for n in layer_counts(plan))
    return [f"# {engine}: stages on {stages}", f"export {variable}={partition}"]


def _with_precision(plan: Plan, lines: list[str], missing: list[str]) -> Exported:
    precision = precision_line(plan)
    if precision is not None:
        missing.append(
            f"precision per layer ({precision}): it is a property of the checkpoint; write one "
            "with --to compressed-tensors or --to gptqmodel"
        )
    kv = kv_line(plan)
    if kv is not None:
        missing.append(f"{kv}: choose the closest --kv-cache-dtype the engine has")
    return Exported(text="\n".join(lines) + "\n", not_expressed=tuple(missing))
