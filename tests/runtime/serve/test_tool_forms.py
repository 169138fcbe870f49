"""Calls of tools in scripted answers: whole, and cut at every place."""

from __future__ import annotations

import json

import pytest

from llmpq.runtime.serve.tool_forms import Calls
from llmpq.runtime.serve.tools import ToolReader

pytestmark = pytest.mark.cpu
WEATHER = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
CLOCK = '{"name": "clock", "arguments": {}}'
ARGUMENTS = {"city": "Oslo", "days": 2}
GIVEN = '{"city": "Oslo", "days": 2}'
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
TOOLS = [{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
         {"name": "clock"}]  # fmt: skip


def _deepseek(*calls):
    """Return calls between DeepSeek's marks, which have characters of their own."""

    def mark(words):
        return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"

    told = "".join(
        mark("tool call begin") + call.replace("%s", mark("tool sep")) + mark("tool call end")
        for call in calls
    )
    return mark("tool calls begin") + told + mark("tool calls end")


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
    ("llama3", 'Say {"name": "clock"}', 'Say {"name": "clock"}', []),
    ("hermes", f"{GLM}\n<tool_call>clock</tool_call>", None,
     [("weather", ARGUMENTS), ("clock", {})]),
    ("hermes", "<tool_call>other</tool_call>", "<tool_call>other</tool_call>", []),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {CLOCK}]", None,
     [("weather", ARGUMENTS), ("clock", {})]),
    ("mistral", f"I look.[TOOL_CALLS][{WEATHER}]", "I look.", [("weather", ARGUMENTS)]),
    ("mistral", f"[{WEATHER}]", None, [("weather", ARGUMENTS)]),
    ("mistral", f'[TOOL_CALLS]weather[ARGS]{GIVEN}[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{{}}',
     None, [("weather", ARGUMENTS), ("clock", {})]),
    ("mistral", f"weather{GIVEN}clock{{}}", None, [("weather", ARGUMENTS), ("clock", {})]),
    ("mistral", "weather is nice", "weather is nice", []),
    ("mistral", "[1] is a source", "[1] is a source", []),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    ("granite", f"<|tool_call|>[{WEATHER}]<|/tool_call|>", None, [("weather", ARGUMENTS)]),
    ("granite", f"<|tool_call|>[{WEATHER}, {CLOCK}]", None,
     [("weather", ARGUMENTS), ("clock", {})]),
    ("granite", f"[{CLOCK}]", None, [("clock", {})]),
    ("granite", "clock{} is text", "clock{} is text", []),
    ("deepseek", _deepseek(f"function%sweather\n```json\n{GIVEN}\n```", "function%sclock\n{}"),
     None, [("weather", ARGUMENTS), ("clock", {})]),
    ("deepseek", "Wait." + _deepseek(f"weather%s{GIVEN}"), "Wait.", [("weather", ARGUMENTS)]),
    ("deepseek", _deepseek("weather%sno JSON"), _deepseek("weather%sno JSON"), []),
    ("llama3", '{"name": "cut', '{"name": "cut', []),
]  # fmt: skip


def gathered(pieces, form):
    """Return the text and the calls of an answer that comes in pieces."""
    reader, text, calls = ToolReader(Calls(form), tools=TOOLS), "", {}
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
    text, found = ToolReader(Calls(form), tools=TOOLS).whole(script)
    assert text == content
    told = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found]
    assert told == calls
    assert all(call["type"] == "function" for call in found)
    length = 9 if form == "mistral" else 29  # Mistral's templates take no other
    assert {len(call["id"]) for call in found} <= {length}
    wanted = (content or "", calls)
    assert gathered([*script], form) == wanted
    for cut in range(1, len(script)):
        assert gathered([script[:cut], script[cut:]], form) == wanted


def test_a_text_of_digits_stays_one_where_the_schema_says_so():
    script = "<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>"
    (call,) = ToolReader(Calls.HERMES, tools=TOOLS).whole(script)[1]
    assert json.loads(call["function"]["arguments"]) == {"city": "7"}


def test_a_template_shows_the_form():
    assert Calls.of("auto", "{{ '<tool_call>' }}") is Calls.HERMES
    assert Calls.of("auto", "{{ '<|python_tag|>' }}") is Calls.LLAMA3
    assert Calls.of("auto", '{"name": x, "parameters": y}') is Calls.LLAMA3
    assert Calls.of("auto", "{{ messages }}") is Calls.NONE
    assert Calls.of("auto", "{{ '[TOOL_CALLS]' }}") is Calls.MISTRAL
    assert Calls.of("auto", "{{ '<|tool_call|>' }}") is Calls.GRANITE
    assert Calls.of("auto", _deepseek("x")) is Calls.DEEPSEEK
    assert Calls.of("llama3", "{{ '<tool_call>' }}") is Calls.LLAMA3
