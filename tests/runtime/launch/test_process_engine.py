"""Stages as plain processes: the tokens of one process; a stage that fails is named."""

import subprocess
import sys

import pytest

from llmpq.errors import StageLostError
from llmpq.runtime.engine.plain_loop import LocalPipeline
from llmpq.runtime.launch.processes import ProcessEngine
from llmpq.runtime.launch.stage_settings import StageSettings
from llmpq.runtime.request import Request

pytestmark = pytest.mark.cluster


def test_tokens_and_records_over_several_jobs(tiny_models, random_prompts, make_plan):
    model, prompts = tiny_models.directory("llama"), random_prompts(5, 9, 3)
    want = LocalPipeline.from_directory(model).generate(prompts, max_new=6)
    plan = make_plan(model, splits=(1,))
    with ProcessEngine(plan, StageSettings(model_dir=str(model))) as engine:
        engine.start()
        for _ in range(2):
            requests = [Request(id=i, prompt=tuple(p), max_new=6) for i, p in enumerate(prompts)]
            rows = {done.id: done.tokens for done in engine.serve(requests)}
            assert [rows[i] for i in range(3)] == want
            assert [record.totals["decode"].steps > 0 for record in engine.records()] == [True] * 2
        engine.end()


def test_a_stage_that_cannot_load_is_named(tiny_models, make_plan, tmp_path):
    plan = make_plan(tiny_models.directory("llama"), splits=(1,))
    with (
        ProcessEngine(plan, StageSettings(model_dir=str(tmp_path))) as engine,
        pytest.raises(StageLostError, match="stage CPU-0: .*config.json"),
    ):
        engine.start()


def test_processes_and_threads_need_no_ray():
    code = "import sys; sys.modules['ray'] = None; import llmpq.runtime.{0}, llmpq.runtime.{1}"
    code = code.format("launch.stage_process", "launch.threads")
    subprocess.run([sys.executable, "-c", code], check=True)
