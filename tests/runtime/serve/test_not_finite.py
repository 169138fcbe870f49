"""A token that no logits say: the request fails, at every door, and the others go on."""

from __future__ import annotations

import io
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq import LLM, SamplingParams, StructuredOutputsParams
from llmpq.runtime.cli.main import main
from llmpq.runtime.drafts.acceptance import accept
from llmpq.runtime.models.sampling import finite_choices
from llmpq.runtime.requests.request import NOT_FINITE_TOKEN
from llmpq.runtime.requests.sampling_params import SamplerConfig

pytestmark = pytest.mark.cpu
BAD, BAD_TEXT = 94, "~"
"""A token whose embedding is NaN: what follows it has no logits."""
SAID = "logits are not finite"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FORCED = {"logit_bias": {BAD: 100.0}, "max_tokens": 12}
PROMPTS = [[40 + n % 7 for n in range(length)] for length in (5, 30, 70)]


@pytest.fixture(scope="module")
def damaged(demo_model: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "demo"
    shutil.copytree(demo_model, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][BAD] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | template))
    return folder


@pytest.mark.parametrize("likeliest", [False, True])
def test_logits_that_say_no_token(likeliest):
    logits = torch.zeros(6, 9)
    logits[:, 4] = 1.0
    logits[1, 7] = float("nan")
    logits[2, 0] = float("inf")
    logits[3] = float("nan")
    logits[4, 1:3] = -float("inf")  # suppressed ones
    logits[5] = -float("inf")
    tokens = logits.max(dim=-1).indices
    wrong = [1, 2, 3, 5]
    found = finite_choices(tokens, logits, likeliest=likeliest).tolist()
    assert [row for row in range(6) if found[row] == NOT_FINITE_TOKEN] == wrong
    assert found[0] == found[4] == 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_drafts_are_kept_up_to_where_no_token_can_be_chosen(place, temperature):
    logits = torch.full((1, 3, 9), -50.0)
    logits[0, [0, 1, 2], [3, 1, 4]] = 50.0
    sampling = [SamplerConfig(temperature=temperature, seed=3)]
    assert accept(logits, [[3, 1]], [None], sampling, [0]) == [[3, 1, 4]]
    logits[0, place, 5] = float("nan")
    assert accept(logits, [[3, 1]], [None], sampling, [0]) == [[3, 1, 4][:place] + [-2]]


@pytest.mark.parametrize(
    ("splits", "how"),
    [
        ((), {}),
        ((3,), {}),
        ((), {"speculate": "kv4", "gamma": 2}),
        ((3,), {"speculate": "ngram", "gamma": 2}),
        ((), {"kv_cache_dtype": "kv8"}),
    ],
)
def test_only_what_cannot_go_on_fails(damaged, make_plan, splits, how):
    sizes = {"batch": 4, "prompt_len": 80, "gen_len": 12, "decode_microbatch": 2}
    plan = make_plan(damaged, splits, **sizes, dtype="float32")
    with LLM(damaged, plan=plan, backend="threads", **how) as llm:
        first = llm.generate(PROMPTS, GREEDY)
        wanted = [one.outputs[0].token_ids for one in first]
        assert [one.finish_reason for one in first] == ["length"] * 3
        bad = [[5, BAD, 6], [BAD], [*PROMPTS[1], BAD, 3]]
        mixed = [prompt for pair in zip(PROMPTS, bad, strict=True) for prompt in pair]
        for _ in range(2):  # again, in blocks that held what is not finite
            answers = llm.generate(mixed, GREEDY)
            assert [one.outputs[0].token_ids for one in answers[::2]] == wanted
            assert [one.finish_reason for one in answers[1::2]] == ["error"] * 3
            assert all(SAID in (one.failure or "") for one in answers[1::2])
        for more in ({}, {"temperature": 0}, {"logprobs": 2}, {"n": 2, "seed": 1}):
            (late,) = llm.generate([PROMPTS[0]], SamplingParams(**FORCED, **more))
            assert late.outputs[0].token_ids == [BAD] and SAID in late.failure
        guide = StructuredOutputsParams(choice=["ab"])
        (guided,) = llm.generate([bad[0]], SamplingParams(structured_outputs=guide))
        assert SAID in guided.failure
        again = llm.generate(PROMPTS, GREEDY)
        assert [one.outputs[0].token_ids for one in again] == wanted


CHAT = {"messages": [{"role": "user", "content": "a"}]}
DOORS = [
    ("/v1/completions", {"prompt": [5, 6]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", CHAT),
]


@pytest.fixture(scope="module")
def served(damaged, running):
    with running(lambda: LLM(damaged, backend="threads", dtype="float32")) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), DOORS, ids=[path for path, _ in DOORS])
def test_every_door_says_so(served, path, body, stream):
    most = "max_output_tokens" if "input" in body else "max_tokens"
    asked = {**body, "model": "demo-7m", "stream": stream, most: 12, "logit_bias": {BAD: 100.0}}
    request = urllib.request.Request(
        served.url + path, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, said = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, said = error.code, error.read().decode()
    assert SAID in said and "'stop'" not in said and '"stop"' not in said
    assert status == (200 if stream else 500)
    with urllib.request.urlopen(served.url + "/health", timeout=10) as answer:
        assert answer.status == 200


def test_a_row_of_a_file_fails_and_the_others_are_written(damaged, tmp_path, capsys):
    rows = [{"prompt": "ab"}, {"prompt": [5, BAD]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run", "--model", str(damaged), *words, "--max-tokens", "3"]) == 8
    good, bad = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert good["text"] and good["error"] is None and SAID in bad["error"]["message"]
    assert bad["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "--text", "TEXT", "--window", "32"],
        ["chat", "--max-tokens", "3"],
    ],
    ids=lambda words: words[0],
)
def test_other_commands_say_so(damaged, words, tmp_path, capsys, monkeypatch):
    (tmp_path / "text").write_text(f"a\n{BAD_TEXT}\n" * 40)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{BAD_TEXT}\n"))
    words = [str(tmp_path / "text") if word == "TEXT" else word for word in words]
    code = main([*words, "--model", str(damaged)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert code == (8 if words[0] == "chat" else 2) and SAID in said
