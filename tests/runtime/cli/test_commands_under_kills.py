"""`run` whose stages are killed again and again: it ends as an undisturbed one, and says it all."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from llmpq import LLM, SamplingParams

pytestmark = pytest.mark.cluster
NUM_ROWS, NUM_KILLS = 12, 2


def stage_pids(command: subprocess.Popen) -> list[int]:
    found = []
    for child in psutil.Process(command.pid).children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if any("stage_process" in word for word in words):
            found.append(child.pid)
    return sorted(found)


def num_ended(output) -> int:
    """Return how many rows have ended, those too that wait for one ahead of them."""
    files = [output, output.with_name(output.name + ".held")]
    return sum(len(file.read_bytes().splitlines()) for file in files if file.exists())


def test_rows_are_in_order_and_every_recovery_is_listed(tmp_path, demo_model, make_plan):
    plan = make_plan(demo_model, (2, 5), batch=4, prompt_len=48, gen_len=24)
    rng = random.Random(0)
    rows = [
        {
            "prompt": [rng.randrange(3, 900) for _ in range(rng.randint(1, 30))],
            "temperature": 0.9 * (number % 2),
            "seed": number,
            "max_tokens": rng.randint(8, 24),
            "ignore_eos": True,
        }
        for number in range(NUM_ROWS)
    ]
    with LLM(demo_model, plan=plan, backend="threads", use_tqdm=False) as llm:
        params = [SamplingParams(**{k: v for k, v in row.items() if k != "prompt"}) for row in rows]
        whole = llm.generate([row["prompt"] for row in rows], params)
    expected = [list(answer.outputs[0].token_ids) for answer in whole]
    file, given, output = tmp_path / "plan.json", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(plan.dump_json())
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "llmpq.runtime", "run", "--plan", file, "--model", demo_model,
               "-i", given, "-o", output, "--report", tmp_path / "run.json"]  # fmt: skip
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) as process:
        for kill in range(NUM_KILLS):
            while num_ended(output) < 1 + kill * (NUM_ROWS // (NUM_KILLS + 1)):
                assert process.poll() is None
                time.sleep(0.01)
            before = stage_pids(process)
            while not before:
                before = stage_pids(process)
            victim = rng.choice(before)
            os.kill(victim, signal.SIGKILL)
            while victim in stage_pids(process):
                time.sleep(0.01)
        assert process.wait(300) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(NUM_ROWS))
    assert [line["tokens"] for line in lines] == expected
    recoveries = json.loads((tmp_path / "run.json").read_text())["recoveries"]
    # Kills that come while others are recovered are part of that recovery.
    assert 1 <= len(recoveries) <= NUM_KILLS
    assert all(one["predicted_s"] > 0 and one["measured_s"] > 0 for one in recoveries)
    assert all("SIGKILL" in one["reason"] for one in recoveries)
