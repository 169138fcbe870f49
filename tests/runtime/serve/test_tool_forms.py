"""Calls of tools in scripted answers: whole, and cut at every place."""

from __future__ import annotations

import json

import pytest

from llmpq.runtime.serve.tools import Calls, ToolReader

pytestmark = pytest.mark.cpu
WEATHER = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
CLOCK = '{"name": "clock", "arguments": {}}'
ARGUMENTS = {"city": "Oslo", "days": 2}

SCRIPTS = [
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", None, [("weather", ARGUMENTS)]),
    ("hermes", f"I look.<tool_call>{WEATHER}</tool_call>", "I look.", [("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{CLOCK}</tool_call>", None,
     [("weather", ARGUMENTS), ("clock", {})]),
    ("hermes", f"<tool_call>{CLOCK}", None, [("clock", {})]),
    ("hermes", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}', None,
     [("weather", ARGUMENTS)]),
    ("llama3", f"<|python_tag|>{WEATHER}", None, [("weather", ARGUMENTS)]),
    ("llama3", '{"city": "Oslo"}', '{"city": "Oslo"}', []),
    ("llama3", '{"name": 5}', '{"name": 5}', []),
    ("llama3", "The sky is blue.", "The sky is blue.", []),
    ("llama3", '{"name": "cut', '{"name": "cut', []),
]  # fmt: skip


def gathered(pieces, form):
    """Return the text and the calls of an answer that comes in pieces."""
    reader, text, calls = ToolReader(Calls(form)), "", {}
    for place, piece in enumerate(pieces):
        for delta in reader.push(piece, ended=place == len(pieces) - 1):
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                told = (name + function.get("name", ""), arguments + function["arguments"])
                calls[call["index"]] = told
    assert sorted(calls) == list(range(reader.num_calls))
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize(("form", "script", "content", "calls"), SCRIPTS)
def test_scripts_read_the_same_whole_and_cut_anywhere(form, script, content, calls):
    text, found = ToolReader(Calls(form)).whole(script)
    assert text == content
    told = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found]
    assert told == calls
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in found)
    wanted = (content or "", calls)
    assert gathered([*script], form) == wanted
    for cut in range(1, len(script)):
        assert gathered([script[:cut], script[cut:]], form) == wanted


def test_a_template_shows_the_form():
    assert Calls.of("auto", "{{ '<tool_call>' }}") is Calls.HERMES
    assert Calls.of("auto", "{{ '<|python_tag|>' }}") is Calls.LLAMA3
    assert Calls.of("auto", '{"name": x, "parameters": y}') is Calls.LLAMA3
    assert Calls.of("auto", "{{ messages }}") is Calls.NONE
    assert Calls.of("llama3", "{{ '<tool_call>' }}") is Calls.LLAMA3
