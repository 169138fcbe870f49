"""The plain loop: a fixed batch through stages in one process, token by token.

This is the oracle of the engine (which overlaps what happens here in turn), and what benchmarks
run models with that no directory holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision, WeightScheme
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.recurrent_states import with_states
from llmpq.runtime.models.layer_tensors import TensorSource
from llmpq.runtime.models.layers import recurrence_of
from llmpq.runtime.models.sampling import SamplerConfig, sample
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.sizes.memory import Quantization
from reference.contiguous_kv import make_kv_cache

GREEDY = SamplerConfig()
_POSITIONS_AT_ONCE = 256
"""Positions whose logits are made together: a few float copies of them live at once."""


@dataclass(frozen=True)
class ReferencePipeline:
    """All stages of a model in this process."""

    spec: ModelSpec
    stages: tuple[StageModel, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        source: TensorSource,
        *,
        splits: Sequence[int] = (),
        precisions: Sequence[Precision] | None = None,
        scheme: Callable[[Precision], WeightScheme | None] | None = None,
        head_precision: Precision = Precision.W16A16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_len: int | None = None,
    ) -> ReferencePipeline:
        """Build the stages between `splits` (layer numbers); all 16-bit unless asked otherwise.

        `scheme` says how a precision is stored; by default as a plan's default `Quantization`.
        `max_len`: tokens a request may have, as a plan knows them (`ModelSpec.at_length`).
        """
        chosen = tuple(precisions or [Precision.W16A16] * spec.num_layers)
        spec = spec if max_len is None else spec.at_length(max_len)
        bounds = [0, *splits, spec.num_layers]
        stages = tuple(
            StageModel.build(
                spec,
                range(start, end),
                chosen[start:end],
                first=start == 0,
                last=end == spec.num_layers,
                dtype=dtype,
                device=device,
                scheme=scheme or Quantization().scheme,
                head_precision=head_precision,
                source=source,
                runner=backend_of(device).layers(),
            )
            for start, end in zip(bounds, bounds[1:], strict=False)
        )
        return cls(spec, stages, dtype, torch.device(device))

    @classmethod
    def from_directory(cls, path: str | Path, **options: object) -> ReferencePipeline:
        """Build from a local Hugging Face directory; options as in `build`."""
        spec = ModelSpec.from_directory(path)
        return cls.build(spec, open_checkpoint(path, spec), **options)  # type: ignore[arg-type]

    def caches(self, slots: int, max_len: int) -> list[KVCache]:
        """Return one empty 16-bit cache per stage."""
        lengths = [len(stage.layers) for stage in self.stages]
        return [
            with_states(
                make_kv_cache(
                    self.spec,
                    KVPrecision.KV16,
                    num_layers=len(stage.layers),
                    first_layer=sum(lengths[:number]),
                    slots=slots,
                    max_len=max_len,
                    dtype=self.dtype,
                    device=self.device,
                ),
                self.spec,
                num_layers=sum(recurrence_of(layer) is not None for layer in stage.layers),
                slots=slots,
                snapshots=0,
                dtype=self.dtype,
                device=self.device,
            )
            for number, stage in enumerate(self.stages)
        ]

    def logits(
        self,
        tokens_BQ: Tensor,
        step: Step,
        caches: Sequence[KVCache],
        *,
        all_positions: bool = False,
    ) -> Tensor:
        """Run all stages on one step."""
        hidden_BQh = self.hidden(tokens_BQ, step, caches)
        return self.stages[-1].logits(hidden_BQh, step, all_positions=all_positions)

    def hidden(self, tokens_BQ: Tensor, step: Step, caches: Sequence[KVCache]) -> Tensor:
        """Run all stages on one step, up to the head."""
        x = tokens_BQ
        for stage, cache in zip(self.stages, caches, strict=True):
            x = stage(x, step, cache)
        return x

    @torch.inference_mode()
    def scores(self, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Return what `tools.evaluate.Scores` asks for of tokens."""
        step = self._step([0], [0], [len(tokens)])
        caches, given_BQ = self.caches(1, len(tokens)), pad([tokens], self.device)
        hidden_BQh, own, likeliest = self.hidden(given_BQ, step, caches), [], []
        head = self.stages[-1].head
        assert head is not None
        for at in range(0, len(tokens) - 1, _POSITIONS_AT_ONCE):
            targets_N = given_BQ[0, at + 1 : at + 1 + _POSITIONS_AT_ONCE]
            logprobs_NV = head(hidden_BQh[0, at : at + len(targets_N)]).float().log_softmax(-1)
            own += logprobs_NV.gather(1, targets_N[:, None])[:, 0].tolist()
            likeliest += logprobs_NV.argmax(-1).tolist()
        return own, likeliest

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new: int,
        params: Sequence[SamplerConfig] | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of every prompt; an end-of-text token ends nothing."""
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) == 0 or max_new < 1:
            raise ValueError("a prompt needs at least one token and max_new must be at least 1")
        self._require_one_rope(lengths, max_new)
        chosen = list(params or [GREEDY] * len(prompts))
        slots = list(range(len(prompts)))
        caches = self.caches(len(prompts), max(lengths) + max_new - 1)
        outputs: list[Tensor] = []
        for index in range(max_new):
            if index == 0:
                x, step = pad(prompts, self.device), self._step(slots, [0] * len(slots), lengths)
            else:
                starts = [length + index - 1 for length in lengths]
                x, step = outputs[-1][:, None], self._step(slots, starts, [1] * len(slots))
            logits_BV = self.logits(x, step, caches)
            outputs.append(sample(logits_BV, chosen, [index] * len(slots)))
        return torch.stack(outputs, dim=1).tolist()

    def _require_one_rope(self, lengths: Sequence[int], max_new: int) -> None:
        """Refuse requests that begin with longrope's short factors and end with its long ones."""
        scaling = self.spec.rope_scaling
        if scaling is None or scaling.kind != "longrope" or not scaling.by_length:
            return
        limit = scaling.original_max_positions
        if any(length <= limit < length + max_new - 1 for length in lengths):
            raise ValueError(
                f"a request grows beyond {limit} tokens, where {self.spec.name} changes its rope "
                "factors; build the pipeline with max_len, or generate fewer tokens"
            )

    def _step(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Step:
        return Step.of(slots, starts, counts, device=self.device)


def pad(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Return token rows as one tensor, padded on the right with zeros."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]).to(device)
