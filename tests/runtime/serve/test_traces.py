"""What an operator can follow: a request through every stage, steps against what was promised."""

from __future__ import annotations

import errno
import json
import logging
import re
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
STEP_S = {"prefill": 0.25, "decode": 0.125}


def test_a_trace_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    from llmpq.runtime.steps.trace import write_chrome_trace

    file = tmp_path / "trace.json"
    write_chrome_trace(file, [], [])
    before = file.read_text()
    write = Path.write_text

    def half(path, text):
        write(path, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        write_chrome_trace(file, [], [])
    assert file.read_text() == before and list(tmp_path.iterdir()) == [file]


@pytest.fixture(scope="module")
def planned(demo_model, make_plan):
    """A plan of two stages that promises times of steps."""
    plan = make_plan(
        demo_model, (3,), batch=8, prompt_len=200, gen_len=200, decode_microbatch=4, dtype="float32"
    )
    times = {"prefill_s": STEP_S["prefill"], "decode_s": STEP_S["decode"]}
    return plan.model_copy(
        update={"stages": tuple(stage.model_copy(update=times) for stage in plan.stages)}
    )


def ask(server, name, **body):
    """Return the answer's JSON and the id in its head."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": name},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer), answer.headers["X-Request-Id"]


def test_requests_are_followed_by_their_ids_through_every_stage(
    demo_model, planned, running, tmp_path, caplog
):
    from llmpq import LLM

    caplog.set_level(logging.INFO)
    trace = tmp_path / "trace.json"
    with running(
        lambda: LLM(demo_model, plan=planned, backend="threads", trace=trace), log_prompts=True
    ) as server:
        for name, prompt in (("first", "very private words"), ("second", ["a", "b"])):
            _, reply = ask(server, name, prompt=prompt, max_tokens=5, ignore_eos=True)
            assert reply == name
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    for stage in (0, 1):
        seen = [set(e["args"]["requests"]) for e in events if e["pid"] == stage]
        assert all(seen) and set().union(*seen) == {"first-1", "second-2", "second-3"}
        assert sum("first-1" in names for names in seen) == 5, "a step for each token"
    records = [json.loads(r.getMessage()) for r in caplog.records if r.name.startswith("llmpq.se")
               and r.getMessage().startswith("{")]  # fmt: skip
    assert [r["id"] for r in records if "path" in r] == ["first", "second"]
    assert [(r["id"], r["prompt"]) for r in records if "prompt" in r] == [
        ("first-1", "very private words"), ("second-2", "a"), ("second-3", "b"),
    ]  # fmt: skip


def test_steps_are_counted_beside_what_the_plan_promised_of_them(demo_model, planned, running):
    from llmpq import LLM

    def read(name, server):
        text = server.service.metrics.text().decode()
        found = re.findall(rf'^{name}{{.*kind="(\w+)".*stage="(\d)".*}} (\S+)$', text, flags=re.M)
        return {(kind, int(stage)): float(value) for kind, stage, value in found}

    with running(lambda: LLM(demo_model, plan=planned, backend="threads")) as server:
        ask(server, "one", prompt="a b c", n=3, seed=1, max_tokens=6, ignore_eos=True)
        steps, rows, seconds = (
            read(f"llmpq:stage_{name}_total", server)
            for name in ("steps", "step_rows", "step_seconds")
        )
        assert all(sum(v for (_, s), v in rows.items() if s == stage) == 18 for stage in (0, 1))
        assert steps and steps.keys() == rows.keys() == seconds.keys()
        assert all(seconds[key] > 0 for key in steps)
        for stage, stated in enumerate(server.service.stats()["stages"]):
            own = sum(value for (_, s), value in seconds.items() if s == stage)
            assert own == pytest.approx(stated["busy_s"])
        promised = read("llmpq:stage_predicted_step_seconds", server)
        assert promised == {(kind, s): STEP_S[kind] for kind in STEP_S for s in (0, 1)}
        at = read("llmpq:stage_predicted_step_rows", server)
        assert at["decode", 0] == planned.decode_microbatch
