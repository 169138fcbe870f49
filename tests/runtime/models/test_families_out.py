"""`llmpq-quantize` for every family: directories read back as layers that are rounded on load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq.capabilities import lacks
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.profiler.quantize.layer_walk import random_windows
from llmpq.profiler.quantize.recipes import Settings
from llmpq.profiler.quantize.whole_model import QuantizeJob, quantize_model
from llmpq.runtime.step import Step
from llmpq.runtime.weights.sources import CheckpointSource
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
MIXED = [Precision.parse(text) for text in ("w8a16", "w4a16", "w16a16", "w3a16")]
TOKENS = [(7 * i * i + 3) % 199 for i in range(24)]


def logits(pipeline: ReferencePipeline) -> torch.Tensor:
    step = Step.of([0], [0], [len(TOKENS)])
    caches = pipeline.caches(1, len(TOKENS))
    return pipeline.logits(pad([TOKENS]), step, caches, all_positions=True)


def write(directory: Path, target: Path, precisions: list[Precision], method: str) -> None:
    spec = ModelSpec.from_directory(directory)
    job = QuantizeJob(
        spec=spec,
        precisions=tuple(precisions),
        settings=Settings(method=method, group_size=None),  # type: ignore[arg-type]
        windows_WT=random_windows([t % 199 for t in range(7, 900, 7)], count=2, length=24),
    )
    with torch.inference_mode():
        quantize_model(job, CheckpointSource(directory, spec), target)


def test_mixed_layers_are_those_that_are_rounded_on_load(
    models: Any, tmp_path: Path, family_kind: str
) -> None:
    directory = models.directory(family_kind)
    if missing := lacks(ModelSpec.from_directory(directory), "quantize"):
        with pytest.raises(ValueError, match="a copy that llmpq-quantize writes") as caught:
            write(directory, tmp_path / "q", MIXED, "rtn")
        assert missing[0] in str(caught.value) and not (tmp_path / "q").exists()
        return
    write(directory, tmp_path / "q", MIXED, "rtn")
    rounded = ReferencePipeline.from_directory(
        directory, precisions=MIXED, scheme=Quantization(group_size=None, symmetric=True).scheme
    )
    got, want = logits(ReferencePipeline.from_directory(tmp_path / "q")), logits(rounded)
    assert float((got - want).norm() / want.norm()) < 2e-3


@pytest.mark.parametrize("kind", ["gpt_oss", "olmo2", "gemma2", "glm4_moe"])
def test_gptq_of_eight_bits_is_near(models: Any, tmp_path: Path, kind: str) -> None:
    directory = models.directory(kind)
    write(directory, tmp_path / "q", [Precision.W8A16] * 4, "gptq")
    got, want = (logits(ReferencePipeline.from_directory(d)) for d in (tmp_path / "q", directory))
    assert float((got - want).norm() / want.norm()) < 0.06
