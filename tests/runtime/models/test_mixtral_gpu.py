"""Experts on a GPU: the CPU's tokens in float32, dense and quantised."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.models.experts import SparseMLP
from llmpq.runtime.models.part_shapes import Shapes
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.sources import RandomSource
from reference.pipeline import ReferencePipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SPEC = dataclasses.replace(
    ModelSpec.by_name("mixtral-8x7b"),
    num_layers=3,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=384,
    vocab=700,
)


class SameInAnyDtype(RandomSource):
    """Random weights that 16 bits round: `RandomSource` draws others for every dtype."""

    def _parts(self, shapes: Shapes, stream: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        drawn = super()._parts(shapes, stream, torch.float32)
        return {name: tensor.to(dtype) for name, tensor in drawn.items()}


PROMPTS = [[5, 9, 30, 7, 600, 2], [3, 3, 60], [311]]


@pytest.mark.parametrize("splits", [(), (1,)])
def test_tokens_are_those_of_the_cpu(splits: tuple[int, ...]) -> None:
    here, there = (
        ReferencePipeline.build(
            SPEC, RandomSource(SPEC, seed=4), splits=splits, device=device
        ).generate(PROMPTS, max_new=12)
        for device in ("cpu", "cuda")
    )
    assert len({tuple(row) for row in here}) == len(PROMPTS), "the oracle must not be constant"
    assert here == there


@pytest.mark.parametrize("bits", ["w8a16", "w4a16", "w8a8"])
def test_quantised_experts_are_near_the_cpus(bits: str) -> None:
    def logits(device: str, dtype: torch.dtype, *, rolled: int = 0) -> torch.Tensor:
        pipeline = ReferencePipeline.build(
            SPEC,
            SameInAnyDtype(SPEC, seed=4),
            precisions=[Precision.parse(bits)] * SPEC.num_layers,
            dtype=dtype,
            device=device,
        )
        for part in pipeline.stages[0].modules():
            if isinstance(part, SparseMLP):
                part.routing.weight_Eh = part.routing.weight_Eh.roll(rolled, dims=0)
        step = Step.of([0], [0], [40], device=device)
        tokens = torch.arange(40, device=device)[None] * 17 % SPEC.vocab
        caches = pipeline.caches(1, 40)
        return pipeline.logits(tokens, step, caches, all_positions=True)[0].float().cpu()

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        # A router may send a token to another expert for a rounding: the middle one says more.
        return float(((got - want).norm(dim=1) / want.norm(dim=1)).median())

    want = logits("cpu", torch.float32)
    rounding = error(logits("cpu", torch.bfloat16), want)
    assert error(logits("cuda", torch.bfloat16), want) < 2 * rounding
    assert error(logits("cpu", torch.float32, rolled=1), want) > 2 * rounding
