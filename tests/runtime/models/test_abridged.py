"""A stage of a layer of each kind stands for all of them: what compiles kernels runs no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.kv.reference import ScoreRule
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import QuantizationForm
from llmpq.precision import Precision
from llmpq.runtime.models.layers import Sharing
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.weights.sources import RandomSource

pytestmark = pytest.mark.cpu


def build(bits: str, model: str = "llama-3.1-8b", **changes: int) -> StageModel:
    spec = replace(
        ModelSpec.by_name(model), num_layers=len(bits), hidden=64, heads=4, kv_heads=2,
        head_dim=16, ffn=128, vocab=100, **changes,
    )  # fmt: skip
    return StageModel.build(
        spec, range(len(bits)), [Precision.parse(f"w{one}a16") for one in bits], first=True,
        last=True, dtype=torch.float32, device="cpu", scheme=QuantizationForm().settings().scheme,
        source=RandomSource(spec),
    )  # fmt: skip


def places(stage: StageModel, short: StageModel) -> list[int]:
    return [[*stage.layers].index(layer) for layer in short.layers]


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        ("44444", [0, 1, 4]),
        ("48844", [0, 1, 3, 4]),
        ("84484", [0, 1, 3, 4]),
        ("4", [0]),
        ("48", [0, 1]),
    ],
)
def test_it_has_the_ends_and_one_of_each_precision(bits, expected):
    stage = build(bits)
    short = stage.abridged()
    assert places(stage, short) == expected
    assert short.embedding is stage.embedding and short.head is stage.head
    assert short._places == [stage._places[place] for place in expected]
    assert len(stage.layers) == len(bits)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_routers_of_mixtures_have_rules_of_their_own(model):
    stage = build("4444", model, experts=4, experts_per_token=2)
    assert places(stage, stage.abridged()) == [0, 1, 3]


def test_rules_of_scores_tell_layers_apart_and_readers_of_others_stay_together():
    stage = build("4444")
    stage.layers[2].attention.rule = ScoreRule(window=9)
    assert places(stage, stage.abridged()) == [0, 1, 2, 3]
    stage.layers[3].attention.sharing = Sharing(own=3, source=0)
    assert stage.abridged() is stage
