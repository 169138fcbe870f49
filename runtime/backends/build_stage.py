"""Loads a stage of a plan: its slice of the model and its cache, counted against the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from llmpq.errors import DoesNotFitError
from llmpq.kernels.kernel_table import TENSOR_CORES
from llmpq.kernels.multiprocessors import older_than
from llmpq.models.model_spec import ModelSpec
from llmpq.out_of_memory import out_of_memory
from llmpq.plans.capabilities import execution_modes, packed_kv_refusal, require
from llmpq.plans.plan import Plan, Worker
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache.paged_by_precision import make_paged_kv
from llmpq.runtime.models.layer_tensors import TensorSource
from llmpq.runtime.models.linear import Reduce, round_activations
from llmpq.runtime.models.mtp_head import MtpHead
from llmpq.runtime.models.stage_model import DTYPES, HeldParts, StageModel
from llmpq.runtime.models.wiring import Split
from llmpq.runtime.steps.trace import LoadReport
from llmpq.sizes.pool_size import PoolSize
from llmpq.units import format_size
from llmpq.workload import CHUNK_TOKENS

MEMORY_TOLERANCE = 0.05
"""By what share weights and KV cache may exceed the plan's prediction; less always fits."""


def build_stage(
    plan: Plan,
    index: int,
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    pool: PoolSize,
    *,
    step_tokens: int = CHUNK_TOKENS,
    graphs: bool = True,
    on_layer: Callable[[int | None], None] | None = None,
    reduce: Reduce | None = None,
    held: HeldParts | None = None,
) -> tuple[StageRunner, LoadReport]:
    """Load a device's slice and allocate its pool of KV blocks; `index`: of `plan.workers`.

    On a GPU, `graphs` captures steps, which have `step_tokens` tokens at most. `on_layer` hears of
    every layer that is loaded. `reduce`: sums over the devices of its stage, where it has several.
    `held`: what the device has of the model already.
    `ValueError` for a feature of the model that nothing here computes.
    """
    longest = pool.max_len - 1  # the last token is never run
    stage, dtype = plan.places[index], DTYPES[plan.workload.dtype]
    whole = spec.at_length(longest)
    member = plan.workers[index].member_of(whole)
    own = whole if member is None else member.own
    split = None
    if member is not None:
        assert reduce is not None, "a stage of several devices needs their sum"
        split = Split(member, reduce)
    ways = execution_modes(
        gpu=device.type == "cuda",
        kv=plan.workload.kv,
        drafts=plan.speculation is not None,
        precisions=stage.precisions,
        dtype=plan.workload.dtype,
    )
    require(spec, ways, max_len=longest)
    _require_kv(plan.workload.kv, device)
    started_s = time.perf_counter()
    with _blaming_memory(plan, index):
        model = _load_model(plan, index, whole, source, device, on_layer, split, held)
        layers_s = time.perf_counter() - started_s
        compute = stage_over_pool(
            model,
            plan.workload.kv,
            pool,
            layers=range(*stage.layers),
            dtype=dtype,
            device=device,
            step_tokens=step_tokens,
            graphs=graphs,
        )
    report = LoadReport(
        weights_bytes=model.weight_nbytes,
        kv_bytes=compute.kv.all_nbytes,
        prefix_bytes=pool.prefix_bytes(
            own,
            plan.workload.kv,
            layers=range(*stage.layers),
            dtype_bytes=plan.workload.dtype_bytes,
        ),
        seconds=time.perf_counter() - started_s,
        layers_s=layers_s,
        num_held=model.num_held,
    )
    check_memory(plan, index, own, report, pool)
    return compute, report


def _require_kv(kv: KVPrecision, device: torch.device) -> None:
    """Raise `ValueError` for a packed KV cache on a GPU whose registers its kernels do not know."""
    if kv is not KVPrecision.KV16 and older_than(device, TENSOR_CORES):
        raise ValueError(packed_kv_refusal([torch.cuda.get_device_name(device)]))


def stage_over_pool(
    model: StageModel,
    kv: KVPrecision,
    pool: PoolSize,
    *,
    layers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    step_tokens: int,
    graphs: bool = True,
) -> StageRunner:
    """Return a loaded stage over a pool of KV blocks of its own: what serves, and what is timed.

    `layers`: their numbers in the model.
    """
    cache = make_paged_kv(model.spec, kv, pool, layers=layers, dtype=dtype, device=device)
    return backend_of(device).stage_runner(
        model, cache, device, dtype, size=pool, step_tokens=step_tokens, graphs=graphs
    )


