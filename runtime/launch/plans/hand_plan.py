"""A plan written by hand: stages between given layers on the CPU, or on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.devices.device_spec import canonical_kind
from llmpq.model_spec import ModelSpec
from llmpq.plan import ClusterRef, ModelRef, Plan, QuantizationForm, StagePlan
from llmpq.precision import Precision
from llmpq.workload import CHUNK_TOKENS, Workload


def hand_plan(
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
) -> Plan:
    """Return a plan whose stages end at the layers `splits` and at the last one.

    `precision`: of all layers, or of each.
    """
    each = (precision,) * spec.num_layers if isinstance(precision, Precision) else tuple(precision)
    bounds = [0, *splits, spec.num_layers]
    stages = [
        StagePlan(
            device=f"CPU-{index}",
            node="local",
            device_index=index,
            kind="CPU",
            profile_kind=f"CPU@{threads}t",
            threads=threads,
            layers=(start, end),
            precisions=each[start:end],
        )
        for index, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False))
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
