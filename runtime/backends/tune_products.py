"""Tunes a model's products on this machine's GPU: `llmpq-profile tune`, `llmpq-dist run --tune`.

For decode steps a product is timed where it runs, in captured steps of a few layers with random
weights: small kernels run while its weights are on their way, and timed alone another configuration
may win. Products of prompts are long, and are timed alone. What wins is kept for this card, driver
and version of the kernels (kernels/gemm/ranking/learned.py); `run` uses it.
"""

from __future__ import annotations

import copy
import datetime
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmpq.kernels.gemm import choice
from llmpq.kernels.gemm.ranking import learned
from llmpq.kernels.gemm.ranking.config import Config, config_entry
from llmpq.kernels.gemm.ranking.machine import machine_of
from llmpq.kernels.gemm.ranking.predict import Product
from llmpq.kernels.gemm.ranking.tune import TunedProduct, search
from llmpq.kernels.gpu_timing import copies_for, time_launches
from llmpq.kernels.kernel_table import TENSOR_CORES
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan, QuantizationForm
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.models.layers import Linear
from llmpq.runtime.models.stage_model import DTYPES, StageModel
from llmpq.runtime.weights.dummy import CopiedLayers
from llmpq.runtime.weights.sources import RandomSource
from llmpq.sizes.kv_format import pool_blocks
from llmpq.sizes.pool_size import PoolSize
from llmpq.sizes.step_padding import gpu_padded
from llmpq.workload import Workload

_log = logging.getLogger("llmpq.tune")

SECONDS = 90.0
LAYERS = 4
"""Decoder layers of the steps that are timed."""
DECODE_ROWS = 256
"""Rows up to which a product is timed in a step."""
REPEATS = 24
LIMIT = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Difference from what is chosen untuned, relative: one rounding of the result, and some."""


@dataclass(frozen=True, kw_only=True)
class TuneJob:
    """What is tuned: the products of a model at the rows of a workload."""

    spec: ModelSpec
    precisions: tuple[Precision, ...]
    form: QuantizationForm
    workload: Workload
    prefill_microbatch: int
    decode_microbatch: int
    seconds: float = SECONDS

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the products, those of most steps first."""
        decode = (self.decode_microbatch, 1)
        length = self.workload.prompt_len
        prompts = (gpu_padded(length), gpu_padded(self.prefill_microbatch * length))
        return tuple(dict.fromkeys(r for r in (*decode, *prompts) if r <= 8192))


def weight_only(precisions: Sequence[Precision]) -> tuple[Precision, ...]:
    """Return the precisions whose products this tunes: low-bit weights, 16-bit inputs."""
    found = (p for p in precisions if p.weight_bits < 16 and p.activation_bits == 16)
    return tuple(dict.fromkeys(found))


def job_of(plan: Plan, spec: ModelSpec, seconds: float = SECONDS) -> TuneJob:
    """Return what a plan's run multiplies."""
    precisions = [p for stage in plan.stages for p in stage.precisions]
    return TuneJob(
        spec=spec,
        precisions=weight_only(precisions),
        form=plan.quantization,
        workload=plan.workload,
        prefill_microbatch=plan.prefill_microbatch,
        decode_microbatch=plan.decode_microbatch,
        seconds=seconds,
    )


def tune(job: TuneJob) -> list[TunedProduct]:
    """Search, keep what won in the cache directory, and return what was found of every product."""
    if not job.precisions:
        raise ValueError(
            "nothing to tune: no layer has low-bit weights and 16-bit inputs; name a precision "
            "that has, as --bits w4a16, or a plan with such layers"
        )
    device = _device()
    until = time.monotonic() + job.seconds
    found: list[TunedProduct] = []
    late = 0
    for precision in job.precisions:
        timer = StepTimer(job, precision, device)
        some, rest = search(
            list(timer.products()), machine_of(device), timer, lambda: until - time.monotonic()
        )
        found, late = found + some, late + len(rest)
        del timer
        torch.cuda.empty_cache()
    won = {
        f.product: learned.entry_of(f.product, f.config, f.us, f.before_us)
        for f in found
        if f.config is not None
    }
    key, now = learned.card_key(device), datetime.datetime.now(datetime.UTC)
    path = learned.write(key, won, now=now) if won else key.path
    kept = f", kept in '{path}'" if won else ""
    rest_text = f"; no time was left for {late}: give more --seconds" if late else ""
    _log.info("%d of %d products run faster%s%s", len(won), len(found), kept, rest_text)
    choice.read_again()
    return found


