"""`llmpq-dist` when things go wrong: the message, the exit code, no orphans, nothing lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError, ExitCode, StageLostError
from llmpq.runtime.cli.main import main
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.options.engine_options import Deadlines, EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import Request

pytestmark = pytest.mark.cluster
NAMED_WITHIN_S = 15
RAY = EngineOptions(backend="ray")
JOB_SHAPE = {"batch": 2, "gen_len": 120, "prompt_len": 8}


def command(plan: Path, *more: object) -> list[str]:
    words = ["run", "--strat_file_name", plan, *more]
    return [sys.executable, "-m", "llmpq.runtime", *map(str, words)]


def run(plan: Path, *more: object, **options) -> subprocess.CompletedProcess[str]:
    words = command(plan, *more)
    return subprocess.run(words, capture_output=True, text=True, timeout=180, **options)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


def run_here(plan: Path, *more: object) -> int:
    """Run a command in this process, where torch is imported and Ray is joined."""
    return main(list(map(str, command(plan, *more)[3:])))


@pytest.fixture
def refused(capsys):
    """Run a command in this process that is refused: exit code, last line."""

    def ended(plan: Path, *more: object) -> tuple[int, str]:
        code = run_here(plan, *more)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return code, said.strip().splitlines()[-1]

    return ended


def gone(pids: list[int], within_s: float = 10) -> bool:
    """Whether every process ends in time."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def plan_file(tmp_path, make_plan, demo_model):
    """Return a writer of plan files."""

    def write(splits=(3,), **shape) -> Path:
        path = tmp_path / "plan.json"
        make_plan(demo_model, splits, **shape).save_json(path)
        return path

    return write


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": "import os\n"}, {"prompt": "x " * 999}, {"prompt": "def main():\n"}]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([lines[0], "{not json", lines[1], lines[2]]) + "\n")
    return path


def test_bad_rows_get_an_error_and_the_rest_finishes(ray_session, plan_file, prompts, tmp_path):
    """All in one: the running Ray is joined, drafts are tried, the trace and report written."""
    out, trace, report = (tmp_path / name for name in ("out.jsonl", "trace.json", "report.json"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("--ray_address", "auto", "--master_addr", "127.0.0.1", "--master_port", port)
    drafts = ("--speculate", "ngram", "--gamma", 2, "--compare-plain")
    more = (*drafts, "--trace", trace, "--report", report)
    environment = os.environ | {"RAY_ADDRESS": ray_session}
    done = run(plan_file(), "-i", prompts, "-o", out, *launch, *more, env=environment)
    assert done.returncode == ExitCode.SOME_ROWS_FAILED, done.stderr
    assert last_line(done) == f"2 of 4 rows failed; see their 'error' in {out}"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert [row["error"] is None for row in rows] == [True, False, False, True]
    assert "not JSON" in rows[1]["error"]["message"]
    assert "the prompt is too long: it has 1000 tokens" in rows[2]["error"]["message"]
    assert rows[0]["text"] and rows[3]["completion_tokens"] == 16
    assert "tokens/s" in done.stdout and "speculation ngram, gamma 2" in done.stdout
    measured = json.loads(report.read_text())
    assert (measured["completed"], measured["failed"]) == (2, 2)
    assert [one["row"] for one in measured["errors"]] == [1, 2]
    assert "not JSON" in measured["errors"][0]["message"]
    assert all(measured["timeline"]) and len(measured["timeline"]) == len(measured["stages"])
    assert measured["speculation"]["verifies"] > 0 and measured["speculation"]["time_share"]
    plain = measured["speculation"]["plain"]
    assert plain["speedup"] > 0 and plain["rows_with_the_same_tokens"] == 2
    assert "x plain decoding" in done.stdout
    kinds = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"prefill", "verify"} <= kinds, "phases are counted apart"


@pytest.mark.parametrize("what", ["model", "cluster"])
def test_a_plan_for_something_else_is_refused(
    refused, plan_file, prompts, demo_model, tmp_path, what
):
    wrong: list[object] = ["--model", tmp_path / "model"]
    if what == "model":
        shutil.copytree(demo_model, tmp_path / "model")
        config = json.loads((demo_model / "config.json").read_text())
        (tmp_path / "model/config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    if what == "cluster":
        other = tmp_path / "cluster.yaml"
        other.write_text("schema: 1\nname: other\nnodes: [{name: n, accelerators: 'T4:2'}]\n")
        Cluster.load(other)
        wrong = ["--cluster", other]
    code, said = refused(plan_file(), "-i", prompts, "-o", tmp_path / "out.jsonl", *wrong)
    assert code == ExitCode.MISMATCH
    assert f"the plan was made for {what}" in said and "re-plan" in said
    assert not (tmp_path / "out.jsonl").exists()


def test_a_wish_that_cannot_be_met_leaves_the_output_alone(refused, plan_file, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    wish = ("--speculate", "qspec", "--gamma", 3, "--overwrite")
    code, said = refused(plan_file(), "-i", prompts, "-o", out, *wish)
    assert code == ExitCode.USAGE and "needs 4-bit layers" in said
    assert out.read_text() == "precious\n"


@pytest.mark.parametrize(
    ("text", "code"), [("{}", ExitCode.BAD_PLAN), (None, ExitCode.BAD_PLAN)], ids=["empty", "none"]
)
def test_an_unusable_plan_file(refused, prompts, tmp_path, text, code):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    found, said = refused(path, "-i", prompts, "-o", tmp_path / "out.jsonl")
    assert found == code and "bad.json" in said


def broken_copy(demo_model: Path, folder: Path, damage: str) -> Path:
    shutil.copytree(demo_model, folder)
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        os.truncate(weights, weights.stat().st_size // 2)
    else:
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["model.layers.5.mlp.up_proj.weight"]
        save_file(tensors, weights)
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "model.safetensors"),
        ("truncated", "is truncated"),
        ("tensor", "'model.layers.5.mlp.up_proj.weight' is missing"),
    ],
)
def test_unusable_weights_are_named(demo_model, make_plan, tmp_path, damage, message):
    folder = broken_copy(demo_model, tmp_path / "model", damage)
    settings = StageSettings(model_dir=str(folder), options=EngineOptions(backend="threads"))
    with (
        pytest.raises(ValueError, match=message),
        PipelineClient.start(make_plan(demo_model, (3,)), settings),
    ):
        pass


def test_the_command_names_truncated_weights_in_one_sentence(
    ray_session, demo_model, plan_file, refused, tmp_path
):
    folder = broken_copy(demo_model, tmp_path / "model", "truncated")
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "import os"}\n')
    joined = ("--ray-address", ray_session, "--model", folder)
    code, last = refused(plan_file(()), "-i", source, "-o", out, *joined)
    assert code == ExitCode.USAGE == 2, last
    assert last.startswith("llmpq-dist: ") and "model.safetensors" in last
    assert "is truncated" in last


def test_memory_that_differs_from_the_plan_is_refused(demo_model, make_plan):
    plan = make_plan(demo_model, ())
    sizes = dict.fromkeys(
        ("embedding_bytes", "workspace_bytes", "context_bytes", "total_bytes", "limit_bytes"), 0
    )
    memory = sizes | {"weights_bytes": 10**6, "kv_bytes": 10**8}
    stage = plan.stages[0].model_dump(mode="json") | {"memory": memory}
    wrong = plan.parse_data(plan.model_dump(mode="json", by_alias=True) | {"stages": [stage]},
                            where="test")  # fmt: skip
    with (
        pytest.raises(DoesNotFitError, match=r"weights of layers 0 to 8 take .* plan predicts 976"),
        PipelineClient.start(wrong, StageSettings(model_dir=str(demo_model))),
    ):
        pass


def long_job(make_plan, demo_model) -> tuple[object, list[Request]]:
    """Return a job that is not over when the first token is heard of: 900 steps follow it."""
    plan = make_plan(demo_model, (4,), batch=4, prompt_len=8, gen_len=900)
    requests = [Request(id=i, prompt=tuple(range(3, 11)), max_new=900) for i in range(4)]
    return plan, requests


@pytest.mark.parametrize(
    ("phase", "victim", "backend"),
    [("decode", 1, "ray"), ("prefill", 0, "processes")],
)
def test_a_killed_stage_is_named_with_its_cause(
    ray_session, demo_model, make_plan, phase, victim, backend
):
    plan, requests = long_job(make_plan, demo_model)
    settings = StageSettings(model_dir=str(demo_model), options=EngineOptions(backend=backend))
    killed_s, pids = 0.0, []
    with (
        pytest.raises(StageLostError) as lost,
        PipelineClient.start(plan, settings) as pipeline,
    ):
        pids = pipeline.stage_pids()
        if phase == "prefill":  # which does not end before somebody looks
            os.kill(pids[1 - victim], signal.SIGSTOP)
        pipeline.submit(requests)
        for update in pipeline.updates():
            if not killed_s and update.progress.phase in (
                phase,
                "idle" if phase == "prefill" else "",
            ):
                killed_s = time.monotonic()
                os.kill(pids[victim], signal.SIGKILL)
    assert killed_s and time.monotonic() - killed_s < NAMED_WITHIN_S
    text = str(lost.value)
    assert f"stage {victim} (CPU-{victim} on local, pid {pids[victim]}) was lost" in text
    assert f"during {phase}" in text and "SIGKILL" in text and "--resume" not in text
    assert gone(pids), "no process is left behind"


class Job:
    """Four rows in two slots, the first of them soon over: a command is disturbed in between."""

    ROWS = {"import os\n": 8, "def main(": 120, "class A:": 120, "for i in": 120}

    def __init__(self, folder: Path, plan: Path) -> None:
        self.plan, self.source, self.out = plan, folder / "in.jsonl", folder / "out.jsonl"
        self.log = folder / "log"
        rows = [{"prompt": text, "max_tokens": count} for text, count in self.ROWS.items()]
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def started(self, *how: object, **options) -> subprocess.Popen:
        """Start the command; return once a row is finished."""
        words = command(self.plan, *self.flags, "-o", self.out, *how)
        with self.log.open("w") as stderr:
            process = subprocess.Popen(words, stderr=stderr, stdout=subprocess.DEVNULL, **options)
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s and not (self.out.exists() and self.out.read_text()):
            time.sleep(0.02)
        return process

    @property
    def flags(self) -> tuple[object, ...]:
        return ("-i", self.source, "--ignore-eos")

    def said(self) -> str:
        return self.log.read_text()

    def stage_pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"stage \d: .*, pid (\d+)", self.said())]

    def rows(self) -> list[str]:
        return self.out.read_text().splitlines()

    def here(self, *more: object) -> int:
        """Run the command's job in this process, undisturbed."""
        return run_here(self.plan, *self.flags, "--backend", "threads", *more)


