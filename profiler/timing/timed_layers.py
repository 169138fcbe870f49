"""What is timed: layers, embedding and head of the runtime itself, with random weights.

A layer is timed as a stage of a few distinct layers, so that one layer's weights do not sit in a
cache that the real stage's layers share, and what a step does once counts once per stage. The time
is divided by their number. Rows of a micro-batch have unequal lengths, as prompts do: every other
row is a token shorter.

Legend: B rows, Q new tokens, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from llmpq.cost_model import Phase
from llmpq.memory import Quantization, layer_weight_bytes
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.profiler.timing.cases import CaseTime, Sampling, Target, TimedCase
from llmpq.profiler.timing.stopwatch import Effort, capture, time_call
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner, widened
from llmpq.runtime.backends.slot_stage_runner import SlotStageRunner
from llmpq.runtime.cache.kv_by_precision import make_kv_cache
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.layers import DecoderLayer
from llmpq.runtime.models.linear import round_activations
from llmpq.runtime.models.stage_model import DTYPES, StageModel
from llmpq.runtime.pending import arrived
from llmpq.runtime.request import StepKind
from llmpq.runtime.sampling_params import TokenChoice
from llmpq.runtime.step import Step
from llmpq.runtime.step_message import StepMessage
from llmpq.runtime.weights.sources import RandomSource
from llmpq.sizes.gpu_workspace import padded_prompt
from llmpq.workload import DTYPE_BYTES, Workload

MAX_LAYERS = 4
"""Layers of a timed stage."""
MAX_LAYERS_BYTES = 4 << 30
"""Fewer layers are timed where they would be larger than this together."""

ONE_LAYER_TOKENS = 4096
"""New tokens from which a whole GPU takes milliseconds a layer, and what a step does once is
nothing; a share of a GPU from fewer tokens."""

_KINDS = {
    Phase.PREFILL: StepKind.PREFILL,
    Phase.DECODE: StepKind.DECODE,
    Phase.VERIFY: StepKind.VERIFY,
}


class TimedModel:
    """The model on one device; parts are built when first timed, one stage is kept at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        quantization: Quantization,
        sampling: Sampling,
        *,
        share: float = 1.0,
    ) -> None:
        """`share`: of the GPU's multiprocessors, 1 if it is whole."""
        self.spec, self.device, self.quantization = spec, device, quantization
        self._one_layer_tokens = ONE_LAYER_TOKENS * share
        self._sampling = TokenChoice(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )
        self._built: tuple[object, StageModel] | None = None

    def time(self, case: TimedCase, effort: Effort) -> CaseTime:
        """Time one case: per layer, where it is one of layers."""
        target, stage = case.target, self._stage_of(case)
        layers = max(1, len(stage.layers))
        # A graph shows the device's own time, also of prompts, which run eagerly: the time the host
        # takes to enqueue them is a case of its own. Random numbers stay out of graphs, and experts
        # that ask the host.
        sampled = target.part == "head" and not self._sampling.greedy
        asks = sampled or stage.asks_host
        graph = self.device.type == "cuda" and not asks and not case.launch
        if target.part == "head":
            effort = replace(effort, rest_s=0.0)  # it follows layers at once; they have waited
        if target.part != "layer" or target.phase is not Phase.PREFILL:
            effort = replace(effort, sustain_s=0.0)  # bound by memory, whose clock stays
        with torch.inference_mode():
            call = self._call(case, stage, graph=graph)
            return time_call(call, device=self.device, effort=effort, layers=layers, graph=graph)

    def captured(self, case: TimedCase) -> tuple[Callable[[], object], int]:
        """Return a captured case as a call that replays it, and the layers it goes through."""
        stage = self._stage_of(case)
        with torch.inference_mode():
            call = self._call(case, stage, graph=True)
            return capture(call, self.device), max(1, len(stage.layers))

    def num_layers(self, target: Target) -> int:
        """Return how many distinct layers are timed together."""
        one = layer_weight_bytes(
            self.spec, target.precision, self.quantization, DTYPE_BYTES[target.dtype]
        )
        return max(1, min(MAX_LAYERS, self.spec.num_layers, MAX_LAYERS_BYTES // one))

    def _call(self, case: TimedCase, stage: StageModel, *, graph: bool) -> Callable[[], object]:
        """Return the stage's work on one micro-batch; in a graph, on inputs that stay in place."""
        dtype = DTYPES[case.target.dtype]
        kv = self._cache(case, len(stage.layers))
        message = micro_batch(case, self._sampling)
        hidden_BQh = None
        if case.target.part != "embedding":
            shape = (case.v, message.q_len, self.spec.hidden)
            hidden_BQh = torch.randn(shape, device=self.device, dtype=dtype)
        if not graph:
            compute = self._compute(case, stage, kv)
            return lambda: arrived(compute.run(message, hidden_BQh))
        x = message.tokens_BQ().to(self.device) if hidden_BQh is None else hidden_BQh
        step, x = self._graph_step(case, message, x)
        every = case.target.phase is Phase.VERIFY

        def replayed() -> Tensor:
            step.memo.clear()
            output = stage(x, step, kv)
            if stage.head is None:
                return output
            return stage.logits(output, step, all_positions=every).argmax(-1)

        return replayed

    def _compute(self, case: TimedCase, stage: StageModel, kv: KVCache) -> SlotStageRunner:
        """Return what the runtime computes with; hidden states stay on a GPU, as for its links."""
        dtype = DTYPES[case.target.dtype]
        if self.device.type == "cpu":
            return SlotStageRunner(stage, kv, self.device, dtype)
        workload = Workload(
            batch=case.v,
            prompt_len=case.length,
            gen_len=1,
            kv=case.target.kv,
            dtype=case.target.dtype,
        )
        compute = CudaSlotStageRunner(
            stage,
            kv,
            self.device,
            dtype,
            workload=workload,
            decode_microbatch=case.v,
            graphs=False,
        )
        compute.leave_on_device(hidden=True)
        return compute

    def _graph_step(self, case: TimedCase, message: StepMessage, x: Tensor) -> tuple[Step, Tensor]:
        """Return a prompt padded as the runtime does, or a decode step that says no more of its
        rows than the runtime's graphs know; and its ids or hidden states."""
        step = message.step(self.device)
        if case.target.phase is Phase.PREFILL:
            return widened(step, x, padded_prompt(step.q_len))
        if case.target.phase is Phase.DECODE:
            step = replace(step, max_end=case.length, runs=(), uniform=False)
        return step, x

    def _cache(self, case: TimedCase, num_layers: int) -> KVCache:
        return make_kv_cache(
            self.spec,
            case.target.kv,
            num_layers=num_layers,
            slots=case.v,
            max_len=padded_prompt(case.length) if self.device.type == "cuda" else case.length,
            dtype=DTYPES[case.target.dtype],
            device=self.device,
        )

    def _stage_of(self, case: TimedCase) -> StageModel:
        """Return the stage that a case is timed on: a single layer where one takes long enough."""
        stage = self._stage(case.target)
        if self.device.type == "cpu" or case.new_tokens < self._one_layer_tokens:
            return stage
        first = [layer for layer in stage.layers if isinstance(layer, DecoderLayer)][:1]
        return StageModel(self.spec, first, stage.embedding, stage.head)

    def _stage(self, target: Target) -> StageModel:
        key = (target.part, target.precision, target.dtype)
        if self._built is None or self._built[0] != key:
            self._built = None
            layers = self.num_layers(target) if target.part == "layer" else 0
            self._built = (key, self._build(target, [target.precision] * layers))
        return self._built[1]

    def _build(self, target: Target, precisions: list[Precision]) -> StageModel:
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
        )
        if self.device.type == "cpu" and self.quantization.cpu_activations == "int8":
            round_activations(stage)
        return stage


def micro_batch(case: TimedCase, sampling: TokenChoice) -> StepMessage:
    """Return the micro-batch of a case in slots 0..v-1, every other row a token shorter."""
    lengths = [max(case.q_len, case.length - row % 2) for row in range(case.v)]
    if case.target.phase is Phase.PREFILL:
        starts, num_new = [0] * case.v, lengths
    else:
        starts, num_new = [length - case.q_len for length in lengths], [case.q_len] * case.v
    return StepMessage(
        kind=_KINDS[case.target.phase],
        slots=range(case.v),
        starts=starts,
        num_new=num_new,
        sample_steps=[0] * case.v,
        sampling=[sampling] * case.v,
        tokens=[[0] * count for count in num_new],
    )
