"""`run` whose driver is killed: `--resume` goes on from finished rows and from answers begun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from llmpq import LLM
from llmpq.runtime.text.batch_io import read_rows
from llmpq.runtime.text.batch_rows import Defaults

pytestmark = pytest.mark.cluster
TOKENS = 150
COMMAND = """
import sys
from llmpq.runtime.text import token_journal
token_journal.EVERY_S = 0.05
from llmpq.runtime.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
ROWS = (
    {"temperature": 0.9},
    {"temperature": 0},
    {
        "temperature": 0.8,
        "presence_penalty": 0.7,
        "structured_outputs": {"regex": "[ -~]{2000}"},
        "ignore_eos": False,
    },
    {"temperature": 1.0, "top_k": 50, "logit_bias": {"5": 1.5}},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "min_tokens": 100},
)


@pytest.fixture(scope="module")
def job(tmp_path_factory, demo_model, make_plan):
    """Return a folder with a job, its command, and the tokens of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("job")
    plan = make_plan(demo_model, (2, 5), batch=3, prompt_len=48, gen_len=TOKENS)
    rows = [
        {"prompt": f"def f{number}(", "max_tokens": TOKENS, "seed": number, "ignore_eos": True}
        | choice
        for number, choice in enumerate(ROWS)
    ]
    (folder / "plan.json").write_text(plan.dump_json())
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", COMMAND, "run", "--plan", "plan.json", "-i",
               "in.jsonl", "-o", "out.jsonl", "--model", str(demo_model)]  # fmt: skip
    with LLM(demo_model, plan=plan, backend="threads", use_tqdm=False) as llm:
        params = [row.params(TOKENS) for row in read_rows(folder / "in.jsonl", Defaults())]
        whole = llm.generate([row["prompt"] for row in rows], params)
    return folder, command, [list(answer.outputs[0].token_ids) for answer in whole]


def begun(folder) -> dict[int, int]:
    """Return how many tokens of which rows are beside the output."""
    file = folder / "out.jsonl.begun"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["index"]: line["at"] + len(line["tokens"]) for line in lines}


def test_answers_go_on_from_the_tokens_they_had(job):
    folder, command, expected = job
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as driver:
        while not begun(folder):
            assert driver.poll() is None
            time.sleep(0.05)
        stages = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(signal.SIGKILL)
    gone, left = psutil.wait_procs(stages, timeout=30)
    assert not left, "stages end with their driver"
    had = begun(folder)
    finished = {json.loads(line)["index"] for line in (folder / "out.jsonl").open()}
    held = folder / "out.jsonl.held"
    finished |= {json.loads(line)["index"] for line in held.open()} if held.exists() else set()
    kept = sum(count - 1 for index, count in had.items() if index not in finished)
    assert kept > 0

    report = folder / "report.json"
    done = subprocess.run(
        [*command, "--resume", "--report", report], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "out.jsonl").open()]
    assert [line["tokens"] for line in lines] == expected
    made = TOKENS * (len(ROWS) - len(finished)) - kept
    assert json.loads(report.read_text())["total_output_tokens"] == made
    assert sorted(path.name for path in folder.glob("out.jsonl*")) == ["out.jsonl"]