@pytest.fixture(scope="module")
def whole_rows(tmp_path_factory, make_plan, demo_model) -> list[str]:
    """Return what the job gives where nothing disturbs it."""
    folder = tmp_path_factory.mktemp("whole")
    make_plan(demo_model, (4,), **JOB_SHAPE).save_json(folder / "plan.json")
    job = Job(folder, folder / "plan.json")
    assert job.here("-o", job.out) == 0
    return job.rows()


@pytest.fixture
def job(plan_file, tmp_path) -> Job:
    return Job(tmp_path, plan_file((4,), **JOB_SHAPE))


def require_resumed(job: Job, whole_rows: list[str]) -> None:
    """Something was finished, not all; what --resume adds is what an undisturbed run gives."""
    kept = job.rows()
    assert 1 <= len(kept) < len(whole_rows)
    assert job.here("-o", job.out, "--resume") == 0
    assert job.rows() == whole_rows and job.rows()[: len(kept)] == kept


@pytest.mark.seldom
def test_the_command_names_a_killed_stage_and_ends_with_its_code(job, whole_rows):
    process = job.started("--backend", "processes", "--on-loss", "stop")
    pids = job.stage_pids()
    os.kill(pids[1], signal.SIGKILL)
    killed_s = time.monotonic()
    code = process.wait(timeout=60)
    assert code == ExitCode.STAGE_LOST == 6, job.said()
    assert time.monotonic() - killed_s < NAMED_WITHIN_S
    assert "Traceback" not in job.said()
    last = job.said().strip().splitlines()[-1]
    assert f"stage 1 (CPU-1 on local, pid {pids[1]}) was lost" in last
    assert "SIGKILL" in last and "--resume" in last
    assert gone(pids), "no process is left behind"
    require_resumed(job, whole_rows)


