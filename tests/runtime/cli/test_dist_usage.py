"""`llmpq-dist` used wrongly: one sentence and exit 2 before anything runs, or a row's error."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch

from llmpq.errors import ExitCode
from llmpq.profiler.__main__ import main as profile
from llmpq.profiler.cli.quantize import main as quantize
from llmpq.runtime.cli import main as command_line
from llmpq.runtime.cli import tool_flags
from llmpq.runtime.cli.main import main
from llmpq.runtime.cli.run import prepare_rows
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.text.batch_rows import Defaults, json_row
from llmpq.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu


@pytest.fixture
def chat_model(demo_model, tmp_path):
    """Return a copy of the tokenizer whose template allows users only."""
    folder = tmp_path / "chat"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(demo_model / name, folder)
    template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('users only') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_the_command_alone_shows_what_there_is(capsys):
    for words in ([], ["--help"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
    shown = capsys.readouterr().out
    half = len(shown) // 2
    assert shown[:half] == shown[half:] and "usage: llmpq-dist" in shown


def test_lengths_of_bench_have_the_names_that_plans_have():
    flags = ["--model", "opt-13b", "--batch-size", "3"]
    for prompt, gen in (
        ("--prompt", "--gen"),
        ("--prompt-len", "--gen-len"),
        ("--input-len", "--output-len"),
    ):
        got = tool_flags.bench_parser().read([*flags, prompt, "7", gen, "5"])
        assert (got.batch, got.prompt, got.gen) == (3, 7, 5)


def test_a_text_or_conversation_without_tokens_fails_its_row_only(
    demo_model, make_plan, chat_model
):
    lines = [
        r'{"prompt": "a\ud800b"}',
        '{"messages": [{"role": "robot", "content": "x"}]}',
        r'{"messages": [{"role": "user", "content": "\udfff"}]}',
        '{"messages": [{"role": "user", "content": "import os"}]}',
    ]
    rows = [json_row(index, line, Defaults()) for index, line in enumerate(lines)]
    llm = LLM(demo_model, plan=make_plan(demo_model, ()), start=False)
    prompts, errors = prepare_rows(rows, llm, Tokenizer(chat_model))
    assert list(prompts) == [3]
    assert "lone surrogate) at position 1" in errors[0]
    assert "chat template refuses the messages: users only" in errors[1]
    assert "lone surrogate" in errors[2]


@pytest.mark.parametrize("text", ["{}", '{"version": "1.0"', '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_one_sentence(chat_model, text):
    (chat_model / "tokenizer.json").write_text(text)
    read = r"tokenizer of '.*/chat' \(tokenizer\.json, tokenizer_config\.json\) cannot be read"
    with pytest.raises(ValueError, match=read):
        Tokenizer(chat_model)


def test_a_broken_tokenizer_is_named_by_the_files_that_are_there(chat_model):
    (chat_model / "tokenizer.json").write_text("{}")
    (chat_model / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"\(tokenizer\.json\) cannot be read .* again$"):
        Tokenizer(chat_model)
    (chat_model / "tokenizer.json").unlink()
    (chat_model / "vocab.json").write_text("{")
    (chat_model / "merges.txt").write_text("")
    with pytest.raises(ValueError, match=r"\(vocab\.json, merges\.txt\) cannot be read"):
        Tokenizer(chat_model)


@pytest.fixture
def job_files(demo_model, make_plan, tmp_path):
    """Return the words of a run that would work, and its folder."""
    plan, source = tmp_path / "plan.json", tmp_path / "in.jsonl"
    make_plan(demo_model, ()).save_json(plan)
    source.write_text('{"custom_id": "a", "prompt": "import os"}\n')
    return ["--strat_file_name", str(plan), "-i", str(source)], tmp_path


@pytest.fixture
def started(monkeypatch):
    """Fail a test whose command gets as far as starting a pipeline."""
    from llmpq.runtime.launch.engine_starter import EngineStarter

    def start(*_args: object, **_options: object) -> None:
        raise AssertionError("the pipeline was started")

    monkeypatch.setattr(EngineStarter, "start", start)


def last_line(capsys) -> str:
    captured = capsys.readouterr().err
    assert "Traceback" not in captured
    return captured.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-o", "{dir}/in.jsonl"], "--output and --input are the same file"),
        (["-o", "{dir}/./link.jsonl"], "--output and --input are the same file"),
        (["-o", "{dir}/plan.json"], "--output and --plan are the same file"),
        (["-o", "{dir}/o", "--trace", "{dir}/o"], "--trace and --output are the same file"),
        (["-o", "{dir}"], "--output '{dir}' is a directory"),
        (["-o", "{dir}/in.jsonl/out"], "cannot be written (File exists"),
        (["-o", "/proc/none/out"], "cannot be written (No such file"),
        (["-o", "{dir}/o", "--trace", "{dir}"], "--trace '{dir}' is a directory"),
        (["-o", "{dir}/o", "--report", "{dir}"], "--report '{dir}' is a directory"),
        (["-o", "{dir}/o", "--master_port", "99999"], "--master-port must be 1 to 65535"),
        (["-o", "{dir}/o", "--temperature", "-1"], "--temperature must be 0 (greedy)"),
        (["-o", "{dir}/o", "--top_p", "2"], "--top_p must be in (0, 1]"),
        (["-o", "{dir}/o", "--max_tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["-o", "{dir}/o", "--deadlines", "step=0"], "the deadline step must be a positive"),
        (["-o", "{dir}/o", "--layer-cache", "{dir}/in.jsonl"], "is a file, expected a folder"),
        (["-o", "{dir}/o", "--layer-cache", "{dir}/in.jsonl/c"], "in (Not a directory); give"),
        (["-o", "{dir}/o", "--layer-cache", "/proc/none"], "--layer-cache '/proc/none' is no"),
        (["-o", "{dir}/o", "--gamma", "3"], "--gamma 3 has no effect without drafts"),
        (["-o", "{dir}/o", "--compare-plain"], "--compare-plain has no effect without drafts"),
    ],
)
def test_a_run_that_cannot_work_ends_before_it_starts(job_files, started, capsys, more, message):
    words, folder = job_files
    (folder / "link.jsonl").symlink_to(folder / "in.jsonl")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    code = main([*words, *(word.replace("{dir}", str(folder)) for word in more)])
    assert code == ExitCode.USAGE
    assert message.replace("{dir}", str(folder)) in last_line(capsys)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("command", ["run", "serve", "chat", "bench"])
def test_a_plan_that_names_no_model_is_answered_in_the_commands_words(job_files, capsys, command):
    words, folder = job_files
    files = ["-i", words[-1], "-o", str(folder / "out.jsonl")] if command == "run" else []
    plan = json.loads((folder / "plan.json").read_text())
    plan["model"].pop("path", None)
    (folder / "plan.json").write_text(json.dumps(plan))
    with socket.socket() as free:  # a server of somebody's may have 8000
        free.bind(("127.0.0.1", 0))
        files += ["--port", str(free.getsockname()[1])] if command == "serve" else []
    assert main([command, "--plan", str(folder / "plan.json"), *files]) == ExitCode.USAGE
    said = last_line(capsys)
    assert "the plan names no model directory; give " in said and said.endswith(" --model DIR")


def test_with_nothing_left_to_do_the_report_is_still_written(job_files, started, capsys):
    words, folder = job_files
    out, report = folder / "out.jsonl", folder / "report.json"
    answer = {"custom_id": "a", "response": {"status_code": 200}, "error": None}
    out.write_text(json.dumps(answer) + "\n")
    code = main([*words, "-o", str(out), "--resume", "--json", "--report", str(report)])
    captured = capsys.readouterr()
    assert code == ExitCode.DONE, captured.err
    printed = json.loads(captured.out)
    written = json.loads(report.read_text())
    assert printed == {k: v for k, v in written.items() if k not in ("samples", "timeline")}
    assert (printed["completed"], printed["failed"], printed["stages"]) == (0, 0, [])
    assert json.loads(out.read_text()) == answer


def test_when_every_row_is_refused_it_says_so_and_why(job_files, started, capsys, caplog):
    words, folder = job_files
    (folder / "in.jsonl").write_text("{not json\n[]\n")
    out = folder / "out.jsonl"
    with caplog.at_level("INFO", logger="llmpq"):
        assert main([*words, "-o", str(out)]) == ExitCode.SOME_ROWS_FAILED
    said = last_line(capsys)
    assert said.startswith("every row was refused, 2 in all (row 0: line 1 is not JSON")
    assert said.endswith(f"; see their 'error' in {out}")
    assert "nothing to run: 2 of 2 rows were refused" in caplog.messages
    assert "finished before" not in caplog.text
    assert len(out.read_text().splitlines()) == 2


def test_a_report_that_cannot_be_written_is_still_printed(job_files, started, capsys):
    words, folder = job_files
    out = folder / "out.jsonl"
    out.write_text('{"custom_id": "a", "response": {"status_code": 200}, "error": null}\n')
    more = ["-o", str(out), "--resume", "--json", "--report", "/dev/full"]
    assert main([*words, *more]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == 1
    assert captured.err.strip().splitlines()[-1] == (
        "llmpq-dist: cannot write '/dev/full': no space left on device; the answers in "
        f"'{out}' are complete, free some space or give another path"
    )


def test_a_full_standard_output_is_one_sentence(job_files):
    words, folder = job_files
    out = folder / "out.jsonl"
    out.write_text('{"custom_id": "a", "response": {"status_code": 200}, "error": null}\n')
    command = [sys.executable, "-m", "llmpq.runtime", *words, "-o", out, "--resume", "--json"]
    report = folder / "report.json"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--report", report], stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=60, env=os.environ | {"PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert json.loads(report.read_text())["schema"] == 1
    assert done.stderr.splitlines()[-1] == (
        "llmpq-dist: cannot write 'standard output': no space left on device; the answers in "
        f"'{out}' are complete, free some space or give another path"
    )
    short = (
        "import llmpq.runtime.cli.main as line; line._dispatch = lambda *_: print('short') or 0;"
        "raise SystemExit(line.main(['check']))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", short], stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=60, env=os.environ | {"PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "llmpq-dist: 'standard output': No space left on device\n"


def test_a_closed_standard_output_is_no_error(job_files):
    words, folder = job_files
    command = [sys.executable, "-m", "llmpq.runtime", *words, "-o", str(folder / "out.jsonl")]
    (folder / "out.jsonl").write_text(
        '{"custom_id": "a", "response": {"status_code": 200}, "error": null}\n'
    )
    closed = " ".join(shlex.quote(str(word)) for word in [*command, "--resume"]) + " >&-"
    done = subprocess.run(["sh", "-c", closed], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == ExitCode.DONE, done.stderr
    done = subprocess.run(
        ["sh", "-c", closed.replace("--resume", "--max_tokens 0")],
        stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == ExitCode.USAGE and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evla", "--model", "x"], "did you mean 'eval'"),
        (["pull", "qwen3:8b"], "there is no command 'pull' here: models of the hub are downloaded"),
        (["ps"], "on its page at /"),
        (["convert", "{model}", "{file}"], "nothing to convert"),
        (["convert", "{bin}", "{file}"], "is a file; give a new directory"),
        (["eval", "--model", "{model}", "--text", "{file}", "--device", "cuda:77"], "CUDA devices"),
        (["eval", "--model", "{model}", "--text", "{file}", "--device", "gpu0"], "torch device"),
    ],
)
def test_other_commands_end_with_one_sentence(demo_model, tmp_path, capsys, words, message):
    file, folder = tmp_path / "file", tmp_path / "bin"
    file.write_text("import os\n" * 9)
    folder.mkdir()
    torch.save({"w": torch.zeros(2)}, folder / "pytorch_model.bin")
    names = {"model": demo_model, "file": file, "bin": folder}
    assert main([word.format(**names) for word in words]) == ExitCode.USAGE
    assert message in last_line(capsys)


def test_whatever_the_system_refuses_is_one_sentence(monkeypatch, capsys):
    def refuse(*words: object) -> int:
        raise OSError(28, "No space left on device", "/somewhere/out.jsonl")

    monkeypatch.setattr(command_line, "_dispatch", refuse)
    assert main(["check", "plan.json"]) == ExitCode.USAGE
    assert last_line(capsys) == "llmpq-dist: '/somewhere/out.jsonl': No space left on device"


@pytest.mark.parametrize(("command", "kept"), [("run", True), ("eval", False), ("bench", False)])
def test_an_interrupt_promises_rows_only_where_there_are_some(monkeypatch, capsys, command, kept):
    def interrupt(*words: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_dispatch", interrupt)
    assert main([command]) == ExitCode.INTERRUPTED
    assert ("--resume" in last_line(capsys)) is kept


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_ray_address_where_nothing_listens_is_refused_at_once(
    job_files, capsys, demo_model, form, planned
):
    words, folder = job_files
    if not planned:
        place = next(i for i, word in enumerate(words) if word in ("--plan", "--strat_file_name"))
        words = [*words[:place], "--model", str(demo_model), *words[place + 2 :]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = form.format(free.getsockname()[1])
        started_s = time.monotonic()
        code = main([*words, "-o", str(folder / "out.jsonl"), "--ray-address", address])
    assert code == ExitCode.STAGE_LOST and time.monotonic() - started_s < 10
    assert f"no Ray cluster at '{address}' ([Errno 111]" in last_line(capsys)


@pytest.mark.parametrize("command", ["run", "indicator", "merge"])
def test_the_profiler_looks_at_its_output_before_it_starts(tmp_path, monkeypatch, capsys, command):
    def start(args: object) -> int:
        raise AssertionError("the work was started")

    monkeypatch.setattr("llmpq.profiler.cli.run.main", start)
    monkeypatch.setattr("llmpq.profiler.cli.run.merge", start)
    monkeypatch.setattr("llmpq.profiler.cli.indicator.main", start)
    words = {
        "run": ["--model", "opt-13b", "--cluster", "c.yaml"],
        "indicator": ["--model", "opt-13b"],
        "merge": ["a.json"],
    }[command]
    assert profile([command, *words, "-o", str(tmp_path)]) == ExitCode.USAGE
    assert last_line(capsys) == (
        f"llmpq-profile: --output '{tmp_path}' is a directory, expected a file to write"
    )


def test_the_profiler_says_what_the_system_refuses(tmp_path, monkeypatch, capsys):
    def refuse(args: object) -> int:
        raise OSError(28, "No space left on device", "costs.json")

    monkeypatch.setattr("llmpq.profiler.cli.run.merge", refuse)
    assert profile(["merge", "a", "-o", str(tmp_path / "costs.json")]) == ExitCode.USAGE
    assert last_line(capsys) == "llmpq-profile: 'costs.json': No space left on device"


def test_bench_looks_at_its_row_file_before_it_starts(tmp_path, capsys):
    assert main(["bench", "--model", "opt-13b", "--rows", str(tmp_path)]) == ExitCode.USAGE
    assert f"--rows '{tmp_path}' is a directory" in last_line(capsys)


@pytest.mark.parametrize("command", ["indicator", "quantize"])
def test_a_device_that_is_not_here_is_one_sentence(demo_model, tmp_path, capsys, command):
    words = ["--text", str(demo_model / "config.json"), "--device", "cuda:77"]
    if command == "indicator":
        code = profile([command, "--model", str(demo_model), "-o", str(tmp_path / "o"), *words])
    else:
        code = quantize([str(demo_model), str(tmp_path / "o"), "--scheme", "w4a16", *words])
    assert code == ExitCode.USAGE and "--device 'cuda:77'" in last_line(capsys)


def test_a_lack_of_memory_is_a_sentence(monkeypatch, capsys):
    text = "[enforce fail at alloc_cpu.cpp:130] . DefaultCPUAllocator: can't allocate memory\nstack"

    def allocate(*words: object) -> int:
        raise RuntimeError(text)

    monkeypatch.setattr(command_line, "_dispatch", allocate)
    assert main(["bench"]) == ExitCode.DOES_NOT_FIT
    said = last_line(capsys)
    assert said.startswith("llmpq-dist: out of memory: [enforce fail") and "stack" not in said


def test_another_error_is_not_taken_for_a_lack_of_memory(monkeypatch):
    def fail(*words: object) -> int:
        raise RuntimeError("planted")

    monkeypatch.setattr(command_line, "_dispatch", fail)
    with pytest.raises(RuntimeError, match="planted"):
        main(["bench"])


def test_without_an_address_ray_is_started_here_whatever_the_environment_says(monkeypatch):
    import ray

    from llmpq.runtime.launch.on_ray.connect import ray_cluster

    given: list[dict[str, object]] = []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "init", lambda **options: given.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with ray_cluster(None):
        pass
    assert [options["address"] for options in given] == ["local"]
