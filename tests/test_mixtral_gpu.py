"""Experts on a GPU: the CPU's tokens in float32, dense and quantised."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.generate import LocalPipeline
from llmpq.runtime.loader import RandomSource

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
PROMPTS = [[5, 9, 30, 7, 600, 2], [3, 3, 60], [311]]


@pytest.mark.parametrize("bits", ["w16a16", "w8a16", "w4a16"])
@pytest.mark.parametrize("splits", [(), (1,)])
def test_tokens_are_those_of_the_cpu(bits: str, splits: tuple[int, ...]) -> None:
    precisions = [Precision.parse(bits)] * SPEC.num_layers
    here, there = (
        LocalPipeline.build(
            SPEC, RandomSource(SPEC, seed=4), splits=splits, precisions=precisions, device=device
        ).generate(PROMPTS, max_new=12)
        for device in ("cpu", "cuda")
    )
    assert len({tuple(row) for row in here}) == len(PROMPTS), "the oracle must not be constant"
    assert here == there