@pytest.mark.parametrize("backend", ["ray", pytest.param("processes", marks=pytest.mark.seldom)])
def test_a_stopped_stage_is_named_at_its_deadline_and_resume_finishes(
    request, job, whole_rows, backend
):
    """Exit 7, no orphans."""
    assert Deadlines().step_s == 30, "the default"
    how = ["--backend", backend, "--deadlines", "step=3", "--on-loss", "stop"]
    if backend == "ray":
        how[:2] = ["--ray-address", request.getfixturevalue("ray_session")]
    process = job.started(*how)
    pids = job.stage_pids()
    os.kill(pids[1], signal.SIGSTOP)
    stopped_s = time.monotonic()
    assert process.wait(timeout=30) == ExitCode.DEADLINE == 7, job.said()
    assert time.monotonic() - stopped_s < 3 + NAMED_WITHIN_S
    last = job.said().strip().splitlines()[-1]
    assert re.search(rf"stage 1 \(CPU-1 on local, pid {pids[1]}\) has not answered for 3 s", last)
    assert "Traceback" not in job.said()
    assert len(pids) == 2 and gone(pids), "a stopped process is killed, too"
    require_resumed(job, whole_rows)


def test_a_placement_that_can_never_be_met_says_so(ray_session, demo_model, make_plan):
    data = make_plan(demo_model, (4,)).model_dump(mode="json", by_alias=True)
    data["stages"][1] |= {"device": "T4-0", "kind": "T4", "profile_kind": "T4", "threads": None}
    plan = type(make_plan(demo_model, ())).parse_data(data, where="test")
    started_s = time.monotonic()
    with (
        pytest.raises(StageLostError, match=r"needs 1 GPUs \(T4-0\), this machine is .*CPU only"),
        PipelineClient.start(plan, StageSettings(model_dir=str(demo_model), options=RAY)),
    ):
        pass
    labelled = Cluster.parse_data(
        {"name": "c", "nodes": [{"name": "local", "accelerators": "CPU:2", "labels": {"a": "b"}}]},
        where="test",
    )
    with (
        pytest.raises(StageLostError, match=r"labels a=b; .*is another machine than this one"),
        PipelineClient.start(
            make_plan(demo_model, (4,)),
            StageSettings(model_dir=str(demo_model), options=RAY),
            cluster=labelled,
        ),
    ):
        pass
    assert time.monotonic() - started_s < 30


