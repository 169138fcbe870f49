"""A plan written by hand: CPU stages between given layers, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.model_spec import ModelSpec
from llmpq.plan import ClusterRef, ModelRef, Plan, StagePlan
from llmpq.precision import Precision
from llmpq.workload import Workload


def hand_plan(
    spec: ModelSpec,
    workload: Workload,
    *,
    splits: Sequence[int] = (),
    precision: Precision = Precision.W16A16,
    prefill_microbatch: int = 1,
    decode_microbatch: int = 1,
    model_dir: str | None = None,
    threads: int = 1,
) -> Plan:
    """Return a plan whose stages end at the layers `splits` and at the last one."""
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
            precisions=(precision,) * (end - start),
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
        prefill_microbatch=prefill_microbatch,
        decode_microbatch=decode_microbatch,
        stages=tuple(stages),
    )
