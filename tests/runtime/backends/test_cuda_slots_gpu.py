"""On a GPU: the CPU's tokens, eagerly and from CUDA graphs, with prompts that come and go."""

import pytest
import torch

from llmpq.model_spec import ModelSpec
from llmpq.runtime.engine.slot_scheduler import SlotScheduler
from llmpq.runtime.request import Request
from llmpq.runtime.weights.sources import CheckpointSource
from reference.open_stages import OpenStages
from reference.pipeline import ReferencePipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["opt", "bloom", "llama", "qwen3"])
def test_tokens_equal_the_cpus(kind, graphs, tiny_models, random_prompts, make_plan):
    from llmpq.runtime.launch.stages.stage_settings import limits_of

    model, prompts = tiny_models.directory(kind), random_prompts(9, 30, 3, 17, 24, 5)
    plan = make_plan(model, batch=4, decode_microbatch=4)
    spec = ModelSpec.from_directory(model)
    want = ReferencePipeline.from_directory(model).generate(prompts, max_new=12)
    engine = OpenStages(plan, spec, CheckpointSource(model, spec), device="cuda:0", graphs=graphs)
    requests = [Request(id=i, prompt=tuple(p), max_new=12) for i, p in enumerate(prompts)]
    tokens = engine.run(SlotScheduler(limits_of(plan)), requests).tokens
    assert [tokens[i] for i in range(len(prompts))] == want
    assert bool(engine.computes[0].captured_rows) == graphs


def test_stages_of_one_process_capture_their_graphs_in_turn(
    demo_model, random_prompts, make_plan, caplog
):
    from llmpq.runtime.launch.stages.stage_settings import limits_of

    plan = make_plan(demo_model, (2, 4, 6), batch=4, decode_microbatch=1)
    spec, prompts = ModelSpec.from_directory(demo_model), random_prompts(9, 30, 3, 17)
    source = CheckpointSource(demo_model, spec)
    for _ in range(4):  # each stage captures at any moment
        engine = OpenStages(plan, spec, source, device=("cuda:0",) * 4, graphs=True)
        requests = [Request(id=i, prompt=tuple(p), max_new=6) for i, p in enumerate(prompts)]
        engine.run(SlotScheduler(limits_of(plan)), requests)
        assert all(compute.captured_rows for compute in engine.computes)
    assert "without CUDA graphs" not in caplog.text
