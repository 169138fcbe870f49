"""Kills that come together with something else: each request ends once, as if there were none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from llmpq import LLM, SamplingParams
from llmpq.runtime.requests.sampling_params import StructuredOutputsParams
from reference.mtp_models import make_mtp_model

pytestmark = pytest.mark.cluster
LONG = {"max_tokens": 70, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, **LONG),
    SamplingParams(temperature=0.9, seed=3, **LONG),
    SamplingParams(temperature=0.8, seed=5, frequency_penalty=0.6, logprobs=2, **LONG),
    SamplingParams(
        temperature=0.9, seed=7, max_tokens=70,
        structured_outputs=StructuredOutputsParams(regex="[a-z ]{60}"),
    ),
]  # fmt: skip
PROMPTS = [f"def function_{number}(self, x):\n    return" for number in range(len(PARAMS))]
SHAPE = {"batch": 4, "prompt_len": 300, "gen_len": 80}
PROCESSES = {"backend": "processes", "use_tqdm": False}


def answered(llm: LLM, prompts, act: Callable[[], object], *, at: int) -> list[tuple]:
    """Answer prompts; `act` once so many tokens are there. Each answer must come once."""
    prepared = [llm.prepare(p, own) for p, own in zip(prompts, PARAMS, strict=True)]
    begun, outputs, failures = threading.Event(), {}, []

    def when_begun() -> None:
        begun.wait()
        try:
            act()
        except BaseException as error:
            failures.append(error)

    acting = threading.Thread(target=when_begun)
    acting.start()
    for index, output in llm.as_completed(
        prepared, on_progress=lambda now: now.generated_tokens >= at and begun.set()
    ):
        assert index not in outputs
        outputs[index] = output
    begun.set()
    acting.join()
    assert not failures, failures
    return seen([outputs[index] for index in range(len(prompts))])


def seen(outputs) -> list[tuple]:
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.failure) for o in outputs]


def undisturbed(model, plan, prompts, **how) -> list[tuple]:
    with LLM(model, plan=plan, backend="threads", use_tqdm=False, **how) as llm:
        return seen(llm.generate(prompts, PARAMS))


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, how)


def fresh(llm: LLM, before, phase: str) -> list[int]:
    """Return the stages of the next client once it is in a phase; none where it never was."""
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        client = llm.stages_started
        if client is not None and client is not before and client.stage_pids():
            if client.phase == phase:
                return client.stage_pids()
            if client.phase not in ("start-up", "loading", "connecting"):
                break
        time.sleep(0.0005)
    return []


@pytest.mark.parametrize("phase", ["loading", pytest.param("connecting", marks=pytest.mark.seldom)])
def test_two_at_once_while_others_take_over(demo_model, make_plan, phase):
    plan = make_plan(demo_model, (2, 5), **SHAPE)
    expected = undisturbed(demo_model, plan, PROMPTS)
    with LLM(demo_model, plan=plan, **PROCESSES) as llm:

        def act() -> None:
            before = llm.stages_started
            kill(before.stage_pids()[1])
            for pid in fresh(llm, before, phase)[:2]:
                kill(pid)

        assert answered(llm, PROMPTS, act, at=60) == expected
        assert llm.recoveries and llm.recoveries[-1].measured_s is not None


def test_a_stage_dies_while_a_device_is_drained(demo_model, make_plan):
    plan = make_plan(demo_model, (2, 5), **SHAPE)
    expected = undisturbed(demo_model, plan, PROMPTS)
    with LLM(demo_model, plan=plan, on_loss="replan", **PROCESSES) as llm:

        def act() -> None:
            before = llm.stages_started

            def strike() -> None:
                pids = fresh(llm, before, "loading") or llm.stages_started.stage_pids()
                kill(pids[-1])

            striking = threading.Thread(target=strike)
            striking.start()
            assert llm.drain_devices("CPU-1").done
            striking.join()

        assert answered(llm, PROMPTS, act, at=60) == expected
        assert "CPU-1" not in {stage.device for stage in llm.plan.stages}


def test_the_first_stage_stands_still_in_a_long_prompt(demo_model, make_plan):
    """Its silence is noticed by the step deadline, in the middle of the prompt."""
    plan = make_plan(demo_model, (2, 5), **SHAPE)
    prompts = [[5 + (7 * n + i) % 400 for i in range(290)] for n in range(len(PARAMS))]
    expected = undisturbed(demo_model, plan, prompts)
    how = {"max_num_batched_tokens": 16, "deadlines": "step=4", **PROCESSES}
    with LLM(demo_model, plan=plan, **how) as llm:
        prepared = [llm.prepare(p, own) for p, own in zip(prompts, PARAMS, strict=True)]
        outputs, client = {}, llm.stages_started

        def stop() -> None:
            while client.phase != "prefill":
                time.sleep(0.001)
            kill(client.stage_pids()[0], signal.SIGSTOP)

        threading.Thread(target=stop, daemon=True).start()
        for index, output in llm.as_completed(prepared):
            assert index not in outputs
            outputs[index] = output
        assert seen([outputs[i] for i in range(len(prompts))]) == expected
        (recovery,) = llm.recoveries
        assert (recovery.phase, recovery.stage, recovery.loss) == ("prefill", 0, "silence")


@pytest.mark.parametrize(
    "victim", [1, *(pytest.param(n, marks=pytest.mark.seldom) for n in (0, 3))]
)
def test_a_member_of_a_shared_stage_dies(demo_model, make_plan, victim):
    plan = make_plan(demo_model, (4,), shares=[(1, 1), (2, 1)], **SHAPE)
    expected = undisturbed(demo_model, plan, PROMPTS)
    with LLM(demo_model, plan=plan, **PROCESSES) as llm:
        pids = llm.stages_started.stage_pids()
        assert answered(llm, PROMPTS, lambda: kill(pids[victim]), at=60) == expected
        assert [one.loss for one in llm.recoveries] == ["process"]


@pytest.mark.thin
@pytest.mark.parametrize("drafts", ["ngram", "mtp"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stage_dies_while_tokens_are_drafted(
    demo_model, models, make_plan, tmp_path, drafts, victim
):
    model, prompts = demo_model, PROMPTS
    if drafts == "mtp":
        name, options = models.options("deepseek_v3")
        model = make_mtp_model(tmp_path, "deepseek_v3", name, options).directory
        prompts = [[3 + n, 5, 7, 9, 5, 7, 9] for n in range(len(PARAMS) - 1)]
    params = PARAMS[: len(prompts)]
    splits = (2, 5) if drafts == "ngram" else (1, 2)
    plan = make_plan(model, splits, batch=4, prompt_len=40, gen_len=80)
    how = {"speculate": drafts, "gamma": 3}
    exact = params if drafts == "ngram" else params[:1]  # drawn drafts: as likely, not the same
    with LLM(model, plan=plan, backend="threads", use_tqdm=False, **how) as llm:
        expected = seen(llm.generate(prompts_of(prompts), params))
    with LLM(model, plan=plan, **how, **PROCESSES) as llm:
        pids, outputs, struck = llm.stages_started.stage_pids(), {}, []

        def on_progress(now) -> None:
            if now.generated_tokens > 40 and not struck:
                struck.append(kill(pids[victim]))

        prepared = [llm.prepare(p, s) for p, s in zip(prompts_of(prompts), params, strict=True)]
        for index, output in llm.as_completed(prepared, on_progress=on_progress):
            assert index not in outputs
            outputs[index] = output
        found = seen([outputs[i] for i in range(len(prompts))])
        assert found[: len(exact)] == expected[: len(exact)]
        assert [(len(tokens), *end) for tokens, *end in found] == [
            (len(tokens), *end) for tokens, *end in expected
        ]
        assert struck and len(llm.recoveries) == 1


def prompts_of(prompts):
    return [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]


COMMAND = """
import sys
from llmpq.runtime.text import token_journal
token_journal.EVERY_S = 0.05
from llmpq.runtime.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.seldom  # cli/test_driver_killed.py kills one in a job, others here a recovery
def test_the_driver_dies_while_a_stage_is_recovered(demo_model, make_plan, tmp_path):
    plan = make_plan(demo_model, (2, 5), **SHAPE)
    rows = [
        {"prompt": p, "max_tokens": 70, "seed": number, "ignore_eos": True,
         "temperature": 0.9 * (number % 2)}
        for number, p in enumerate(PROMPTS * 3)
    ]  # fmt: skip
    (tmp_path / "plan.json").write_text(plan.dump_json())
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", COMMAND, "run", "--plan", "plan.json", "-i", "in.jsonl",
               "--model", str(demo_model), "-o"]  # fmt: skip
    subprocess.run([*command, "whole.jsonl"], cwd=tmp_path, check=True, capture_output=True)
    with subprocess.Popen([*command, "out.jsonl"], cwd=tmp_path, stderr=subprocess.DEVNULL) as run:
        record = tmp_path / "out.jsonl.begun"
        while not (record.exists() and record.read_text().count("\n") > 2):
            assert run.poll() is None
            time.sleep(0.01)
        stages = psutil.Process(run.pid).children(recursive=True)
        workers = [one for one in stages if any("stage_process" in w for w in one.cmdline())]
        kill(max(one.pid for one in workers))
        time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(stages, timeout=30)
    assert not left
    done = subprocess.run(
        [*command, "out.jsonl", "--resume"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    whole, out = (
        [json.loads(line) for line in (tmp_path / name).open()]
        for name in ("whole.jsonl", "out.jsonl")
    )
    assert [row["index"] for row in out] == list(range(len(rows)))
    assert [row["tokens"] for row in out] == [row["tokens"] for row in whole]
