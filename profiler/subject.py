"""What is timed: layers, embedding and head of the runtime itself, with random weights.

A layer is timed as a stage of a few distinct layers, so that one layer's weights do not sit in a
cache that the real stage's layers share, and what a step does once counts once per stage. The time
is divided by their number. Rows of a micro-batch have unequal lengths, as prompts do: every other
row is a token shorter.

Legend: B rows, Q new tokens, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmpq.cost_model import Phase
from llmpq.memory import Quantization, layer_weight_bytes
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.profiler.messages import Case, Target, Timing
from llmpq.profiler.timing import Effort, time_call
from llmpq.runtime.kv_cache import PlainKVCache
from llmpq.runtime.loader import RandomSource
from llmpq.runtime.sampling import sample
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.runtime.stage_model import DTYPES, StageModel
from llmpq.runtime.step import Step
from llmpq.workload import DTYPE_BYTES

MAX_LAYERS = 4
"""Layers of a timed stage."""
MAX_LAYERS_BYTES = 4 << 30
"""Fewer layers are timed where they would be larger than this together."""


class Subject:
    """The model on one device; parts are built when first timed, one stage is kept at a time."""

    def __init__(self, spec: ModelSpec, device: torch.device, quantization: Quantization) -> None:
        self.spec, self.device, self.quantization = spec, device, quantization
        self._built: tuple[object, StageModel] | None = None

    def time(self, case: Case, effort: Effort) -> Timing:
        """Time one case, per layer where it is one of layers."""
        make = {"layer": self._layer, "embedding": self._embedding, "head": self._head}
        with torch.inference_mode():
            call, layers = make[case.target.part](case)
            graph = case.target.phase is not Phase.PREFILL
            return time_call(call, device=self.device, effort=effort, layers=layers, graph=graph)

    def _layer(self, case: Case) -> tuple[Callable[[], Tensor], int]:
        target, spec, dtype = case.target, self.spec, DTYPES[case.target.dtype]
        layers = self.num_layers(target)
        stage = self._stage(target, [target.precision] * layers)
        kv = PlainKVCache(
            spec,
            num_layers=layers,
            slots=case.v,
            max_len=case.length,
            dtype=dtype,
            device=self.device,
        )
        hidden_BQh = torch.randn(case.v, _q_len(case), spec.hidden, device=self.device, dtype=dtype)
        return self._per_step(case, lambda step: stage(hidden_BQh, step, kv)), layers

    def _embedding(self, case: Case) -> tuple[Callable[[], Tensor], int]:
        stage = self._stage(case.target, [])
        shape = (case.v, _q_len(case))
        tokens_BQ = torch.randint(self.spec.vocab, shape, device=self.device)
        kv = None
        return self._per_step(case, lambda step: stage(tokens_BQ, step, kv)), 1

    def _head(self, case: Case) -> tuple[Callable[[], Tensor], int]:
        """Final norm, logits and greedy sampling; every position where drafts are verified."""
        stage = self._stage(case.target, [])
        hidden_BQh = torch.randn(
            case.v,
            _q_len(case),
            self.spec.hidden,
            device=self.device,
            dtype=DTYPES[case.target.dtype],
        )
        greedy = [SamplingParams()] * case.v

        def run(step: Step) -> Tensor:
            if case.target.phase is Phase.VERIFY:
                return stage.logits(hidden_BQh, step, all_positions=True).argmax(-1)
            return sample(stage.logits(hidden_BQh, step), greedy, [0] * case.v)

        return self._per_step(case, run), 1

    def _per_step(self, case: Case, run: Callable[[Step], Tensor]) -> Callable[[], Tensor]:
        """Build the step anew in every call, as the runtime does; a graph replays one step."""
        if self.device.type == "cuda":
            step = make_step(case, self.device)
            return lambda: run(_unused(step))
        return lambda: run(make_step(case, self.device))

    def num_layers(self, target: Target) -> int:
        """Return how many distinct layers are timed together."""
        one = layer_weight_bytes(
            self.spec, target.precision, self.quantization, DTYPE_BYTES[target.dtype]
        )
        return max(1, min(MAX_LAYERS, self.spec.num_layers, MAX_LAYERS_BYTES // one))

    def _stage(self, target: Target, precisions: list[Precision]) -> StageModel:
        key = (target.part, target.precision, target.dtype)
        if self._built is None or self._built[0] != key:
            self._built = None
            stage = StageModel.build(
                self.spec,
                range(len(precisions)),
                precisions,
                first=target.part == "embedding",
                last=target.part == "head",
                dtype=DTYPES[target.dtype],
                device=self.device,
                scheme=self.quantization.scheme,
                source=RandomSource(self.spec, device=self.device),
            )
            self._built = (key, stage)
        return self._built[1]


def make_step(case: Case, device: torch.device) -> Step:
    """Return the step of a case: slots 0..v-1, every other row a token shorter than `length`."""
    lengths = [max(1, case.length - row % 2) for row in range(case.v)]
    if case.target.phase is Phase.PREFILL:
        starts, num_new = [0] * case.v, lengths
    else:
        num_new = [case.q_len] * case.v
        starts = [max(0, length - case.q_len) for length in lengths]
    return Step.of(range(case.v), starts, num_new, device=device)


def _q_len(case: Case) -> int:
    return case.length if case.target.phase is Phase.PREFILL else case.q_len


def _unused(step: Step) -> Step:
    """Forget what the step derived in an earlier call, so that every run derives it."""
    step.memo.clear()
    return step
