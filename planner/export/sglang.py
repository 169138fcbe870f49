"""SGLang: the pipeline partition and a launch command for each node."""

from __future__ import annotations

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.export.gpu_stages import (
    cut_groups_line,
    numbers_line,
    old_line,
    pipeline_comment,
    require_gpus,
    stages_by_node,
    tensor_parallel_size,
    visible_devices,
)
from llmpq.planner.export.result import (
    Exported,
    checkpoint_line,
    context_length,
    drafts_line,
    emulated_line,
    engine_flags,
    kv_line,
    layer_counts,
    microbatch_line,
    model_id,
    quantise_comment,
    quoted,
    said,
    step_tokens,
)
from llmpq.plans.plan import Plan

PORT = 20000


def sglang(plan: Plan, spec: ModelSpec) -> Exported:
    """Return the pipeline partition and launch commands of SGLang."""
    require_gpus(plan, "SGLang")
    if spec.family == "bloom":
        raise ValueError("SGLang has no BLOOM models; export with --to vllm or --to llamacpp")
    together = tensor_parallel_size(plan, spec, "SGLang")
    nodes = stages_by_node(plan, "SGLang")
    counts = [len(stages) for _, stages in nodes]
    if len(set(counts)) > 1:
        parts = ", ".join(f"{node} {len(stages)}" for node, stages in nodes)
        raise ValueError(
            f"SGLang gives every node as many stages, the plan has {parts}; plan for nodes of as "
            "many GPUs (--max-devices), or export with --to vllm"
        )
    lines = [pipeline_comment("SGLang", engine_flags()["sglang"]["version"], plan)]
    lines += quantise_comment(plan)
    lines.append(f"export SGLANG_PP_LAYER_PARTITION={','.join(map(str, layer_counts(plan)))}")
    tensor_parallel = f"--tp-size {together} " if together > 1 else ""
    common = (
        f"python -m sglang.launch_server --model-path {quoted(model_id(plan))} "
        f"--pp-size {len(plan.stages)} {tensor_parallel}--dtype {plan.workload.dtype} "
        f"--context-length {context_length(plan)} "
        f"--max-running-requests {plan.workload.batch}"
    )
    step = step_tokens(plan)
    common += f" --chunked-prefill-size {step}" if step else ""
    hosts = {node.name: node.host for node in plan.nodes}
    first = hosts.get(nodes[0][0]) or nodes[0][0]
    for rank, (node, stages) in enumerate(nodes):
        command = f"{visible_devices(stages)} {common}"
        if len(nodes) > 1:
            command += f" --nnodes {len(nodes)} --node-rank {rank}"
            command += f" --dist-init-addr {quoted(first)}:{PORT}"
            lines.append(f"# on {node}, with the partition exported there too")
        lines.append(command)
    kv = kv_line(plan)
    missing = said(
        numbers_line(plan),
        microbatch_line(plan),
        drafts_line(plan),
        checkpoint_line(plan),
        kv and f"{kv}: SGLang has no integer cache; its --kv-cache-dtype takes floats of 8 and 4",
        emulated_line(plan),
        old_line(plan, "SGLang"),
    )
    return Exported(
        text="\n".join(lines) + "\n",
        not_expressed=missing,
        warnings=said(cut_groups_line(plan, spec, together, "SGLang")),
    )
