"""Loads a stage of a plan: its slice of the model and its cache, counted against the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from llmpq.capabilities import require, ways_of
from llmpq.errors import DoesNotFitError
from llmpq.model_spec import ModelSpec
from llmpq.out_of_memory import out_of_memory
from llmpq.plan import Plan
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.backends.slot_stage_runner import SlotStageRunner
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache.kv_by_precision import make_kv_cache
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.paged_by_precision import make_paged_kv
from llmpq.runtime.models.linear import round_activations
from llmpq.runtime.models.mtp_head import MtpHead
from llmpq.runtime.models.stage_model import DTYPES, StageModel
from llmpq.runtime.trace import LoadReport
from llmpq.runtime.weights.sources import TensorSource
from llmpq.sizes.pool_size import PoolSize, planned_kv_bytes
from llmpq.units import format_size
from llmpq.workload import CHUNK_TOKENS

MEMORY_TOLERANCE = 0.05
"""By what share weights and KV cache may exceed the plan's prediction; less always fits."""


def build_slot_stage(
    plan: Plan,
    index: int,
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    *,
    graphs: bool = True,
    packed_prompts: bool = False,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[SlotStageRunner, LoadReport]:
    """Load a GPU's stage and allocate a KV slot for each request, as drafts have it.

    `graphs` captures decode steps. `packed_prompts`: as `StageSettings` says. `on_layer` hears of
    every layer that is loaded.
    """
    # Imported here: it needs Triton.
    from llmpq.runtime.backends.cuda import CudaBackend

    _require_known(plan, index, spec, device, plan.workload.max_len)
    assert spec.recurrent is None, "recurrent state is kept beside a pool only"
    dtype = DTYPES[plan.workload.dtype]
    started_s = time.perf_counter()
    model, kv = load_slots(
        plan, index, spec, source, device, exact_prompt=not packed_prompts, on_layer=on_layer
    )
    report = LoadReport(
        weights_bytes=model.weight_nbytes,
        kv_bytes=kv.nbytes,
        seconds=time.perf_counter() - started_s,
    )
    check_memory(plan, index, spec, report)
    compute = CudaBackend().slot_stage_runner(model, kv, device, dtype, plan=plan, graphs=graphs)
    return compute, report


def _require_known(
    plan: Plan,
    index: int,
    spec: ModelSpec,
    device: torch.device,
    max_len: int,
    *,
    pool: bool = False,
) -> None:
    """Raise `ValueError` for a feature of the model that this stage would not compute."""
    ways = ways_of(
        gpu=device.type == "cuda",
        kv=plan.workload.kv,
        drafts=plan.speculation is not None,
        precisions=plan.stages[index].precisions,
        pool=pool,
    )
    require(spec, ways, max_len=max_len)


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
    on_layer: Callable[[int], None] | None = None,
) -> tuple[StageRunner, LoadReport]:
    """Load a stage's slice and allocate its pool of KV blocks, instead of the plan's slots.

    On a GPU, `graphs` captures steps, which have `step_tokens` tokens at most. `on_layer` hears of
    every layer that is loaded.
    """
    longest = pool.max_len - 1  # the last token is never run
    _require_known(plan, index, spec, device, longest, pool=True)
    stage, dtype = plan.stages[index], DTYPES[plan.workload.dtype]
    started_s = time.perf_counter()
    with _blaming_memory(plan, index):
        model = _load_model(plan, index, spec.at_length(longest), source, device, on_layer)
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
        seconds=time.perf_counter() - started_s,
    )
    check_memory(plan, index, spec, report, pool=pool)
    return compute, report


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
    stage, model = plan.stages[index], compute.model
    if model.head is None:
        return None
    dtype = DTYPES[plan.workload.dtype]
    with _blaming_memory(plan, index):
        return MtpHead.build(
            model.spec,
            model,
            source.mtp(dtype),
            None if model.embedding is not None else source.embedding(dtype),
            scheme=plan.settings().scheme(stage.precisions[-1]),
            dtype=dtype,
            device=device,
        )


def load_slots(
    plan: Plan,
    index: int,
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    *,
    exact_prompt: bool = True,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[StageModel, KVCache]:
    """Read and quantise a stage's layers and allocate its slots."""
    workload = plan.workload
    with _blaming_memory(plan, index):
        length = workload.max_len
        model = _load_model(plan, index, spec.at_length(length), source, device, on_layer)
        kv = make_kv_cache(
            spec,
            workload.kv,
            num_layers=plan.stages[index].num_layers,
            slots=workload.batch,
            max_len=workload.max_len,
            dtype=DTYPES[workload.dtype],
            device=device,
            exact_prompt=exact_prompt,
            first_layer=plan.stages[index].layers[0],
        )
    return model, kv


def _load_model(
    plan: Plan,
    index: int,
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    on_layer: Callable[[int], None] | None,
) -> StageModel:
    stage = plan.stages[index]
    model = StageModel.build(
        spec,
        range(*stage.layers),
        stage.precisions,
        first=index == 0,
        last=index == len(plan.stages) - 1,
        dtype=DTYPES[plan.workload.dtype],
        device=device,
        scheme=plan.settings().scheme,
        head_precision=plan.settings().head(on_cpu=device.type == "cpu"),
        source=source,
        on_layer=on_layer,
        runner=backend_of(device).layers(),
    )
    if device.type == "cpu" and plan.quantization.cpu_activations == "int8":
        round_activations(model)
    return model


@contextmanager
def _blaming_memory(plan: Plan, index: int) -> Iterator[None]:
    """Say which stage ran out of memory."""
    stage = plan.stages[index]
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
    plan: Plan, index: int, spec: ModelSpec, report: LoadReport, *, pool: PoolSize | None = None
) -> None:
    """Refuse a stage that took more than was predicted by more than `MEMORY_TOLERANCE`.

    A `pool` says itself what it takes, and was made to fit; without one requests have slots.
    """
    stage, workload = plan.stages[index], plan.workload
    if stage.memory is None:
        return
    layers = range(*stage.layers)
    if pool is not None:
        kv_bytes = pool.nbytes(spec, workload.kv, layers=layers, dtype_bytes=workload.dtype_bytes)
    else:
        kv_bytes = planned_kv_bytes(
            spec,
            workload,
            layers,
            pooled=False,
            chunk=None,
            prefill_microbatch=plan.prefill_microbatch,
        )
        room = stage.memory.limit_bytes - stage.memory.total_bytes + stage.memory.kv_bytes
        if kv_bytes > room + MEMORY_TOLERANCE * stage.memory.kv_bytes:
            raise DoesNotFitError(
                f"stage {stage.device}: a slot of {workload.max_len} tokens for each of "
                f"{workload.batch} requests takes {format_size(kv_bytes)}, the plan leaves "
                f"{format_size(room)}; run it without drafts and without kv_pool=False, or re-plan "
                "with --speculate"
            )
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
