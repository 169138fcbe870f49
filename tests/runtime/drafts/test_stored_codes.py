"""Codes of a checkpoint that no draft reads at less cost: such modes are not offered, and said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq.checkpoints.stored_codes import stored_codes
from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.weights.codebook_weight import codebook_weight
from llmpq.plans.speculation import usable_modes
from llmpq.precision import Precision
from llmpq.runtime.drafts.draft_model import build_draft
from llmpq.runtime.launch.plans.complete_plan import decide_drafts
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.options.engine_options import EngineOptions
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
FLOATS = {"type": "float", "strategy": "group"}
W4, W8 = frozenset({Precision.W4A16}), frozenset({Precision.W8A16})
DESCRIBED: list[tuple[dict[str, Any] | None, frozenset[Precision]]] = [
    (None, frozenset()),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, W8),
    ({"quant_method": "fp8", "weight_block_size": [128, 48]}, frozenset()),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, W4),
    ({"quant_method": "gptq", "bits": 4}, frozenset()),
    ({"quant_method": "mxfp4"}, frozenset()),  # gpt-oss: its experts alone
    *(
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": bits, **more}}},
            },
            kept,
        )
        for bits, more, kept in (
            (8, FLOATS, W8),
            (4, FLOATS, W4),
            (4, {"type": "int"}, frozenset()),
        )
    ),
]


def described(folder: Path, quantization: dict[str, Any] | None) -> Path:
    more = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **more}))
    return folder


@pytest.mark.parametrize(("quantization", "kept"), DESCRIBED)
def test_what_a_directory_keeps(tmp_path, quantization, kept):
    assert stored_codes(described(tmp_path, quantization)) == kept
    assert stored_codes(None) == stored_codes(tmp_path / "nowhere") == frozenset()


@pytest.mark.parametrize(
    ("bits", "mode", "quantization"),
    [
        ("w4a16", "qspec", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ],
)
def test_modes_that_cannot_gain_are_refused(
    tmp_path, demo_model, make_plan, bits, mode, quantization
):
    plan = make_plan(demo_model, bits=bits)
    model = str(described(tmp_path, quantization))
    options = EngineOptions(speculate=mode, gamma=2)
    assert mode in usable_modes(plan)
    assert mode not in usable_modes(plan, stored_codes(model))
    with pytest.raises(ValueError, match="would draft at the target's cost: the model's layers"):
        decide_drafts(plan, options, stored_codes(model))
    assert decide_drafts(plan, options, stored_codes(demo_model)).speculate == mode


def test_a_stage_says_which_linears_it_drafts_at_the_targets_cost(demo_model, caplog):
    pipeline = ReferencePipeline.from_directory(demo_model)
    model = pipeline.stages[0]
    first = next(part for part in model.layers.modules() if isinstance(part, Linear))
    n, k = first.weight.out_features, first.weight.in_features
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    first.weight = codebook_weight(
        codes, torch.ones(n, k // 32), codebook=Codebook.NF4, group_size=32
    )
    with caplog.at_level(logging.WARNING):
        build_draft("qspec", model, None)
    assert "drafts of qspec: 1 of" in caplog.text and "4-bit codes" in caplog.text
    caplog.clear()
    build_draft("kv4", model, None)
    assert not caplog.text
