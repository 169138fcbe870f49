"""Plans that live.py makes by hand: stages of one precision on this machine's GPUs, or its CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.launch.plans.manual_plan import manual_plan, on_gpu, with_pool_room
from llmpq.workload import Workload

SHARE = 0.9
"""Of a GPU's memory, for weights, KV and temporaries."""


def by_hand(
    model: str,
    *,
    prompt_len: int,
    gen_len: int,
    slots: int,
    precision: str = "w16a16",
    kv: KVPrecision = KVPrecision.KV16,
    splits: tuple[int, ...] = (),
    sms: tuple[int, ...] = (),
    prefill_microbatch: int = 1,
    prefill_chunk: int = 8192,
) -> Plan:
    """Return a plan; `splits`: layers where stages end, `sms`: of each stage's GPU, 0 for all."""
    spec = ModelSpec.from_directory(Path(model))
    plan = manual_plan(
        spec,
        Workload(batch=slots, prompt_len=prompt_len, gen_len=gen_len, kv=kv),
        splits=splits,
        precision=Precision(precision),
        prefill_microbatch=prefill_microbatch,
        prefill_chunk=prefill_chunk,
        decode_microbatch=slots,
        model_dir=model,
    )
    if not torch.cuda.is_available():
        return plan
    plan = on_gpu(plan)
    stages = tuple(
        stage.model_copy(update={"sms": count or None})
        for stage, count in zip(plan.stages, sms or (0,) * len(plan.stages), strict=True)
    )
    plan = plan.model_copy(update={"stages": stages})
    memory = torch.cuda.get_device_properties(0).total_memory
    return with_pool_room(plan, spec, memory, share=SHARE)