def _device() -> torch.device:
    """Return this machine's GPU; raises `ValueError` where there is nothing to tune."""
    if not torch.cuda.is_available():
        raise ValueError(
            "nothing to tune: this machine has no CUDA GPU, and a CPU has one form of each "
            "product; tune on the machine that has the GPU"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    if machine_of(device).capability < TENSOR_CORES:
        raise ValueError(
            f"nothing to tune: on {torch.cuda.get_device_name(device)}, older than sm_80, every "
            "product is dequantised, then multiplied by cuBLAS"
        )
    return device


def line(found: TunedProduct) -> str:
    """Return a product's line: its shape, what holds it before and after."""
    p = found.product
    what = "as chosen" if found.config is None else str(config_entry(found.config))
    gain = 100 * (1 - found.us / found.before_us)
    timed = "alone" if p.rows > DECODE_ROWS else f"a step of up to {LAYERS} layers"
    return (
        f"w{p.bits} {p.k} x {p.n}, {p.rows} rows: {found.before_us:.1f} -> {found.us:.1f} us "
        f"{timed} ({gain:.1f} %), {found.tried} tried: {what}"
    )


class StepTimer:
    """Times a product of one precision in the steps that hold it."""

    def __init__(self, job: TuneJob, precision: Precision, device: torch.device) -> None:
        # Triton is not imported where there is no GPU.
        from llmpq.runtime.backends.backend import backend_of

        self._job = job
        self._precision = precision
        self._device = device
        self._dtype = DTYPES[job.workload.dtype]
        spec = replace(job.spec, num_layers=min(LAYERS, job.spec.num_layers))
        scheme = job.form.settings().scheme
        layers = range(spec.num_layers)
        schemes = dict.fromkeys(layers, scheme(precision))
        self.model = StageModel.build(
            spec,
            layers,
            [precision] * len(layers),
            first=True,
            last=True,
            dtype=self._dtype,
            device=device,
            scheme=scheme,
            source=CopiedLayers(RandomSource(spec, device=device), schemes, device),
            runner=backend_of(device).layers(),
        )
        self._weights = [
            part.weight
            for part in self.model.layers.modules()
            if isinstance(part, Linear) and part.weight.bits < 16
        ]

    def products(self) -> Iterator[Product]:
        """Yield the products, those of the most frequent steps first, then the largest."""
        shapes = {(w.out_features, w.in_features): w for w in self._weights}
        for rows in dict.fromkeys(map(choice.rounded_rows, self._job.rows)):
            for n, k in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
                form = choice.form_name(self._dtype, shapes[n, k].symmetric)
                yield Product(self._precision.weight_bits, n, k, rows, form)

    def __call__(self, product: Product, config: Config | None) -> float:
        """Return the microseconds of a step, or of the product alone; `RuntimeError` if wrong."""
        size = product.n, product.k
        weights = [w for w in self._weights if (w.out_features, w.in_features) == size]
        try:
            choice.run_as(product, None)
            want = None if config is None else self._sample(weights[0], product.rows)
            choice.run_as(product, config)
            if want is not None:
                self._check(want, self._sample(weights[0], product.rows))
            if product.rows > DECODE_ROWS:
                return self._alone_us(weights, product.rows)
            return self._step_us(product.rows)
        finally:
            choice.run_as(product, None)

    @torch.inference_mode()
    def _sample(self, weight: Weight, rows: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(7)
        shape = rows, weight.in_features
        x = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        return weight.matmul(x)

    def _check(self, want: Tensor, got: Tensor) -> None:
        error = float((got.float() - want.float()).norm() / want.float().norm())
        if not error < LIMIT[self._dtype]:
            raise RuntimeError(f"its result differs by {error:.1e}")

    def _step_us(self, rows: int) -> float:
        from llmpq.runtime.backends.build_stage import stage_over_pool
        from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
        from llmpq.runtime.backends.gpu.cuda_step_times import seconds_of, step_message

        work = self._job.workload
        context = max(1, min(work.prompt_len + work.gen_len // 2, work.max_len - 1))
        size = PoolSize(
            num_blocks=rows * pool_blocks(KVPrecision.KV16, context + 1),
            slots=rows,
            max_len=context + 1,
        )
        compute = stage_over_pool(
            self.model,
            KVPrecision.KV16,
            size,
            layers=range(len(self.model.layers)),
            dtype=self._dtype,
            device=self._device,
            step_tokens=rows,
        )
        assert isinstance(compute, CudaStageRunner)
        message = step_message(rows, context, 1, num_blocks=size.num_blocks)
        compute.kv.take_rows(message.rows_with_news, message.starts_with_news)
        return seconds_of(lambda: compute.plain(message), repeats=REPEATS) * 1e6

    @torch.inference_mode()
    def _alone_us(self, weights: Sequence[Weight], rows: int) -> float:
        x_MK = torch.randn(rows, weights[0].in_features, device=self._device, dtype=self._dtype)
        more = copies_for(weights[0].nbytes) - len(weights)  # else the L2 would hold them
        weights = [*weights, *(copy.deepcopy(weights[0]) for _ in range(more))]
        times = time_launches(
            lambda i: weights[i].matmul(x_MK), len(weights), launches=8, repeats=5
        )
        return statistics.median(times)
