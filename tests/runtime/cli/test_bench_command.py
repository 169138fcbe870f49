"""`llmpq-dist bench`: the job's arithmetic, its rows, and its refusals; in-process and over Ray."""

import errno
import json

import pytest

from llmpq.devices import this_machine
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Speculation
from llmpq.runtime.cli.main import main
from llmpq.runtime.cli.tool_flags import BenchOptions, bench_parser
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.launch.stages.emulate import memory_share
from llmpq.runtime.tools import bench, bench_rows
from llmpq.runtime.tools.bench_rows import summary
from llmpq.workload import Workload

pytestmark = pytest.mark.cluster
DUMMY = ["--model", "opt-13b", "--load-format", "dummy"]
ROWS = ["--rows", "rows.jsonl"]
JOB = ["--batch", "4", "--prompt", "8", "--gen", "5", "--dtype", "float32", "--repeat", "2"]


def test_in_process_with_dummy_weights(demo_model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    where = ["--model", str(demo_model), "--load-format", "dummy", "--backend", "threads", "--json"]
    wanted = ["--rows", str(rows), "--commit", "abc", "--baseline", "other=2.5"]
    page, written = tmp_path / "run.html", tmp_path / "report.json"
    wanted += ["--report", str(page), "--report", str(written)]
    assert main(["bench", *where, *JOB, *wanted]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total_output_tokens"] == 20 and report["total_input_tokens"] == 32
    assert len(report["output_throughputs"]) == 2
    assert [stage["steps"]["decode"]["rows"] for stage in report["stages"]] == [4 * 4]
    whole = json.loads(written.read_text())
    assert [len(steps) for steps in whole["timeline"]] == [
        sum(totals["count"] for totals in stage["steps"].values()) for stage in whole["stages"]
    ]
    text = page.read_text()
    assert f"{report['output_throughput']:.1f}" in text and "Predicted and measured" in text
    found = {row["bench"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert set(found) == {"e2e", "e2e_prefill", "e2e_step"}
    assert found["e2e"]["n"] == 2 and found["e2e"]["baselines"] == {"other": 2.5}
    # 4 rows, 5 tokens each: the two phases make up the whole.
    whole_s = (found["e2e_prefill"]["value"] + 4 * found["e2e_step"]["value"]) / 1e3
    slowest, fastest = (20 / rate for rate in found["e2e"]["spread"])  # of the two jobs
    assert 0.7 * fastest < whole_s < 1.3 * slowest


@pytest.mark.parametrize(
    ("quick", "words", "dtype"),
    [
        ((), (), "float32"),
        (("float16",), (), "float16"),
        (("bfloat16",), (), "float32"),
        ((), ("--dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_a_job_computes_in_the_dtype_that_run_would_take(monkeypatch, quick, words, dtype):
    """As stored (opt: float16) where the CPU is quick in that, else float32."""
    monkeypatch.setattr("llmpq.devices.default_dtype.quick_dtypes", lambda: frozenset(quick))
    monkeypatch.setattr(this_machine, "read_gpus", list)
    monkeypatch.setattr(bench, "on_gpu", lambda plan: plan)
    options = bench_parser().read_as(BenchOptions, [*DUMMY, *words])
    assert bench.single_plan(ModelSpec.by_name("opt-13b"), options).workload.dtype == dtype


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model", "llama-3.1-8b"], "add --load-format dummy"),
        ([], "nothing to run"),
        (["--model", "llama-9", "--load-format", "dummy"], "unknown model"),
        (["--model", "opt-13b", "--load-format", "dummy", "--repeat", "0"], "--repeat"),
        (
            ["--model", "opt-13b", "--load-format", "dummy", "--batch", "0"],
            "'batch': expected more than 0",
        ),
        (
            ["--plan", "plan.json", "--batch", "32", "--kv", "kv4"],
            "--kv, --batch have no effect with --plan",
        ),
        (["--plan", "plan.json", "--symmetric"], "--symmetric has no effect with --plan"),
        (["--model", "opt-13b", "--commit", "abc"], "--commit has no effect without a row"),
        ([*DUMMY, "--symmetric"], "--symmetric has no effect on weights that are not rounded"),
        ([*DUMMY, "--prompt", "2000", "--gen", "50"], "beyond the 2048 positions of opt-13b"),
        ([*DUMMY, *ROWS, "--baseline", "vllm"], "--baseline 'vllm': expected NAME=VALUE"),
        ([*DUMMY, *ROWS, "--baseline", "vllm=fast"], "--baseline 'vllm=fast': expected NAME="),
        ([*DUMMY, *ROWS, *2 * ["--baseline", "a=1"]], "--baseline names 'a' twice"),
        ([*DUMMY, "--speculate", "kv4"], "--speculate has no effect on random weights"),
        ([*DUMMY, "--gamma", "2", "--compare-plain"], "--gamma, --compare-plain have no effect"),
        (["--plan", "rows.jsonl", "--rows", "rows.jsonl"], "are the same file, 'rows.jsonl'"),
    ],
)
def test_refusals(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--backend", "threads", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_median_job_is_reported():
    def report(speed: float) -> dict:
        measured = {"prefill_s": 1 / speed, "decode_s": 8 / speed}
        workload = {"gen_len": 5}
        return {
            "output_throughput": speed,
            "measured": measured,
            "workload": workload,
            "speculation": None,
        }

    found = summary([report(4.0), report(1.0), report(2.0)], num_jobs=3)
    assert found["output_throughput"] == 2.0
    assert found["decode_step_ms"] == [500.0, 2000.0, 1000.0]


def test_a_memory_cap_is_a_share_of_the_gpu():
    assert memory_share(24 << 30, 96 << 30, "a") == 0.25
    assert memory_share(97 << 30, 96 << 30, "a") == 1.0
    with pytest.raises(ValueError, match="leaves nothing"):
        memory_share(0, 1, "a")


def test_weights_without_zeros_are_fewer_bytes(demo_model, capsys):
    where = ["--model", str(demo_model), "--load-format", "dummy", "--backend", "threads", "--json"]
    job = ["--batch", "1", "--prompt", "4", "--gen", "2", "--repeat", "1", "--warm-up", "0"]
    sizes = []
    for flags in (["--symmetric"], []):
        assert main(["bench", *where, *job, "--bits", "w4a16", *flags]) == 0
        report = json.loads(capsys.readouterr().out)
        sizes.append(report["stages"][0]["memory"]["weights_bytes"])
    assert sizes[0] < sizes[1]


@pytest.fixture
def drafting_plan(demo_model, tmp_path):
    """Return a maker of a plan of some stages that asks for drafts."""

    def make(*splits):
        plan = manual_plan(
            ModelSpec.from_directory(demo_model),
            Workload(batch=4, prompt_len=8, gen_len=9, dtype="float32"),
            splits=splits,
            prefill_microbatch=2,
            decode_microbatch=2,
            model_dir=str(demo_model),
        )
        drafts = Speculation(mode="kv4", gamma=3, acceptance=0.5)
        path = tmp_path / "plan.json"
        path.write_text(plan.model_copy(update={"speculation": drafts}).dump_json())
        return path

    return make


ONCE = ["--repeat", "1", "--warm-up", "1", "--json"]


def test_a_plans_drafts_are_made(drafting_plan, tmp_path, capsys, caplog):
    plan, rows = drafting_plan().with_suffix(""), tmp_path / "rows.jsonl"  # as run: no .json
    flags = ["--backend", "threads", "--compare-plain", "--rows", str(rows), "--commit", "abc"]
    assert main(["bench", "--plan", str(plan), *ONCE, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "drafts of kv4: prompts are random tokens" in caplog.text
    seen = report["speculation"]
    assert (seen["mode"], seen["gamma"], seen["counted_jobs"]) == ("kv4", 3, 2)
    # A row's 8 tokens behind the first take 2 verifies where all drafts are accepted.
    assert seen["verifies"] >= 2 * 4 * 2 and seen["draft_bytes"] > 0
    assert report["total_output_tokens"] == 4 * 9
    assert seen["plain"]["rows_with_the_same_tokens"] == 4
    found = {row["bench"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert {row["case"]["speculation"] for row in found.values()} == {"kv4, gamma 3"}
    assert found["e2e"]["baselines"] == {"plain": seen["plain"]["output_throughput"]}
    accepted = found["e2e_acceptance"]
    assert accepted["value"] == seen["acceptance"] and accepted["predicted"] == 0.5


def test_flags_override_the_plans_drafts(drafting_plan, capsys):
    where = ["bench", "--backend", "threads", "--plan", str(drafting_plan()), *ONCE]
    assert main([*where, "--speculate", "off"]) == 0
    assert json.loads(capsys.readouterr().out)["speculation"] is None
    assert main([*where, "--speculate", "ngram", "--gamma", "2"]) == 0
    seen = json.loads(capsys.readouterr().out)["speculation"]
    assert (seen["mode"], seen["gamma"]) == ("ngram", 2)


def test_random_weights_leave_a_plans_drafts_out_and_say_so(drafting_plan, capsys, caplog):
    flags = ["--backend", "threads", "--load-format", "dummy"]
    assert main(["bench", "--plan", str(drafting_plan()), *ONCE, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["speculation"] is None
    assert "the plan's drafts (kv4, gamma 3) are left out" in caplog.text


def test_a_plans_drafts_over_ray(drafting_plan, ray_session, capsys):
    plan = str(drafting_plan(4))
    assert main(["bench", "--plan", plan, "--repeat", "2", *ONCE[2:], "--compare-plain"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["completed"] == 4 and len(report["output_throughputs"]) == 2
    assert [stage["device"] for stage in report["stages"]] == ["CPU-0", "CPU-1"]
    seen = report["speculation"]
    assert (seen["mode"], seen["gamma"], seen["counted_jobs"]) == ("kv4", 3, 3)
    assert seen["plain"]["rows_with_the_same_tokens"] == 4 and seen["draft_bytes"] > 0
    assert report["total_output_tokens"] == 4 * 9
    steps = report["stages"][0]["steps"]
    last = steps.get("decode", {"count": 0})["count"]  # rows with one token to go
    assert last < 8 and steps["verify"]["count"] > 0, "the plain job's steps are not counted"


def test_killed_stages_cost_time_and_nothing_else(demo_model, make_plan, tmp_path, capsys):
    make_plan(demo_model, (3,), batch=4, prompt_len=8, gen_len=100).save_json(tmp_path / "p.json")
    job = ["bench", "--plan", str(tmp_path / "p.json"), "--repeat", "1", "--json"]
    assert main([*job, "--backend", "processes", "--chaos", "6"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total_output_tokens"] == 400 and report["completed"] == 4
    assert all(one["measured_s"] > 0 for one in report["recoveries"])
    assert main([*job, "--backend", "threads", "--chaos", "5"]) == 2
    assert "add --backend processes" in capsys.readouterr().err


def test_a_refused_place_takes_nothing_of_another(demo_model, tmp_path, capfd, monkeypatch):
    where = ["--model", str(demo_model), "--load-format", "dummy", "--backend", "threads", "--json"]
    job = [*where, "--batch", "1", "--prompt", "4", "--gen", "2", *ONCE, "--commit", "abc"]
    assert main(["bench", *job, "--rows", "/dev/full"]) == 2
    printed = capfd.readouterr()
    assert json.loads(printed.out)["completed"] == 1
    assert "cannot write '/dev/full': no space left on device" in printed.err
    rows = tmp_path / "rows.jsonl"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["bench", *job, "--rows", str(rows)]) == 2
    assert len(rows.read_text().splitlines()) == 3
    assert "cannot write 'standard output': no space left" in capfd.readouterr().err


def test_rows_are_added_all_or_none(tmp_path, monkeypatch):
    written, path = bench_rows.write_row, tmp_path / "rows.jsonl"

    def torn(path, *, bench, **fields):
        written(path, bench=bench, **fields)
        if bench == "e2e_step":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bench_rows, "write_row", torn)
    plan = manual_plan(ModelSpec.by_name("opt-13b"), Workload(batch=1, prompt_len=4, gen_len=2))
    report = {
        "output_throughputs": [1.0], "prefill_ms": [1.0], "decode_step_ms": [1.0],
        "speculation": None,
    }  # fmt: skip
    for before in (None, '{"bench": "other"}\n'):
        if before is not None:
            path.write_text(before)
        with pytest.raises(OSError, match="No space"):
            bench_rows.add_rows(path, {}, report, plan, {}, "abc")
        assert (path.read_text() if path.exists() else None) == before
