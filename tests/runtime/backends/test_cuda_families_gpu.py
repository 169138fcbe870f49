"""Every family on a GPU in float32, decode steps captured: the tokens of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmpq.model_spec import ModelSpec
from llmpq.runtime.backends.build_stage import build_slot_stage
from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner
from llmpq.runtime.weights.sources import CheckpointSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NEW = 12


def test_tokens_equal_transformers(
    models: Any, make_plan: Any, random_prompts: Any, stage_tokens: Any, family_kind: str
) -> None:
    """Prompts beyond windows; heads of an odd size are for the interpreter."""
    prompts, directory = random_prompts(7, 19, 2, 9), models.directory(family_kind)
    options = {"prompt_len": 19, "gen_len": NEW}
    plan = make_plan(directory, batch=3, decode_microbatch=3, prefill_microbatch=2, **options)
    spec, device = ModelSpec.from_directory(directory), torch.device("cuda")
    compute, _ = build_slot_stage(plan, 0, spec, CheckpointSource(directory, spec), device)
    assert isinstance(compute, CudaSlotStageRunner) and not compute.model.asks_host
    found = stage_tokens(compute, plan, prompts, NEW)
    assert found == models.greedy(family_kind, prompts)
    assert compute.captured_rows, "decode steps ran without a graph"