def test_a_placement_that_stays_pending_is_given_up(ray_session, demo_model, make_plan):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    everything = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert everything.wait(timeout_seconds=20)
    impatient = replace(RAY, deadlines=Deadlines(placement_s=2))
    try:
        with (
            pytest.raises(
                StageLostError, match=r"not be placed within 2 s: CPU-0 .*CPU: 0 free of"
            ),
            PipelineClient.start(
                make_plan(demo_model, (4,)),
                StageSettings(model_dir=str(demo_model), options=impatient),
            ),
        ):
            pass
    finally:
        remove_placement_group(everything)


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        pytest.param(signal.SIGTERM, "processes", marks=pytest.mark.seldom),
        pytest.param(signal.SIGINT, "processes", marks=pytest.mark.seldom),
        (signal.SIGINT, "ray"),
    ],
)
def test_a_stop_keeps_what_is_done_and_resume_finishes_it(job, whole_rows, how, backend):
    """Its command may start a Ray of its own: nothing of that may stay either."""
    process = job.started(
        "--backend", backend, start_new_session=True,
        # Tests that a shell runs in the background inherit a SIGINT that is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    children = descendants(process.pid)
    assert len(children) >= 2
    process.send_signal(how)
    assert process.wait(timeout=30) == ExitCode.INTERRUPTED, job.said()
    assert "--resume" in job.said().strip().splitlines()[-1]
    assert gone(children), "no process is left behind"
    require_resumed(job, whole_rows)


def descendants(pid: int) -> list[int]:
    """Return all processes below one, by the parents in /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
    found, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found
