"""Stages as processes on GPUs, in fp32: the CPU's tokens, whatever the links and the stages."""

import pytest
import torch

from llmpq.devices.device_spec import canonical_kind
from llmpq.plans.plan import MemberPlan
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.options.engine_options import Deadlines, EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import Request
from reference.pipeline import ReferencePipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NEW = 24


def on_gpus(plan, gpus):
    """Return a plan of CPU stages as one of stages on these of this host's GPUs."""
    kind = canonical_kind(torch.cuda.get_device_name(0))
    stages = tuple(
        stage.model_copy(
            update={
                "device": f"GPU-{i}",
                "device_index": gpu,
                "kind": kind,
                "profile_kind": kind,
                "threads": None,
            }
        )
        for i, (stage, gpu) in enumerate(zip(plan.stages, gpus, strict=True))
    )
    return plan.model_copy(update={"stages": stages})


@pytest.fixture(scope="module")
def wanted(demo_model, random_prompts):
    """Return prompts and the tokens a CPU answers them with."""
    prompts = random_prompts(5, 9, 30, 17, 2, 12)
    torch.set_num_threads(2)
    return prompts, ReferencePipeline.from_directory(demo_model).generate(prompts, max_new=NEW)


@pytest.mark.parametrize(
    ("splits", "links"),
    [((), "auto"), ((4,), "peer"), ((4,), "nccl"), ((4,), "gloo"), ((2, 4, 6), "peer")],
)
def test_tokens_equal_the_cpus(splits, links, wanted, demo_model, make_plan, capfd):
    count = torch.cuda.device_count()
    if links == "nccl" and count < 2:
        pytest.skip("NCCL needs a GPU per stage")
    prompts, tokens = wanted
    gpus = [min(index * count // (len(splits) + 1), count - 1) for index in range(len(splits) + 1)]
    settings = StageSettings(
        model_dir=str(demo_model),
        options=EngineOptions(
            links=links, backend="processes", deadlines=Deadlines(load_s=90.0, step_s=90.0)
        ),
    )
    plan = on_gpus(make_plan(demo_model, splits, gen_len=NEW), gpus)
    got = generated(plan, settings, prompts)
    assert "link failed" not in capfd.readouterr().err
    assert got == tokens


def generated(plan, settings, prompts):
    """Return greedy tokens of prompts."""
    with PipelineClient.start(plan, settings) as engine:
        requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
        rows = {done.id: done.tokens for done in engine.serve(requests)}
        engine.end()
    return [rows[index] for index in range(len(prompts))]


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("shares", [(1, 1), (2, 1)])
def test_devices_that_share_a_stage_give_the_cpus_tokens(
    shares, backend, wanted, demo_model, make_plan
):
    """On one GPU, or one each; as processes their steps are captured with their sums."""
    prompts, tokens = wanted
    settings = StageSettings(
        model_dir=str(demo_model),
        options=EngineOptions(backend=backend, deadlines=Deadlines(load_s=90.0, step_s=90.0)),
    )
    plan = on_gpus(make_plan(demo_model, gen_len=NEW), [0])
    members = tuple(
        MemberPlan(device=f"GPU-{i}", device_index=i % torch.cuda.device_count())
        for i in range(len(shares))
    )
    change = {"devices": members, "shares": shares}
    stages = (plan.stages[0].model_copy(update=change),)
    assert generated(plan.model_copy(update={"stages": stages}), settings, prompts) == tokens
