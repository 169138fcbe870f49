"""Every door runs the same engine, and obeys or refuses every field of a request."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest

from llmpq import LLM, SamplingParams
from llmpq.runtime.cli.main import COMMANDS, main
from llmpq.runtime.cli.serve import open_engine
from llmpq.runtime.requests.request_output import RequestOutput
from llmpq.runtime.requests.sampling_params import StructuredOutputsParams
from llmpq.runtime.tools.evaluate import MeasuredJob, measured_plan, open_model

pytestmark = pytest.mark.cpu
PROMPT = [318, 22, 187, 9, 54]
BASE = {"max_tokens": 12, "temperature": 0.0}
WARM = {"max_tokens": 12, "temperature": 1.0, "seed": 7}


# --- the engine behind each door ---


def test_every_door_runs_the_same_engine(demo_model, make_plan, tmp_path, capsys):
    plan = make_plan(demo_model, (), batch=2, prompt_len=16, gen_len=4)
    plan.save_json(tmp_path / "plan.json")
    (tmp_path / "in.jsonl").write_text('{"prompt": "import os"}\n')
    model, where = ["--model", str(demo_model)], ["--backend", "threads", "--json"]
    rows = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--overwrite"]
    with_plan = ["--plan", str(tmp_path / "plan.json")]

    def printed(*words: str) -> Any:
        capsys.readouterr()
        assert main(list(words)) == 0
        return json.loads(capsys.readouterr().out)["stages"]

    def of(llm: LLM) -> Any:
        with llm:
            return llm.stats()["stages"]

    def server(*words: str) -> LLM:
        command = COMMANDS["serve"]
        llm = open_engine(command.parser().read_as(command.options, words))
        llm.start()
        return llm

    measured, _ = measured_plan(str(demo_model), plan_spec(demo_model), MeasuredJob(max_len=64))
    once = ["--repeat", "1", "--warm-up", "0"]
    job = ["--batch", "1", "--prompt", "4", "--gen", "2", "--dtype", "float32"]
    doors = {
        "LLM": of(LLM(demo_model, max_model_len=64)),
        "LLM with a plan": of(LLM(demo_model, plan=plan)),
        "LLM that drafts": of(LLM(demo_model, plan=plan, speculate="kv4", gamma=2)),
        "run": printed("run", *model, *rows, *where, "--max-tokens", "2"),
        "run --plan": printed("run", *model, *with_plan, *rows, *where, "--max-tokens", "2"),
        "bench": printed("bench", *model, *where, *once, *job),
        "bench --plan": printed("bench", *model, *with_plan, *where, *once),
        "eval": of(open_model(str(demo_model), measured)),
        "serve": of(server("--model", str(demo_model), "--max-model-len", "64")),
    }
    runners = {name: {stage["runner"] for stage in stages} for name, stages in doors.items()}
    assert set.union(*runners.values()) == {"StageRunner"}, runners


def plan_spec(model: Any) -> Any:
    from llmpq.models.model_spec import ModelSpec

    return ModelSpec.from_directory(model)


# --- the fields of a request ---


@dataclass(frozen=True)
class Seen:
    """What a door shows of an answer."""

    tokens: Sequence[int]
    text: str = ""
    finish_reason: str = ""
    count: int = 1
    num_prompt: int = 0
    logprobs: bool = False
    prompt_logprobs: bool = False


Judge = Callable[[Seen, Seen, Seen], object]
"""(the answer, the greedy one, the sampled one) -> whether the field was obeyed."""


def cases(greedy: Seen, end: int) -> dict[str, tuple[dict[str, Any], Judge]]:
    """Return for each field of `SamplingParams` a request that shows whether it is obeyed."""
    third, text = greedy.tokens[2], greedy.text
    stop = text[len(text) // 3 :][:3]
    always_end = {**BASE, "logit_bias": {end: 100.0}}
    some = [11, 12, 13]

    def as_greedy(seen: Seen, greedy: Seen, warm: Seen) -> bool:
        return list(seen.tokens) == list(greedy.tokens)

    def another(seen: Seen, greedy: Seen, warm: Seen) -> bool:
        return list(seen.tokens) != list(greedy.tokens)

    return {
        "n": ({**WARM, "n": 2}, lambda s, g, w: s.count == 2),
        "max_tokens": ({**BASE, "max_tokens": 3}, lambda s, g, w: len(s.tokens) == 3),
        "temperature": (WARM, another),
        "top_p": ({**WARM, "top_p": 1e-6}, as_greedy),
        "top_k": ({**WARM, "top_k": 1}, as_greedy),
        "min_p": ({**WARM, "min_p": 1.0}, as_greedy),
        "seed": ({**WARM, "seed": 8}, lambda s, g, w: list(s.tokens) != list(w.tokens)),
        "stop": (
            {**BASE, "stop": [stop]},
            lambda s, g, w: s.text == text[: text.index(stop)] and s.finish_reason == "stop",
        ),
        "include_stop_str_in_output": (
            {**BASE, "stop": [stop], "include_stop_str_in_output": True},
            lambda s, g, w: s.text == text[: text.index(stop) + len(stop)],
        ),
        "stop_token_ids": (
            {**BASE, "stop_token_ids": [third]},
            lambda s, g, w: s.tokens[-1] == third and len(s.tokens) <= 3,
        ),
        "ignore_eos": ({**always_end, "ignore_eos": True}, lambda s, g, w: len(s.tokens) == 12),
        "min_tokens": (
            {**always_end, "min_tokens": 4},
            lambda s, g, w: len(s.tokens) == 5 and s.finish_reason == "stop",
        ),
        "timeout_s": (
            {**BASE, "max_tokens": 150, "ignore_eos": True, "timeout_s": 1e-3},
            lambda s, g, w: len(s.tokens) < 150,
        ),
        "presence_penalty": ({**BASE, "max_tokens": 60, "presence_penalty": 2.0}, another),
        "frequency_penalty": ({**BASE, "max_tokens": 60, "frequency_penalty": 2.0}, another),
        "repetition_penalty": ({**BASE, "repetition_penalty": 3.0}, another),
        "logit_bias": (
            {**BASE, "logit_bias": {11: 100.0}},
            lambda s, g, w: set(s.tokens) == {11},
        ),
        "bad_words": ({**BASE, "bad_words": [text.split()[0]]}, another),
        "allowed_token_ids": (
            {**BASE, "allowed_token_ids": some},
            lambda s, g, w: set(s.tokens) <= set(some),
        ),
        "logprobs": ({**BASE, "logprobs": 1}, lambda s, g, w: s.logprobs),
        "prompt_logprobs": ({**BASE, "prompt_logprobs": 1}, lambda s, g, w: s.prompt_logprobs),
        "truncate_prompt_tokens": (
            {**BASE, "truncate_prompt_tokens": 2},
            lambda s, g, w: s.num_prompt == 2,
        ),
        "skip_special_tokens": (
            {**always_end, "ignore_eos": True, "skip_special_tokens": False},
            lambda s, g, w: s.text != "",
        ),
        "thinking_token_budget": ({**BASE, "thinking_token_budget": 4}, lambda s, g, w: False),
        "structured_outputs": (
            {**BASE, "structured_outputs": {"choice": ["red", "blue"]}},
            lambda s, g, w: s.text in ("red", "blue"),
        ),
    }


NO_THOUGHTS = {"thinking_token_budget"}
"""What the demo model refuses: it has no marks around thoughts."""
MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "ngram": {"speculate": "ngram", "gamma": 2},
    "kv4": {"speculate": "kv4", "gamma": 2},
}


@pytest.fixture(scope="module", params=["planned here", "a plan of two stages"])
def where(request, demo_model, make_plan):
    """Return what an engine is made of: nothing, or a plan."""
    if request.param == "planned here":
        return {"max_model_len": 256}
    plan = make_plan(
        demo_model, (3,), batch=8, prompt_len=200, gen_len=200, decode_microbatch=4, dtype="float32"
    )
    return {"plan": plan}


@pytest.mark.thin
@pytest.mark.parametrize("mode", MODES)
def test_python_and_http_obey_or_refuse_every_field(demo_model, where, mode, running):
    """Every field in Python in every mode; over HTTP in one, since bodies know of no mode."""
    llm = LLM(demo_model, **where, **MODES[mode], backend="threads")
    end = llm.model_spec.eos_token_ids[0]

    def in_python(wanted: Mapping[str, Any]) -> Seen:
        guide = wanted.get("structured_outputs")
        made = {"structured_outputs": StructuredOutputsParams(**guide)} if guide else {}
        (output,) = llm.generate([PROMPT], SamplingParams(**{**wanted, **made}))
        return seen_of(output)

    assert_obeyed(in_python, end, may_refuse=NO_THOUGHTS)
    if MODES[mode]:
        llm.close()
        return
    with running(lambda: llm) as server:

        def over_http(wanted: Mapping[str, Any]) -> Seen:
            return seen_of_json(post(server.url, {**wanted, "prompt": PROMPT}))

        assert_obeyed(over_http, end, may_refuse=NO_THOUGHTS | {"timeout_s"})


def assert_obeyed(
    ask: Callable[[Mapping[str, Any]], Seen], end: int, *, may_refuse: set[str]
) -> None:
    """Ask with each field; refusals must name it."""
    greedy, warm = ask(BASE), ask(WARM)
    long = ask({**BASE, "max_tokens": 60})
    table = cases(greedy, end)
    assert set(table) == {f.name for f in fields(SamplingParams)}
    for name, (wanted, obeyed) in table.items():
        try:
            seen = ask(wanted)
        except ValueError as error:
            assert name in may_refuse and name in str(error), (name, str(error))
            continue
        assert name not in may_refuse, f"{name} was to be refused"
        beside = long if wanted["max_tokens"] == 60 else greedy
        assert obeyed(seen, beside, warm), (name, seen, beside)


def seen_of(output: RequestOutput) -> Seen:
    first = output.outputs[0]
    return Seen(
        tokens=list(first.token_ids),
        text=first.text,
        finish_reason=first.finish_reason,
        count=len(output.outputs),
        num_prompt=len(output.prompt_token_ids),
        logprobs=first.logprobs is not None,
        prompt_logprobs=output.prompt_logprobs is not None,
    )


def post(url: str, body: Mapping[str, Any]) -> Any:
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data=data, headers={"Content-Type": "application/json"}
    )
    try:
        return json.load(urllib.request.urlopen(request, timeout=60))
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]["message"]) from None


def seen_of_json(answer: Mapping[str, Any]) -> Seen:
    first = answer["choices"][0]
    return Seen(
        tokens=first["token_ids"],
        text=first["text"],
        finish_reason=first["finish_reason"],
        count=len(answer["choices"]),
        num_prompt=answer["usage"]["prompt_tokens"],
        logprobs=first.get("logprobs") is not None,
        prompt_logprobs=first.get("prompt_logprobs") is not None,
    )


@pytest.mark.thin
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("planned", [True, False])
def test_batch_files_obey_or_refuse_every_field(demo_model, make_plan, tmp_path, mode, planned):
    plan = make_plan(demo_model, (), batch=8, prompt_len=200, gen_len=200, dtype="float32")
    plan.save_json(tmp_path / "plan.json")
    end = plan_spec(demo_model).eos_token_ids[0]

    def run(wanted: Sequence[Mapping[str, Any]]) -> list[Seen | str]:
        lines = [json.dumps({"prompt": PROMPT, **row}) for row in wanted]
        (tmp_path / "in.jsonl").write_text("\n".join(lines))
        words = ["run", "--model", str(demo_model), "--backend", "threads", "--overwrite"]
        words += ["--plan", str(tmp_path / "plan.json")] if planned else []
        for name, value in MODES[mode].items():
            words += [f"--{name}", str(value)]
        files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
        assert main([*words, *files]) in (0, 8)
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        return [
            row["error"]["message"]
            if row["error"]
            else Seen(
                tokens=row["tokens"],
                text=row["text"],
                finish_reason=row["finish_reason"],
                num_prompt=row["prompt_tokens"],
            )
            for row in rows
        ]

    greedy, warm, long = run([BASE, WARM, {**BASE, "max_tokens": 60}])
    assert isinstance(greedy, Seen) and isinstance(warm, Seen) and isinstance(long, Seen)
    table = cases(greedy, end)
    refused = NO_THOUGHTS | {"n", "logprobs", "prompt_logprobs"}
    for (name, (wanted, obeyed)), seen in zip(
        table.items(), run([wanted for wanted, _ in table.values()]), strict=True
    ):
        assert isinstance(seen, str) == (name in refused), (name, seen)
        if isinstance(seen, str):
            assert name in seen and len(seen.split()) > 4
        else:
            assert obeyed(seen, long if wanted["max_tokens"] == 60 else greedy, warm), (name, seen)


@pytest.mark.parametrize("mode", MODES)
def test_priority_and_cache_salt_hold_in_every_mode(demo_model, make_plan, mode):
    plan = make_plan(demo_model, (), batch=1, prompt_len=200, gen_len=200, dtype="float32")
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(demo_model, plan=plan, **MODES[mode]) as llm:
        prompts = [llm.prepare([5, 6, 7], params, priority=rank) for rank in (2, 1, 0)]
        assert [index for index, _ in llm.as_completed(prompts)] == [2, 1, 0]
        shared = list(range(100, 100 + 150))
        for salt, found in (("a", False), ("a", True), ("b", False)):
            prompt = llm.prepare(shared, params, cache_salt=salt)
            ((_, output),) = llm.as_completed([prompt])
            assert (output.num_cached_tokens > 0) == found, (salt, mode)


def test_priority_of_batch_rows_orders_them(demo_model, make_plan, tmp_path, monkeypatch):
    from llmpq.runtime.text.batch_io import OrderedWriter

    plan = make_plan(demo_model, (), batch=1, prompt_len=16, gen_len=4, dtype="float32")
    plan.save_json(tmp_path / "plan.json")
    lines = [json.dumps({"prompt": [5, 6], "priority": rank}) for rank in (2, 1, 0)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    order, write = [], OrderedWriter.write
    monkeypatch.setattr(
        OrderedWriter, "write", lambda self, i, line: (order.append(i), write(self, i, line))[1]
    )
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert (
        main(["run", "--model", str(demo_model), "--plan", str(tmp_path / "plan.json"), *files])
        == 0
    )
    assert order == [2, 1, 0]
