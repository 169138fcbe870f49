"""Stop texts that lie across tokens: the same text, end and counts, streamed and whole."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

pytestmark = pytest.mark.cpu
CASES = [
    ("The quick brown fox", ["own fox"], "The quick br", "stop"),
    ("Mars?\n\nBob:", ["\nBob:"], "Mars?\n", "stop"),
    ("Mars?\n\nBob:", ["\n"], "Mars?", "stop"),
    ("pizza zz", ["zzz"], "pizza zz", "stop"),
    ("ab\u7d42\u308f\u308acd", ["\u7d42\u308f\u308a"], "ab", "stop"),
    ("x\U0001f600\U0001f600y", ["\U0001f600y"], "x\U0001f600", "stop"),
    ("Gr\u00fc\u00dfe an alle", ["\u00dfe a", "alle"], "Gr\u00fc", "stop"),
]


def ask(server, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def streamed(server, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the choices of all chunks, and the usage of the last."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    lines = ask(server, path, body | more).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    return [choice for chunk in chunks for choice in chunk["choices"]], chunks[-1]["usage"]


@pytest.mark.parametrize("text, stops, shown, reason", CASES)
def test_a_stop_text_across_tokens(server, text, stops, shown, reason):
    body = {"guided_choice": [text], "stop": stops, "max_tokens": 60, "temperature": 0}
    ended_at = None if shown == text else next(s for s in stops if (shown + s) in text)
    for with_stop in (False, True):
        right = shown + (ended_at or "") if with_stop else shown
        for path, prompt, text_of, delta_of in (
            ("/v1/completions", {"prompt": "hi"}, lambda c: c["text"], lambda c: c["text"]),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hi"}]},
                lambda c: c["message"]["content"],
                lambda c: c["delta"].get("content", ""),
            ),
        ):
            asked = body | prompt | {"include_stop_str_in_output": with_stop}
            whole = json.loads(ask(server, path, asked))
            choice = whole["choices"][0]
            assert (text_of(choice), choice["finish_reason"]) == (right, reason)
            assert choice["stop_reason"] == ended_at
            choices, usage = streamed(server, path, asked)
            assert "".join(map(delta_of, choices)) == right
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (reason, ended_at)
            assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_messages_end_at_letters_of_several_tokens(server):
    body = {
        "model": "demo-7m", "max_tokens": 60, "temperature": 0,
        "messages": [{"role": "user", "content": "hi"}],
        "output_config": {"format": {"type": "json_schema", "schema": {
            "const": "ab\u7d42\u308f\u308acd"}}},
        "stop_sequences": ["\u7d42\u308f\u308a"],
    }  # fmt: skip
    whole = json.loads(ask(server, "/v1/messages", body))
    assert whole["content"] == [{"type": "text", "text": '"ab'}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "\u7d42\u308f\u308a")
    lines = ask(server, "/v1/messages", body | {"stream": True}).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]
    pieces = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(pieces) == '"ab' and events[-2]["usage"]["output_tokens"] > 3
