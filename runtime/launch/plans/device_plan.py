"""The plan of a whole, unquantised model on one device: nothing has to be decided but the room."""

from __future__ import annotations

from llmpq.cluster import Device
from llmpq.devices.this_machine import useful_threads
from llmpq.model_spec import ModelSpec
from llmpq.plan import ClusterRef, Plan
from llmpq.precision import KVPrecision
from llmpq.runtime.launch.plans.hand_plan import hand_plan
from llmpq.runtime.launch.plans.pool_room import with_pool_room
from llmpq.sizes.pool_size import planned_kv_bytes
from llmpq.workload import CHUNK_TOKENS, DTYPE_BYTES, Dtype, Workload

_MEMORY_SHARE = 0.85
"""Of a device's memory: the rest is for temporaries and whoever else is there."""
_POOL_SHARE = 0.9
"""Of a GPU's memory where temporaries are counted beside weights and blocks."""
_PREFILL_TOKENS = 2048
"""Prompt tokens that share a micro-batch, about."""


def device_plan(
    spec: ModelSpec,
    device: Device,
    *,
    model_dir: str,
    dtype: Dtype,
    kv: KVPrecision,
    max_len: int,
    slots: int,
    may_shrink: bool,
    pool: bool = False,
) -> Plan | None:
    """Return the plan of `slots` requests of up to `max_len` tokens; None where it does not fit.

    `may_shrink`: fewer requests at once will do as well. `pool`: a GPU keeps KV in blocks, so that
    its memory bounds those, and not the requests.
    """
    pool = pool and device.threads is None
    dtype_bytes = DTYPE_BYTES[dtype]
    weights = spec.num_params * dtype_bytes
    per_slot = planned_kv_bytes(
        spec,
        Workload(batch=1, prompt_len=max_len, gen_len=1, kv=kv, dtype=dtype),
        range(spec.num_layers),
        pooled=pool or device.threads is not None,
        chunk=CHUNK_TOKENS,
        prefill_microbatch=1,
    )
    room = int((_MEMORY_SHARE * device.limit_bytes - weights) // per_slot)
    if room < 1 or (room < slots and not may_shrink and not pool):
        return None
    if not pool:
        slots = min(slots, room)
    threads = None
    if device.threads is not None:
        threads = useful_threads(device.threads, weights)
    plan = hand_plan(
        spec,
        # One new token beyond a prompt as long as the cache: any prompt that fits may come.
        Workload(batch=slots, prompt_len=max_len, gen_len=1, kv=kv, dtype=dtype),
        prefill_microbatch=max(1, min(slots, _PREFILL_TOKENS // max_len)),
        decode_microbatch=slots,
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
    return with_pool_room(plan, spec, device.limit_bytes, share=_POOL_SHARE) if pool else plan
