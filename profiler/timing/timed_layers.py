"""Times steps of the engine's own stage over a pool of KV blocks, with random weights.

A layer is timed as a stage of a few distinct layers, so that one layer's weights do not sit in a
cache that the real stage's layers share; the time is divided by their number. Steps are those that
the scheduler makes: a chunk of each of v prompts, a decode step of v requests, a verify step of
q tokens each. On a CPU a decode step of all layers is one call; a GPU replays the graph of a step,
or computes a longer one as it comes. Of layers that devices share in tensor parallel the part of
one is timed, without its sums. Where a model's layers mix tokens in unlike ways (recurrent layers
beside attention), layers of each kind are timed by themselves, and a layer takes their mean, as
plans take all layers to be equal.

Legend: T tokens of a step, h hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmpq.costs.cost_model import Phase
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.timing.cases import CaseTime, Effort, Sampling, Target, TimedCase
from llmpq.profiler.timing.shape_grid import TIMED_LAYERS
from llmpq.profiler.timing.stopwatch import time_call
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.backends.build_stage import stage_over_pool
from llmpq.runtime.links.member_links import AllReduce
from llmpq.runtime.models.layers import DecoderLayer
from llmpq.runtime.models.linear import round_activations
from llmpq.runtime.models.stage_model import DTYPES, StageModel
from llmpq.runtime.models.wiring import Split
from llmpq.runtime.requests.request import PagedRow, StepKind, StepMessage
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.steps.device_copies import arrived
from llmpq.runtime.steps.step import message_of_rows
from llmpq.runtime.weights.sources import RandomSource
from llmpq.sizes.kv_format import first_seen_block, pool_blocks
from llmpq.sizes.memory import Quantization, layer_weight_bytes
from llmpq.sizes.pool_size import PoolSize
from llmpq.workload import DTYPE_BYTES

STAGE_BYTES = 256 << 20
"""On a CPU more layers are timed together while they are smaller than this: what a step does once
is then shared by as many layers as in the real stage."""
MAX_LAYERS_BYTES = 4 << 30
"""Fewer layers are timed where they would be larger than this together."""
LEAST_SHARE = 0.05
"""Of a step of the embedding or the head: what it takes at least beside the step itself."""

ONE_LAYER_TOKENS = 4096
"""New tokens from which a whole GPU takes milliseconds a layer, and what a step does once is
nothing; a share of a GPU from fewer tokens."""

_KINDS = {
    Phase.PREFILL: StepKind.PREFILL,
    Phase.DECODE: StepKind.DECODE,
    Phase.VERIFY: StepKind.VERIFY,
}


class TimedModel:
    """The model on one device; parts are built when first timed, one stage of a kind is held."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        quantization: Quantization,
        sampling: Sampling,
        *,
        share: float = 1.0,
        layers_bytes: int = MAX_LAYERS_BYTES,
    ) -> None:
        """`share`: of the GPU's multiprocessors, 1 if it is whole.

        `layers_bytes`: of the layers that are timed together, at most.
        """
        if spec.kv_sources or spec.altup or spec.per_layer_dim:
            raise ValueError(
                f"{spec.name} ({spec.family}) has layers that read what others made, which "
                "llmpq-profile does not time yet; plan without --costs: their times are then "
                "estimated"
            )
        self.spec = spec
        self._layers_bytes = layers_bytes
        kinds = kinds_of(spec)
        each = layers_bytes // len(kinds)
        settings = device, quantization, sampling
        self._kinds = [
            (TimedModel(one, *settings, share=share, layers_bytes=each), number / spec.num_layers)
            for one, number in (kinds.items() if len(kinds) > 1 else ())
        ]
        """Of a model whose layers differ: each kind, and its share of the layers."""
        self.device = device
        self.quantization = quantization
        self._one_layer_tokens = ONE_LAYER_TOKENS * share
        self._sampling = SamplerConfig(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )
        self._built: tuple[object, StageModel] | None = None

    def time(self, case: TimedCase, effort: Effort) -> CaseTime:
        """Time one case: per layer, where it is one of layers."""
        target = case.target
        if target.part == "layer" and self._kinds:
            found = [(timed.time(case, effort), share) for timed, share in self._kinds]
            return _mean(found, layers=self.spec.num_layers)
        if target.part == "head":
            effort = effort.model_copy(
                update={"rest_s": 0.0}
            )  # it follows layers at once; they have waited
        if target.part != "layer" or target.phase is not Phase.PREFILL:
            effort = effort.model_copy(
                update={"sustain_s": 0.0}
            )  # bound by memory, whose clock stays
        with torch.inference_mode():
            call, layers = self.step(case)
            timing = time_call(call, device=self.device, effort=effort, layers=layers)
            if target.part == "layer" or self.device.type != "cpu":
                return timing
            # What a step of a CPU's stage does once is in the time of its layers.
            bare = self._step(case, StageModel(self.spec, [], None, None))
            return _less(timing, time_call(bare, device=self.device, effort=effort, layers=1))

    def step(self, case: TimedCase) -> tuple[Callable[[], object], int]:
        """Return a case as a call that computes its step, and the layers it goes through."""
        stage = self._stage_of(case)
        with torch.inference_mode():
            return self._step(case, stage), max(1, len(stage.layers))

    def num_layers(self, target: Target) -> int:
        """Return how many distinct layers are timed together."""
        one = layer_weight_bytes(
            self._own(target), target.precision, self.quantization, DTYPE_BYTES[target.dtype]
        )
        together = STAGE_BYTES if self.device.type == "cpu" else 0
        wanted = min(max(TIMED_LAYERS, together // one), self._layers_bytes // one)
        return max(1, min(self.spec.num_layers, wanted))

    def _own(self, target: Target) -> ModelSpec:
        """Return the model that a device computes: of shared layers its part."""
        if not target.shares:
            return self.spec
        return Member(spec=self.spec, shares=target.shares, index=0).own

    def _step(self, case: TimedCase, stage: StageModel) -> Callable[[], object]:
        """Return a step of one micro-batch on a stage with a pool of its own."""
        dtype, size = DTYPES[case.target.dtype], pool_of(self.spec, case)
        compute = stage_over_pool(
            stage,
            case.target.kv,
            size,
            layers=range(len(stage.layers)),
            dtype=dtype,
            device=self.device,
            step_tokens=case.new_tokens,
        )
        states = compute.kv.states
        if states is not None and case.target.phase is Phase.VERIFY:
            compute.enable_speculation("ngram", size, layers=range(len(stage.layers)))
        if self.device.type != "cpu":
            compute.leave_on_device(tokens=True)
        message = step_message(case, size, self._sampling)
        compute.kv.take_rows(message.rows_with_news, message.starts_with_news)
        hidden_1Th = None
        if stage.embedding is None:
            shape = (1, message.num_tokens, self.spec.hop_features)
            hidden_1Th = torch.randn(shape, device=self.device, dtype=dtype)
        call = compute.repeatable(_without_new_blocks(message), hidden_1Th)

        def step() -> object:
            if states is not None:
                states.forget_notes()
            return arrived(call())

        return step

    def _stage_of(self, case: TimedCase) -> StageModel:
        """Return the stage that a case is timed on: a single layer where one takes long enough."""
        stage = self._stage(case.target)
        if self.device.type == "cpu" or case.new_tokens < self._one_layer_tokens:
            return stage
        first = [layer for layer in stage.layers if isinstance(layer, DecoderLayer)][:1]
        ends = stage.embedding, stage.head
        return StageModel(stage.spec, first, *ends, whole=stage.whole_spec, reduce=stage.reduce)

    def _stage(self, target: Target) -> StageModel:
        key = (target.part, target.precision, target.dtype, target.shares)
        if self._built is None or self._built[0] != key:
            self._built = None
            layers = self.num_layers(target) if target.part == "layer" else 0
            self._built = (key, self._build(target, [target.precision] * layers))
        return self._built[1]

    def _build(self, target: Target, precisions: list[Precision]) -> StageModel:
        split = None
        if target.shares:
            alone = AllReduce()
            alone.connect(_OwnPart())
            split = Split(Member(spec=self.spec, shares=target.shares, index=0), alone)
        stage = StageModel.build(
            self.spec,
            range(len(precisions)),
            precisions,
            first=target.part == "embedding",
            last=target.part == "head",
            dtype=DTYPES[target.dtype],
            device=self.device,
            scheme=self.quantization.scheme,
            head_precision=target.precision,
            source=RandomSource(self.spec, device=self.device),
            runner=backend_of(self.device).layers(),
            split=split,
        )
        if self.device.type == "cpu" and self.quantization.cpu_activations == "int8":
            round_activations(stage)
        return stage


class _OwnPart:
    """In the place of a sum over devices what this one has: sums are timed by themselves."""

    captures = True

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the part, plus the residual."""
        return part if residual is None else part.add_(residual)

    def normed(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the part plus the residual, which the caller is to norm."""
        return self(part, residual), None


def kinds_of(spec: ModelSpec) -> dict[ModelSpec, int]:
    """Return a model of layers of each kind alone, and how many of the layers are of that kind.

    Where layers differ in no more than windows, or in a few dense ones, the model itself.
    """
    count = spec.num_layers
    if not spec.differs_in_attention and not spec.ffns:
        return {spec: count}
    found: Counter[ModelSpec] = Counter()
    for layer in range(count):
        windows = (spec.windows[layer],) * count if spec.windows and spec.attends(layer) else ()
        found[replace(spec.of_layer(layer), windows=windows, dense_layers=())] += 1
    return dict(found)


def pool_of(spec: ModelSpec, case: TimedCase) -> PoolSize:
    """Return a pool for the requests of a case, as a plan of as many counts it."""
    kv, each = case.target.kv, _blocks(case)
    window = spec.widest_window if kv is KVPrecision.KV16 else 0
    seen = each - first_seen_block(_first(case), window) if window else 0
    return PoolSize(
        num_blocks=max(1, case.v * each),
        slots=case.v,
        max_len=_end(case),
        prefix_cache=kv is KVPrecision.KV16,
        window=window if 0 < seen < each else 0,
        window_blocks=case.v * seen if 0 < seen < each else 0,
    )


def step_message(case: TimedCase, size: PoolSize, sampling: SamplerConfig) -> StepMessage:
    """Return the micro-batch of a case in slots 0..v-1, whose blocks follow each other.

    Prompts are equally long, as planned; every other row that decodes is a token shorter.
    """
    q_len, phase = case.q_len, case.target.phase
    if phase is Phase.PREFILL:
        starts, num_new = [case.start] * case.v, [case.length] * case.v
    else:
        ends = [max(q_len, case.length - row % 2) for row in range(case.v)]
        starts, num_new = [end - q_len for end in ends], [q_len] * case.v
    drafts = (0,) * (q_len - 1) if phase is Phase.VERIFY else ()
    each, seen = _blocks(case), size.window_blocks // case.v
    return message_of_rows(
        _KINDS[phase],
        range(case.v),
        starts,
        num_new,
        sampling=sampling,
        rows=[
            PagedRow(
                slot=row,
                drafts=drafts,
                new_blocks=tuple(range(row * each, (row + 1) * each)),
                first_window_block=each - seen,
                new_window_blocks=tuple(range(row * seen, (row + 1) * seen)),
            )
            for row in range(case.v)
        ],
    )


def _first(case: TimedCase) -> int:
    """Return the first position of a case's new tokens, of its shorter rows."""
    if case.target.phase is Phase.PREFILL:
        return case.start
    return max(0, case.length - 1 - case.q_len)


def _blocks(case: TimedCase) -> int:
    """Return the blocks that each of a case's requests has."""
    return pool_blocks(case.target.kv, _end(case))


def _end(case: TimedCase) -> int:
    """Return the tokens of a request's cache after the step."""
    new = case.length if case.target.phase is Phase.PREFILL else case.q_len
    return max(case.length, case.start + new)


def _without_new_blocks(message: StepMessage) -> StepMessage:
    """Return the step as one that goes on in blocks its rows have had before."""
    return replace(
        message,
        news={
            number: PagedRow(
                slot=row.slot,
                drafts=row.drafts,
                first_block=len(row.new_blocks),
                first_window_block=row.first_window_block + len(row.new_window_blocks),
            )
            for number, row in message.news.items()
        },
    )


def _mean(found: Sequence[tuple[CaseTime, float]], *, layers: int) -> CaseTime:
    """Return what a layer takes on average, of times of each kind and its share."""

    def mean(of: Callable[[CaseTime], float]) -> float:
        return sum(of(timing) * share for timing, share in found)

    return CaseTime(
        seconds=mean(lambda timing: timing.seconds),
        low_s=mean(lambda timing: timing.low_s),
        high_s=mean(lambda timing: timing.high_s),
        repeats=min(timing.repeats for timing, _ in found),
        layers=layers,
    )


def _less(timing: CaseTime, bare: CaseTime) -> CaseTime:
    """Return what a part adds to a step."""
    least = LEAST_SHARE * timing.seconds
    low, mid, high = (
        max(least, seconds - bare.seconds)
        for seconds in (timing.low_s, timing.seconds, timing.high_s)
    )
    return timing.model_copy(update={"seconds": mid, "low_s": low, "high_s": high})
