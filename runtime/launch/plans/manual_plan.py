"""Plans made without a planner: stages between given layers, or a whole model on one device.

A plan for a GPU's pool may have any number of requests: its blocks are what fits beside weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llmpq.devices.cluster import Device
from llmpq.devices.device_spec import canonical_kind
from llmpq.devices.this_machine import useful_threads
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.member_memory import member_memory, planned_shape
from llmpq.plans.plan import (
    ClusterRef,
    MemberPlan,
    MemoryForm,
    ModelRef,
    Plan,
    QuantizationForm,
    StagePlan,
    Worker,
)
from llmpq.plans.prefix_states import with_prefix_states
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.pool_size import planned_kv_bytes
from llmpq.units import format_size
from llmpq.workload import CHUNK_TOKENS, Dtype, Workload

_MEMORY_SHARE = 0.85
"""Of a device's memory: the rest is for temporaries and other processes."""
_POOL_SHARE = 0.9
"""Of a GPU's memory where temporaries are counted beside weights and blocks."""
_LONG_CHUNKS = (8192, 4096, 2048, 1024)
_CHUNK_SHARE = 0.02
"""Of the KV cache: what temporaries of longer chunks may take off it."""
_PREFILL_TOKENS = 2048
"""Prompt tokens that share a micro-batch, about."""
CONTEXT_BYTES = 1 << 30
"""What CUDA, libraries and captured steps take on a GPU beside tensors, about."""


def manual_plan(
    spec: ModelSpec,
    workload: Workload,
    *,
    splits: Sequence[int] = (),
    precision: Precision | Sequence[Precision] = Precision.W16A16,
    quantization: QuantizationForm | None = None,
    prefill_microbatch: int = 1,
    prefill_chunk: int | None = CHUNK_TOKENS,
    decode_microbatch: int = 1,
    model_dir: str | None = None,
    threads: int = 1,
    shares: Sequence[Sequence[int]] = (),
) -> Plan:
    """Return a plan whose stages end at the layers `splits` and at the last one.

    `precision`: of all layers, or of each. `shares`: of the devices of each stage, in tensor
    parallel; one device each by default.
    """
    each = (precision,) * spec.num_layers if isinstance(precision, Precision) else tuple(precision)
    bounds = [0, *splits, spec.num_layers]
    layers = list(zip(bounds, bounds[1:], strict=False))
    own = [tuple(one) for one in shares] or [(1,)] * len(layers)
    firsts = [sum(map(len, own[:index])) for index in range(len(layers))]
    stages = [
        StagePlan(
            device=f"CPU-{first}",
            node="local",
            device_index=first,
            kind="CPU",
            profile_kind=f"CPU@{threads}t",
            threads=threads,
            layers=(start, end),
            precisions=each[start:end],
            **shared_by([f"CPU-{first + i}" for i in range(len(parts))], parts),
        )
        for (start, end), first, parts in zip(layers, firsts, own, strict=True)
    ]
    return Plan(
        model=ModelRef(
            name=spec.name,
            num_layers=spec.num_layers,
            fingerprint=spec.fingerprint(),
            path=model_dir,
        ),
        cluster=ClusterRef(name="hand-written", fingerprint="0" * 16),
        workload=workload,
        quantization=quantization or QuantizationForm(),
        prefill_microbatch=prefill_microbatch,
        prefill_chunk=prefill_chunk,
        decode_microbatch=decode_microbatch,
        stages=tuple(stages),
    )


