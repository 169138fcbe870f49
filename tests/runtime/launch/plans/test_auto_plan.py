"""Runs without a plan: the job is read off the rows, devices are found, costs are kept."""

from __future__ import annotations

import json
import subprocess

import pytest

import llmpq
from llmpq.costs.costs_cache import cached_costs
from llmpq.devices.cluster import Cluster
from llmpq.kernels.native import library
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.problem.make_problem import make_problem
from llmpq.precision import KVPrecision
from llmpq.runtime.cli.main import main
from llmpq.runtime.cli.run import lengths_of
from llmpq.runtime.launch.plans import auto_plan
from llmpq.runtime.launch.plans.auto_plan import (
    Lengths,
    halved,
    plan_for,
    plan_job,
    quantile,
    workload_of,
)
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.text.batch_rows import Defaults, json_row, text_row
from llmpq.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of its own, but for compiled C++: that takes a minute."""
    compiled, folder = library.cache_folder(), tmp_path / "cache" / "llmpq"
    folder.mkdir(parents=True)
    compiled.mkdir(parents=True, exist_ok=True)
    (folder / "native").symlink_to(compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def job(lengths: Lengths, window: int = 256):
    return workload_of(lengths, dtype="float32", window=window, kv=KVPrecision.KV8)


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1), (0.05, 1), (0.5, 10), (0.95, 19), (0.951, 20), (1.0, 20)]
)
def test_quantiles_are_values_that_a_share_stays_within(share, value):
    assert quantile(list(range(20, 0, -1)), share) == value


def test_every_row_fits_the_job_that_is_read_off_them():
    rows = [(3, 200), (50, 10), (40, 30), (7, 7)]
    prompts, new = zip(*rows, strict=True)
    work = job(Lengths(prompts=prompts, new_tokens=new))
    assert (work.batch, work.prompt_len, work.kv) == (4, 50, KVPrecision.KV8)
    assert all(p <= work.prompt_len and p + n - 1 <= work.max_len for p, n in rows)


def test_rare_long_answers_set_the_room_and_not_the_time():
    new = [10] * 99 + [150]
    work = job(Lengths(prompts=[100] * 99 + [1], new_tokens=new))
    assert work.gen_len == 51, "1 + 150 tokens fit 100 + 51"
    assert job(Lengths(prompts=[5], new_tokens=[9])).gen_len == 9


def test_more_rows_than_a_window_are_streamed_through_it():
    work = job(Lengths(prompts=[5] * 1000, new_tokens=[9] * 1000), window=64)
    assert work.batch == 64
    assert halved(64) == [64, 32, 16, 8, 4, 2, 1] and halved(5) == [5, 2, 1]


def test_rows_that_cannot_be_served_do_not_count(demo_model):
    tokenizer, spec = Tokenizer(demo_model), ModelSpec.from_directory(demo_model)
    rows = [
        text_row(0, "import os", Defaults(max_tokens=5)),
        json_row(1, "{", Defaults()),
        json_row(2, json.dumps({"prompt": [7] * spec.max_positions}), Defaults()),
        json_row(3, '{"prompt": [5, 6, 7], "max_tokens": 3}', Defaults()),
        json_row(4, json.dumps({"prompt": [7] * 9, "max_tokens": 5000}), Defaults()),
    ]
    found = lengths_of(rows, tokenizer, spec)
    assert list(found.prompts) == [len(tokenizer.encode("import os")), 3, 9]
    assert list(found.new_tokens) == [5, 3, spec.max_positions - 9], "as many as there is room for"
    assert lengths_of(rows[1:2], tokenizer, spec) == Lengths(prompts=[1], new_tokens=[1])


@pytest.mark.slow
def test_gpus_share_stages_by_the_rule_of_make_plan():
    planned = llmpq.make_plan(
        "gemma-3-27b", devices="5090,3080:2", batch=1, gen_len=64, prefer="balanced"
    )
    words = "--model gemma-3-27b --devices 5090,3080:2 --batch 1 --gen-len 64"
    problem, _, _ = make_problem(plan_request(words.split()))

    def shares(**options):
        engine = EngineOptions(prefer="balanced", **options)
        work, spec = problem.workload, problem.spec
        made = plan_job("gemma-3-27b", problem.cluster, work, engine, spec=spec)
        return [stage.shares for stage in made.plan.stages]

    assert shares() == [stage.shares for stage in planned.stages] == [(7, 2, 2)]
    assert not any(shares(tensor_parallel_size=1))


def test_measured_costs_are_kept_and_used_again(tiny_models, monkeypatch):
    model, started = tiny_models.directory("qwen3"), subprocess.run
    few = ["--bits", "16,4", "--max-batch", "4", "--max-len", "48"]
    # The command as it is made, for fewer shapes.
    monkeypatch.setattr(
        auto_plan.subprocess, "run", lambda words, **how: started([*words, *few], **how)
    )
    devices = Cluster.parse_data(
        {"name": "c", "nodes": [{"name": "n", "devices": [{"kind": "CPU", "threads": 1}]}]},
        where="test",
    )
    lengths = Lengths(prompts=[8], new_tokens=[4])
    before = plan_for(model, lengths, EngineOptions(cluster=devices))
    assert before.plan.predicted.estimated and "estimated" in before.text()
    made = plan_for(model, lengths, EngineOptions(cluster=devices, profile=True))
    assert not made.plan.predicted.estimated and "estimated" not in made.text()
    assert any("measured here before" in note for note in made.notes)
    spec = ModelSpec.from_directory(model)
    kept, _ = cached_costs(spec.fingerprint(), ["CPU@1t"])
    assert kept is not None
    monkeypatch.setattr(auto_plan, "measure", lambda *_: pytest.fail("measured again"))
    again = plan_for(model, lengths, EngineOptions(cluster=devices))
    assert not again.plan.predicted.estimated


def test_a_run_needs_nothing_but_a_model_and_prompts(demo_model, tmp_path, capsys):
    rows = [{"custom_id": str(i), "prompt": "import os\n" * (i + 1)} for i in range(3)]
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["run", "--model", str(demo_model), "-i", str(given), "-o", str(answers)]
    assert main([*words, "--max-tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert "this-machine" in out and "estimated" in out and "3 rows, prompts of" in out
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["0", "1", "2"]
    assert all(line["error"] is None for line in lines)
    usage = [line["response"]["body"]["usage"]["completion_tokens"] for line in lines]
    assert usage == [6, 6, 6]
    assert main([*words, "--json", "--max-tokens", "2"]) == 2, "answers are not replaced unasked"
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--json", "--max-tokens", "2", "--overwrite"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"], "with --json: the report, nothing else"


@pytest.mark.parametrize(
    ("flags", "named", "remedy"),
    [
        ([], "--model", "--plan"),
        (["--plan", "p.json", "--profile"], "--profile", "leave --profile out"),
        (["--plan", "p.json", "--prefer", "speed"], "--prefer", "leave --prefer out"),
    ],
)
def test_flags_about_planning_without_effect_are_refused(flags, named, remedy, capsys):
    assert main(["run", *flags, "-i", "in.jsonl", "-o", "out.jsonl"]) == 2
    said = capsys.readouterr().err
    assert named in said and remedy in said
