"""vLLM: the pipeline partition and the serve command."""

from __future__ import annotations

import math

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
from llmpq.plans.plan import Plan, StagePlan
from llmpq.precision import KVPrecision

MOST_MEMORY = 0.95
"""Share of a GPU beyond which vLLM's own workspace may have no room."""
CACHE_TYPES = {
    KVPrecision.KV8: "int8_per_token_head",
    KVPrecision.KV8V4: "turboquant_k8v4",
    KVPrecision.KV4: "int4_per_token_head",
}


def vllm(plan: Plan, spec: ModelSpec) -> Exported:
    """Return the pipeline partition and serve command of vLLM."""
    require_gpus(plan, "vLLM")
    together = tensor_parallel_size(plan, spec, "vLLM")
    nodes = stages_by_node(plan, "vLLM")
    lines = [pipeline_comment("vLLM", engine_flags()["vllm"]["version"], plan)]
    lines += quantise_comment(plan)
    if len(nodes) == 1:
        lines.append(f"export {visible_devices(nodes[0][1])}")
    else:
        lines += [
            f"# on {node}, before Ray starts there: export {visible_devices(stages)}"
            for node, stages in nodes
        ]
    lines.append(f"export VLLM_PP_LAYER_PARTITION={','.join(map(str, layer_counts(plan)))}")
    command = f"vllm serve {quoted(model_id(plan))} --pipeline-parallel-size {len(plan.stages)}"
    if together > 1:
        command += f" --tensor-parallel-size {together}"
    if len(nodes) > 1:
        command += " --distributed-executor-backend ray"
    command += f" --dtype {plan.workload.dtype} --max-model-len {context_length(plan)}"
    command += f" --max-num-seqs {plan.workload.batch}"
    step = step_tokens(plan)
    command += f" --max-num-batched-tokens {step}" if step else ""
    share = _memory_share(plan)
    if share is not None:
        command += f" --gpu-memory-utilization {share:.2f}"
    cache = CACHE_TYPES.get(plan.workload.kv)
    if cache is not None:
        command += f" --kv-cache-dtype {cache}"
    lines.append(command)
    missing = said(
        _order_line(nodes),
        numbers_line(plan),
        microbatch_line(plan),
        drafts_line(plan),
        "memory per stage: vLLM gives every stage the KV blocks of the fullest one",
        checkpoint_line(plan),
        _other_keys(plan) if cache else _no_cache_type(plan),
        emulated_line(plan),
        old_line(plan, "vLLM"),
    )
    return Exported(
        text="\n".join(lines) + "\n",
        not_expressed=missing,
        warnings=said(cut_groups_line(plan, spec, together, "vLLM")),
    )


def _memory_share(plan: Plan) -> float | None:
    """Return the share of every GPU that the plan may use: KV blocks take what weights leave.

    None where a stage does not say its memory.
    """
    known = [place.memory for place in plan.places if place.memory is not None]
    if len(known) < len(plan.places):
        return None
    least = min(m.limit_bytes / (m.limit_bytes + m.reserve_bytes) for m in known)
    return math.floor(100 * min(MOST_MEMORY, least)) / 100


def _other_keys(plan: Plan) -> str | None:
    """Say that keys which have more bits than values are floats there."""
    apart = plan.workload.kv.is_apart
    return "8-bit keys as integers: vLLM's turboquant_k8v4 has them in FP8" if apart else None


def _no_cache_type(plan: Plan) -> str | None:
    kv = kv_line(plan)
    return kv and f"{kv}: vLLM's caches have 8 or 4 bits, or keys of 8 and values of 4"


def _order_line(nodes: list[tuple[str, list[StagePlan]]]) -> str | None:
    """Say in which order the nodes come, which Ray decides."""
    if len(nodes) == 1:
        return None
    order = ", ".join(f"{node} ({visible_devices(stages)})" for node, stages in nodes)
    return (
        "which node runs which stages: Ray places ranks node by node, first those where vllm "
        f"starts; the plan's order is {order}"
    )