def shared_by(devices: Sequence[str], shares: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a stage that devices share in tensor parallel; none of one device."""
    if len(devices) < 2:
        return {}
    members = tuple(MemberPlan(device=name) for name in devices)
    return {"devices": members, "shares": tuple(shares)}


def on_gpu(plan: Plan, number: int = 0) -> Plan:
    """Return the plan with a stage on each of this machine's GPUs from that number on.

    GPUs are alike, and numbered as torch counts.
    """
    import torch  # plans of CPU stages are written without

    kind = canonical_kind(torch.cuda.get_device_name(number))
    change = {"kind": kind, "profile_kind": kind, "threads": None}
    stages = tuple(
        stage.model_copy(update={**change, "device": f"{kind}-{index}", "device_index": index})
        for index, stage in enumerate(plan.stages, start=number)
    )
    cluster = plan.cluster.model_copy(update={"name": f"{kind.lower()}x{len(stages)}"})
    return plan.model_copy(update={"stages": stages, "cluster": cluster})


def requests_of(rows: int, max_len: int, *, kv: KVPrecision, dtype: Dtype) -> Workload:
    """Return the job of requests of unknown lengths, up to `max_len`: half prompt, half answer."""
    prompt_len = max(1, max_len // 2)
    gen_len = max_len - prompt_len + 1
    return Workload(batch=rows, prompt_len=prompt_len, gen_len=gen_len, kv=kv, dtype=dtype)


def device_plan(
    spec: ModelSpec,
    device: Device,
    job: Workload,
    *,
    model_dir: str,
    may_shrink: bool,
) -> Plan | None:
    """Return the plan of a job on one device; None where it does not fit.

    `may_shrink`: fewer requests at once will do as well; a GPU's memory bounds the blocks that they
    have together, and `DoesNotFitError` says where that is not even one request's.
    """
    on_gpu = device.threads is None
    weights = spec.num_params * job.dtype_bytes
    each = planned_kv_bytes(
        spec,
        job.model_copy(update={"batch": 1}),
        range(spec.num_layers),
        chunk=CHUNK_TOKENS,
        prefill_microbatch=1,
    )
    room = int((_MEMORY_SHARE * device.limit_bytes - weights) // each)
    if room < 1 or (room < job.batch and not may_shrink and not on_gpu):
        return None
    rows = job.batch if on_gpu else min(job.batch, room)
    threads = None
    if device.threads is not None:
        threads = useful_threads(device.threads, weights)
    plan = manual_plan(
        spec,
        job.model_copy(update={"batch": rows}),
        prefill_microbatch=max(1, min(rows, _PREFILL_TOKENS // job.prompt_len)),
        decode_microbatch=rows,
        model_dir=model_dir,
        threads=threads or 1,
    )
    change = {
        "device": device.name,
        "node": device.node,
        "device_index": device.index,
        "kind": device.kind,
        "profile_kind": device.profile_kind if threads is None else f"{device.kind}@{threads}t",
        "threads": threads,
    }
    stages = tuple(stage.model_copy(update=change) for stage in plan.stages)
    cluster = ClusterRef(name="this-machine", fingerprint=plan.cluster.fingerprint)
    plan = plan.model_copy(update={"stages": stages, "cluster": cluster})
    return _with_chunk(plan, spec, device.limit_bytes) if on_gpu else plan


def _with_chunk(plan: Plan, spec: ModelSpec, memory_bytes: int) -> Plan:
    """Return a plan of one GPU with memory stated, in the longest chunks that cost few blocks.

    Alone on the device a prompt is computed in one such step.
    """
    plain = with_pool_room(plan, spec, memory_bytes, share=_POOL_SHARE)
    for chunk in _LONG_CHUNKS:
        if chunk > max(CHUNK_TOKENS, plan.workload.prompt_len):
            continue
        longer = plan.model_copy(update={"prefill_chunk": chunk, "prefill_microbatch": 1})
        with suppress(DoesNotFitError):
            longer = with_pool_room(longer, spec, memory_bytes, share=_POOL_SHARE)
            if _kv_bytes(longer) >= (1 - _CHUNK_SHARE) * _kv_bytes(plain):
                return longer
    return plain


def _kv_bytes(plan: Plan) -> int:
    return sum(stage.memory.kv_bytes for stage in plan.stages if stage.memory is not None)


def with_pool_room(plan: Plan, spec: ModelSpec, memory_bytes: int, *, share: float) -> Plan:
    """Return the plan with memory stated: KV has what weights leave of a share of every GPU.

    `DoesNotFitError` where not even one request of the plan's length would fit.
    """
    limit = int(share * memory_bytes)
    held = [_memory_of(plan, worker, spec, memory_bytes, limit) for worker in plan.workers]
    places = plan.with_memory(held).places
    kept = with_prefix_states(places, spec, plan.workload)
    return plan.with_memory([place.memory for place in kept])


def _memory_of(
    plan: Plan, worker: Worker, spec: ModelSpec, memory_bytes: int, limit: int
) -> MemoryForm:
    """Return a device's memory: what its part needs, and KV in the rest of a limit."""
    stage = worker.place
    shape = planned_shape(plan, worker.stage, None, on_gpu=True)
    needed = member_memory(plan, worker, spec, shape, context_bytes=CONTEXT_BYTES)
    room = limit - (needed.total_bytes - needed.kv_bytes)
    each = -(-needed.kv_bytes // plan.workload.batch)
    if room < each:
        raise DoesNotFitError(
            f"stage {stage.device} has {format_size(max(0, room))} for KV beside its weights, "
            f"a request of {plan.workload.max_len} tokens needs {format_size(each)}; take "
            "fewer tokens (max_model_len) or fewer bits"
        )
    kv_bytes = min(needed.kv_bytes, room)
    return MemoryForm(
        weights_bytes=needed.weights_bytes,
        embedding_bytes=needed.embedding_bytes,
        kv_bytes=kv_bytes,
        workspace_bytes=needed.workspace_bytes,
        context_bytes=needed.context_bytes,
        total_bytes=needed.total_bytes - needed.kv_bytes + kv_bytes,
        limit_bytes=limit,
        reserve_bytes=memory_bytes - limit,
    )
