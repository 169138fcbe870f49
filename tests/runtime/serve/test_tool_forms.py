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


SAYS = '{"name": "clock", "arguments": {"say": "%s"}}'
QUOTED = '\\\\"}</tool_call>'.replace("\\\\", "\\")
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
    # A mark inside an argument ends nothing.
    ("hermes", f"<tool_call>{SAYS % '</tool_call> and <tool_call>'}</tool_call>done", "done",
     [("clock", {"say": "</tool_call> and <tool_call>"})]),
    ("hermes", f"<tool_call>{SAYS % QUOTED}</tool_call>", None,
     [("clock", {"say": '"}</tool_call>'})]),
    ("hermes", "<tool_call>clock<arg_key>say</arg_key><arg_value></tool_call></arg_value>"
     f"</tool_call>\n<tool_call>{CLOCK}</tool_call>", None,
     [("clock", {"say": "</tool_call>"}), ("clock", {})]),
    ("mistral", f"[TOOL_CALLS][{SAYS % '[TOOL_CALLS]'}]", None,
     [("clock", {"say": "[TOOL_CALLS]"})]),
    ("mistral", '[TOOL_CALLS]clock[ARGS]{"say": "[TOOL_CALLS]a"}[TOOL_CALLS]clock[ARGS]{}', None,
     [("clock", {"say": "[TOOL_CALLS]a"}), ("clock", {})]),
    ("granite", f"<|tool_call|>[{SAYS % '<|/tool_call|>'}]<|/tool_call|>", None,
     [("clock", {"say": "<|/tool_call|>"})]),
    ("deepseek", _deepseek('clock%s{"say": "<\uff5ctool\u2581calls\u2581end\uff5c>"}'), None,
     [("clock", {"say": "<\uff5ctool\u2581calls\u2581end\uff5c>"})]),
    # An argument that is not closed hides no end.
    ("hermes", f'<tool_call>{{"name": "clock</tool_call><tool_call>{CLOCK}</tool_call>',
     '<tool_call>{"name": "clock</tool_call>', [("clock", {})]),
    # Thoughts are text, whatever stands in them.
    ("hermes", f"<think>or <tool_call>{CLOCK}</tool_call>?</think>done",
     f"<think>or <tool_call>{CLOCK}</tool_call>?</think>done", []),
    ("hermes", f"<think>a <tool_call>{CLOCK}</tool_call></think>\n<tool_call>{WEATHER}</tool_call>",
     f"<think>a <tool_call>{CLOCK}</tool_call></think>\n", [("weather", ARGUMENTS)]),
    ("hermes", f"Hm. <think>a <tool_call>{CLOCK}</tool_call>",
     f"Hm. <think>a <tool_call>{CLOCK}</tool_call>", []),
    ("hermes", f"<tool_call>{SAYS % '<think>'}</tool_call><tool_call>{CLOCK}</tool_call>", None,
     [("clock", {"say": "<think>"}), ("clock", {})]),
    ("llama3", f"<think>{CLOCK}</think>\n\n{CLOCK}", f"<think>{CLOCK}</think>", [("clock", {})]),
    ("mistral", f"[THINK][TOOL_CALLS]clock[ARGS]{{}}[/THINK][TOOL_CALLS][{CLOCK}]",
     "[THINK][TOOL_CALLS]clock[ARGS]{}[/THINK]", [("clock", {})]),
    ("granite", f"<think>[{CLOCK}]</think>no", f"<think>[{CLOCK}]</think>no", []),
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


def test_calls_begin_behind_the_thought_that_a_prompt_has_opened():
    script = f"is it <tool_call>{CLOCK}</tool_call>?</think>\n<tool_call>{WEATHER}</tool_call>"
    for cut in range(len(script)):
        reader = ToolReader(Calls.HERMES, tools=TOOLS, thinking=True)
        deltas = reader.push(script[:cut]) + reader.push(script[cut:], ended=True)
        text = "".join(delta.get("content", "") for delta in deltas)
        calls = [call["function"]["name"] for d in deltas for call in d.get("tool_calls", ())]
        assert text.strip() == script[: script.index("\n")] and calls == ["weather"]


@pytest.mark.parametrize(
    ("form", "script", "called"),
    [
        ("hermes", f"<tool_call>{WEATHER}", 1),
        ("hermes", f"<tool_call>{WEATHER[:-1]}", 0),
        ("hermes", GLM.removesuffix("</tool_call>"), 0),
        ("hermes", "<tool_call>clock", 0),
        ("hermes", f"<tool_call>{CLOCK}</tool_call><tool_call>{WEATHER[:-9]}", 1),
        ("llama3", WEATHER[:-1], 0),
        ("mistral", '[TOOL_CALLS]clock[ARGS]{"a": 1', 0),
        ("granite", f"<|tool_call|>[{WEATHER}", 0),
        ("deepseek", _deepseek(f"weather%s{GIVEN}")[:-30], 0),
        ("whole", WEATHER, 0),
        ("arguments", GIVEN, 0),
    ],
)
def test_what_the_token_limit_cuts_is_no_call(form, script, called):
    content, calls = ToolReader(Calls(form), "weather", TOOLS).whole(script, cut=True)
    assert len(calls) == called
    if form in ("whole", "arguments"):
        assert content is None
    else:
        assert called or content == script


def test_one_call_is_read_where_no_more_are_wanted():
    script = f"a<tool_call>{CLOCK}</tool_call>\n<tool_call>{WEATHER}</tool_call>"
    content, calls = ToolReader(Calls.HERMES, tools=TOOLS, one_call=True).whole(script)
    assert content == "a" and [call["function"]["name"] for call in calls] == ["clock"]


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