def build_head(
    plan: Plan, index: int, source: TensorSource, compute: StageRunner, device: torch.device
) -> MtpHead | None:
    """Load the head that predicts a further token (MTP), on the last stage; None on others.

    Its linears have the precision of the stage's last layer.
    """
    stage, model = plan.places[index], compute.model
    if model.head is None:
        return None
    dtype = DTYPES[plan.workload.dtype]
    with _blaming_memory(plan, index):
        return MtpHead.build(
            model,
            source.mtp(dtype),
            None if model.embedding is not None else source.embedding(dtype),
            scheme=plan.settings().scheme(stage.precisions[-1]),
            dtype=dtype,
            device=device,
        )


def _load_model(
    plan: Plan,
    index: int,
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    on_layer: Callable[[int | None], None] | None,
    split: Split | None,
    held: HeldParts | None,
) -> StageModel:
    stage, worker = plan.places[index], plan.workers[index]
    model = StageModel.build(
        spec,
        range(*stage.layers),
        stage.precisions,
        first=worker.stage == 0,
        last=worker.stage == len(plan.stages) - 1,
        has_head=worker.leads,
        cuts_head=_cuts_head(plan, worker, spec, device),
        dtype=DTYPES[plan.workload.dtype],
        device=device,
        scheme=plan.settings().scheme,
        head_precision=plan.settings().head(on_cpu=device.type == "cpu"),
        source=source,
        on_layer=on_layer,
        runner=backend_of(device).layers(),
        split=split,
        held=held,
    )
    if device.type == "cpu" and plan.quantization.cpu_activations == "int8":
        round_activations(model)
    return model


def _cuts_head(plan: Plan, worker: Worker, spec: ModelSpec, device: torch.device) -> bool:
    """Whether GPUs that share a stage have room for a part of the output matrix each.

    Plans count it on the first alone. All devices decide by the plan, so alike.
    """
    if device.type != "cuda":
        return False
    tied = spec.tied_embeddings and worker.stage == 0
    for other in plan.workers:
        member = other.member_of(spec)
        if member is None or other.stage != worker.stage or other.leads:
            continue
        bytes_more = 0 if tied else len(member.tokens) * spec.hidden * plan.workload.dtype_bytes
        memory = other.place.memory
        if not member.tokens:
            return False
        if memory is not None and memory.total_bytes + bytes_more > memory.limit_bytes:
            return False
    return bool(worker.shares)


@contextmanager
def _blaming_memory(plan: Plan, index: int) -> Iterator[None]:
    """Say which stage ran out of memory."""
    stage = plan.places[index]
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"stage {stage.device} ran out of memory while loading layers {stage.layers[0]} to "
            f"{stage.layers[1]}: {error}; re-plan with a larger reserve for this device"
        ) from None


def check_memory(
    plan: Plan, index: int, spec: ModelSpec, report: LoadReport, pool: PoolSize
) -> None:
    """Refuse a stage that took more than was predicted by more than `MEMORY_TOLERANCE`.

    The pool says itself what it takes, and was made to fit. `spec`: what the device has.
    """
    stage, workload = plan.places[index], plan.workload
    if stage.memory is None:
        return
    layers = range(*stage.layers)
    kv_bytes = pool.nbytes(spec, workload.kv, layers=layers, dtype_bytes=workload.dtype_bytes)
    parts = (
        (
            "weights",
            report.weights_bytes,
            stage.memory.weights_bytes + stage.memory.embedding_bytes,
        ),
        ("KV cache", report.kv_bytes, kv_bytes),
    )
    for name, got, predicted in parts:
        if got - predicted > MEMORY_TOLERANCE * predicted:
            raise DoesNotFitError(
                f"stage {stage.device}: the {name} of layers {stage.layers[0]} to "
                f"{stage.layers[1]} take {format_size(got)}, the plan predicts "
                f"{format_size(predicted)} (tolerance {MEMORY_TOLERANCE:.0%}); re-plan with this "
                "version of llmpq-algo"
            )
