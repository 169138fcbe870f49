"""A model whose weights tests store in other forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose columns are whole blocks of 64, of no larger block and of no k-group."""
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=199,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("dense")
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def planned_and_loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """The bytes of a checkpoint's layers on a CPU as a plan counts them, and as they are held.

    Every layer is at the precision that the planner allows with the fewest bits.
    """
    from llmpq.planner.cli.arguments import plan_request
    from llmpq.planner.problem import make_problem
    from llmpq.runtime.models.stage_model import DTYPES, StageModel
    from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
    from llmpq.sizes.memory import stage_memory
    from llmpq.sizes.stage_shape import StageShape

    monkeypatch.setattr(make_problem, "rates_for", lambda *_, **__: [])  # bytes, not times

    def both(path: Path, *words: str) -> tuple[int, int]:
        job = f"--model {path} --devices cpu --batch 2 --prompt-len 16 --gen-len 8".split()
        problem, _, _ = make_problem.make_problem(plan_request([*job, *words]))
        spec, grid = problem.spec, problem.quantization
        precisions = [min(own, key=lambda p: p.weight_bits) for own in problem.offered]
        precisions = precisions or [problem.choices[0]] * spec.num_layers
        stage = StageShape(precisions=precisions)
        counted = stage_memory(spec, problem.workload, stage, quantization=grid)
        source = open_checkpoint(path, spec)
        if hasattr(source, "keep_codes"):
            source.keep_codes({i: grid.scheme(p) for i, p in enumerate(precisions)})
        model = StageModel.build(
            spec,
            range(spec.num_layers),
            precisions,
            first=False,
            last=False,
            dtype=DTYPES[problem.workload.dtype],
            device=torch.device("cpu"),
            scheme=grid.scheme,
            source=source,
        )
        return counted.weights_bytes, model.weight_nbytes

    return both
