"""A guide of a model that thinks: the thought comes first, what the text must be stands behind."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


def thinker_of(folder: Path, demo_model: Path, template: str) -> Path:
    """Write a random model whose tokenizer has marks of thoughts as tokens."""
    import tokenizers
    import torch
    import transformers

    known = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    known.add_tokens(["<think>", "</think>", "[THINK]", "[/THINK]"])
    known.save(str(folder / "tokenizer.json"))
    reply = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(reply))
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=known.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def thinker(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker_of(tmp_path_factory.mktemp("thinker"), demo_model, TEMPLATE)


@pytest.fixture(scope="module")
def server(thinker: Path, running: Any) -> Any:
    from llmpq import LLM

    with running(lambda: LLM(thinker, dtype="float32")) as made:
        yield made


def answer(server: Any, path: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60}
    body |= {"seed": 1} if "chat" in path else {"model": "gpt-test"}
    body |= more
    request = urllib.request.Request(
        f"{server.url}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return dict(json.load(reply))


def test_a_guide_waits_for_the_end_of_a_thought(server: Any) -> None:
    reply = answer(server, response_format=FORMAT, thinking_token_budget=6)
    (choice,), used = reply["choices"], reply["usage"]
    assert json.loads(choice["message"]["content"])["a"] in (True, False)
    assert choice["message"]["reasoning_content"] and choice["finish_reason"] == "stop"
    spent = used["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < spent <= 7 < used["completion_tokens"]


def test_a_forced_call_stands_behind_a_thought(server: Any) -> None:
    reply = answer(server, tools=TOOLS, tool_choice="required", thinking_token_budget=6)
    (choice,) = reply["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"a"}
    assert choice["message"]["reasoning_content"] and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "more",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"separate_reasoning": False}],
)
def test_without_a_thought_of_its_own_the_text_is_guided_at_once(server: Any, more: Any) -> None:
    """Where thinking is off, and where thoughts would be part of the text."""
    (choice,) = answer(server, response_format=FORMAT, **more)["choices"]
    assert json.loads(choice["message"]["content"])["a"] in (True, False)
    assert "reasoning_content" not in choice["message"]


def test_a_thought_may_take_all_tokens(server: Any) -> None:
    reply = answer(server, response_format=FORMAT, max_tokens=20)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 20


def test_limits_of_thoughts_are_of_the_template_in_use(
    demo_model: Path, tmp_path: Path, running: Any
) -> None:
    """The model's own template has other marks than the one that the server is given."""
    from llmpq import LLM

    model = thinker_of(tmp_path, demo_model, TEMPLATE.replace("think>", "THINK]").replace("<", "["))
    assert "[/THINK]" in (model / "tokenizer_config.json").read_text()
    with running(lambda: LLM(model, dtype="float32"), chat_template=TEMPLATE) as server:
        reply = answer(server, response_format=FORMAT, thinking_token_budget=6)
        (choice,), used = reply["choices"], reply["usage"]
        assert json.loads(choice["message"]["content"])["a"] in (True, False)
        assert 0 < used["completion_tokens_details"]["reasoning_tokens"] <= 7
        thinking = {"type": "enabled", "budget_tokens": 6}
        reply = answer(server, "/v1/messages", thinking=thinking, max_tokens=40, temperature=0)
        assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
        assert reply["content"][1]["text"]
