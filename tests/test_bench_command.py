"""`llmpq-dist bench`: the job's arithmetic, its rows, and its refusals; in-process and over Ray."""

import json

import pytest

from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.__main__ import main
from llmpq.runtime.bench_command import summary
from llmpq.runtime.emulate import memory_share
from llmpq.runtime.hand_plan import hand_plan
from llmpq.workload import Workload

pytestmark = pytest.mark.cluster
JOB = ["--batch", "4", "--prompt", "8", "--gen", "5", "--dtype", "float32", "--repeat", "2"]


def test_in_process_with_dummy_weights(demo_model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    where = ["--model", str(demo_model), "--load-format", "dummy", "--in-process", "--json"]
    wanted = ["--rows", str(rows), "--commit", "abc", "--baseline", "other=2.5"]
    assert main(["bench", *where, *JOB, *wanted]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total_output_tokens"] == 20 and report["total_input_tokens"] == 32
    assert len(report["output_throughputs"]) == 2
    found = {row["bench"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert set(found) == {"e2e", "e2e_prefill", "e2e_step"}
    assert found["e2e"]["n"] == 2 and found["e2e"]["baselines"] == {"other": 2.5}
    # 4 rows, 5 tokens each: the two phases make up the whole.
    whole_s = (found["e2e_prefill"]["value"] + 4 * found["e2e_step"]["value"]) / 1e3
    assert 20 / found["e2e"]["value"] == pytest.approx(whole_s, rel=0.3)


def test_two_stages_over_ray(demo_model, tmp_path, ray_session, capsys):
    spec = ModelSpec.from_directory(demo_model)
    workload = Workload(batch=4, prompt_len=8, gen_len=5, dtype="float32")
    plan = hand_plan(
        spec,
        workload,
        splits=(4,),
        precision=Precision.W16A16,
        prefill_microbatch=2,
        decode_microbatch=2,
        model_dir=str(demo_model),
    )
    path = tmp_path / "plan.json"
    path.write_text(plan.dump_json())
    assert main(["bench", "--plan", str(path), "--repeat", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["completed"] == 4 and len(report["output_throughputs"]) == 2
    assert [stage["device"] for stage in report["stages"]] == ["CPU-0", "CPU-1"]
    assert all(stage["steps"]["decode"]["count"] > 0 for stage in report["stages"])
    assert sum(stage["steps"]["decode"]["rows"] for stage in report["stages"]) == 2 * 4 * 4


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model", "llama-3.1-8b"], "add --load-format dummy"),
        ([], "nothing to run"),
        (["--model", "llama-9", "--load-format", "dummy"], "unknown model"),
        (["--model", "opt-13b", "--load-format", "dummy", "--repeat", "0"], "--repeat"),
        (["--model", "opt-13b", "--load-format", "dummy", "--batch", "0"], "'batch': Input should"),
        (
            ["--plan", "plan.json", "--batch", "32", "--kv", "kv4"],
            "--kv, --batch have no effect with --strat_file_name",
        ),
        (["--plan", "plan.json", "--symmetric"], "--symmetric has no effect with --strat"),
        (["--model", "opt-13b", "--commit", "abc"], "--commit has no effect without a row"),
        (["--model", "opt-13b", "--links", "nccl"], "--links has no effect with --in-process"),
    ],
)
def test_refusals(flags, words, capsys):
    assert main(["bench", "--in-process", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_median_job_is_reported():
    def report(speed: float) -> dict:
        measured = {"prefill_s": 1 / speed, "decode_s": 8 / speed}
        workload = {"gen_len": 5}
        return {"output_throughput": speed, "measured": measured, "workload": workload}

    found = summary([report(4.0), report(1.0), report(2.0)])
    assert found["output_throughput"] == 2.0
    assert found["decode_step_ms"] == [500.0, 2000.0, 1000.0]


def test_a_memory_cap_is_a_share_of_the_gpu():
    assert memory_share(24 << 30, 96 << 30, "a") == 0.25
    assert memory_share(97 << 30, 96 << 30, "a") == 1.0
    with pytest.raises(ValueError, match="leaves nothing"):
        memory_share(0, 1, "a")


def test_weights_without_zeros_are_fewer_bytes(demo_model, capsys):
    where = ["--model", str(demo_model), "--load-format", "dummy", "--in-process", "--json"]
    job = ["--batch", "1", "--prompt", "4", "--gen", "2", "--repeat", "1", "--warm-up", "0"]
    sizes = []
    for flags in (["--symmetric"], []):
        assert main(["bench", *where, *job, "--bits", "w4a16", *flags]) == 0
        report = json.loads(capsys.readouterr().out)
        sizes.append(report["stages"][0]["memory"]["weights_bytes"])
    assert sizes[0] < sizes[1]
