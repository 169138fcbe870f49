"""Thoughts and calls in scripted answers: whole, and cut at every place."""

from __future__ import annotations

import json

import pytest

from llmpq.runtime.serve.parsers.forced import ForcedReader
from llmpq.runtime.serve.parsers.harmony import HARMONY
from llmpq.runtime.serve.parsers.parts import Parts
from llmpq.runtime.serve.parsers.reading import AnswerForm
from llmpq.runtime.serve.parsers.tool_form import typed_value
from llmpq.runtime.serve.parsers.tool_forms import ALIASES, FORMS, NAMES, tool_form
from llmpq.runtime.text.thinking import MARKS, thinking_marks

pytestmark = pytest.mark.cpu
WEATHER = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
CLOCK = '{"name": "clock", "arguments": {}}'
ARGUMENTS = {"city": "Oslo", "days": 2}
GIVEN = '{"city": "Oslo", "days": 2}'
BOTH = [("weather", ARGUMENTS), ("clock", {})]
FIRST = BOTH[:1]
TOOLS = [
    {
        "name": "weather",
        "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
    {"name": "clock"},
]
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
CODER_CLOCK = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
INVOKE = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n'
    '<invoke name="clock">\n</invoke>\n</minimax:tool_call>'
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{GIVEN}<|tool_call_end|><|tool_call_begin|>functions.clock:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
GEMMA = (
    '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'
    "<|tool_call>call:clock{}<tool_call|>"
)
DSML = "\uff5cDSML\uff5c"


def dsml(text):
    """Return tags with DeepSeek's prefix."""
    return text.replace("</", f"</{DSML}").replace("<i", f"<{DSML}i").replace("<p", f"<{DSML}p")


V32 = f"<{DSML}function_calls>" + dsml(
    '<invoke name="weather">\n<parameter name="city" string="true">Oslo</parameter>\n'
    '<parameter name="days" string="false">2</parameter>\n</invoke>\n'
    '<invoke name="clock">\n</invoke>\n</function_calls>'
)


def deepseek(*calls):
    """Return calls between DeepSeek's marks, which have characters of their own."""

    def mark(words):
        return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"

    marked = "".join(
        mark("tool call begin") + call.replace("%s", mark("tool sep")) + mark("tool call end")
        for call in calls
    )
    return mark("tool calls begin") + marked + mark("tool calls end")


def channel(name, text, end="<|end|>", to=""):
    """Return one of Harmony's messages."""
    head = f"<|channel|>{name}{to and f' to=functions.{to} <|constrain|>json'}"
    return f"{head}<|message|>{text}{end}"


SAYS = '{"name": "clock", "arguments": {"say": "%s"}}'
QUOTED = '\\"}</tool_call>'
# Form, script, thought, text, calls.
SCRIPTS = [
    ("hermes", "Just text.", "", "Just text.", []),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", "", FIRST),
    ("hermes", f"I look.<tool_call>{WEATHER}</tool_call>", "", "I look.", FIRST),
    ("hermes", f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{CLOCK}</tool_call>", "", "", BOTH),
    ("hermes", f"<tool_call>{CLOCK}", "", "", [("clock", {})]),
    ("hermes", "<tool_call>no call</tool_call>", "", "<tool_call>no call</tool_call>", []),
    ("hermes", "a < b and <tool", "", "a < b and <tool", []),
    ("hermes", "\n\n  a", "", "\n\n  a", []),
    ("hermes", " \n", "", " \n", []),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}', "", "", FIRST),
    ("llama3", f"<|python_tag|>{WEATHER}; {CLOCK}", "", "", BOTH),
    ("llama3", '{"city": "Oslo"}', "", '{"city": "Oslo"}', []),
    ("llama3", '{"name": 5}', "", '{"name": 5}', []),
    ("llama3", "The sky is blue.", "", "The sky is blue.", []),
    ("llama3", 'Say {"name": "clock"}', "", 'Say {"name": "clock"}', []),
    ("llama3", '{"name": "cut', "", '{"name": "cut', []),
    ("glm", f"{GLM}\n<tool_call>clock</tool_call>", "", "", BOTH),
    ("glm", "<tool_call>other</tool_call>", "", "<tool_call>other</tool_call>", []),
    ("qwen3_coder", f"I look.\n{CODER}\n{CODER_CLOCK}", "", "I look.\n", BOTH),
    ("qwen3_coder", CODER.replace("\n", ""), "", "", FIRST),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n"), "", "", FIRST),
    # A parameter that is not closed ends where the next one begins.
    ("qwen3_coder", CODER.replace("Oslo\n</parameter>", "Oslo"), "", "", FIRST),
    ("qwen3_coder", "<tool_call>\n<function=clock>\n<parameter=say>\n</tool_call> <parameter=x>"
     "\n</parameter>\n</function>\n</tool_call>done", "", "done",
     [("clock", {"say": "</tool_call> <parameter=x>"})]),
    ("qwen3_coder", "<function call> is text", "", "<function call> is text", []),
    ("seed_oss", CODER.replace("tool_call", "seed:tool_call"), "", "", FIRST),
    ("minimax", f"<think>Hm.</think>\n\n{INVOKE}", "Hm.", "", BOTH),
    ("minimax", INVOKE.replace("Oslo", "</minimax:tool_call>"), "", "",
     [("weather", {"city": "</minimax:tool_call>", "days": 2}), ("clock", {})]),
    ("deepseek_v32", f"Wait.\n\n{V32}", "", "Wait.\n\n", BOTH),
    ("deepseek_v4", V32.replace("function_calls", "tool_calls"), "", "", BOTH),
    ("kimi_k2", f"I look.{KIMI}", "", "I look.", BOTH),
    ("gemma", GEMMA, "", "", BOTH),
    ("gemma", '<|tool_call>call:clock{a:[1,{b:<|"|>"}<tool_call|>{<|"|>}],c:null}<tool_call|>', "",
     "", [("clock", {"a": [1, {"b": '"}<tool_call|>{'}], "c": None})]),
    ("gemma", "<|tool_call>call:clock{a:}<tool_call|>", "",
     "<|tool_call>call:clock{a:}<tool_call|>", []),
    ("functiongemma", GEMMA.replace('<|"|>', "<escape>").replace("<|tool_call>",
     "<start_function_call>").replace("<tool_call|>", "<end_function_call>"), "", "", BOTH),
    ("pythonic", '[weather(city="Oslo", days=2), clock()]', "", "", BOTH),
    ("pythonic", "<|python_start|>[clock(say=[true, {'a': None}, -1.5])]<|python_end|>", "", "",
     [("clock", {"say": [True, {"a": None}, -1.5]})]),
    ("pythonic", "[1] is a source", "", "[1] is a source", []),
    ("pythonic", "[clock(open('x'))]", "", "[clock(open('x'))]", []),
    ("pythonic", "[clock(say=open('x'))]", "", "[clock(say=open('x'))]", []),
    ("olmo3", '<function_calls>weather(city="Oslo", days=2)\nclock()</function_calls>', "", "",
     BOTH),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {CLOCK}]", "", "", BOTH),
    ("mistral", f"I look.[TOOL_CALLS][{WEATHER}]", "", "I look.", FIRST),
    ("mistral", f"[{WEATHER}]", "", "", FIRST),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{GIVEN}[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{{}}",
     "", "", BOTH),
    ("mistral", f"weather{GIVEN}clock{{}}", "", "", BOTH),
    ("mistral", "weather is nice", "", "weather is nice", []),
    ("mistral", "[1] is a source", "", "[1] is a source", []),
    ("mistral", "[TOOL_CALLS] nothing", "", "[TOOL_CALLS] nothing", []),
    ("granite", f"<|tool_call|>[{WEATHER}]<|/tool_call|>", "", "", FIRST),
    ("granite", f"<|tool_call|>[{WEATHER}, {CLOCK}]", "", "", BOTH),
    ("granite", f"[{CLOCK}]", "", "", [("clock", {})]),
    ("granite", "clock{} is text", "", "clock{} is text", []),
    ("deepseek", deepseek(f"function%sweather\n```json\n{GIVEN}\n```", "function%sclock\n{}"), "",
     "", BOTH),
    ("deepseek", "Wait." + deepseek(f"weather%s{GIVEN}"), "", "Wait.", FIRST),
    ("deepseek", deepseek("weather%sno JSON"), "", deepseek("weather%sno JSON"), []),
    # A mark inside an argument ends nothing.
    ("hermes", f"<tool_call>{SAYS % '</tool_call> and <tool_call>'}</tool_call>done", "", "done",
     [("clock", {"say": "</tool_call> and <tool_call>"})]),
    ("hermes", f"<tool_call>{SAYS % QUOTED}</tool_call>", "", "",
     [("clock", {"say": '"}</tool_call>'})]),
    ("glm", "<tool_call>clock<arg_key>say</arg_key><arg_value></tool_call></arg_value>"
     "</tool_call>\n<tool_call>clock</tool_call>", "", "",
     [("clock", {"say": "</tool_call>"}), ("clock", {})]),
    ("mistral", f"[TOOL_CALLS][{SAYS % '[TOOL_CALLS]'}]", "", "",
     [("clock", {"say": "[TOOL_CALLS]"})]),
    ("mistral", '[TOOL_CALLS]clock[ARGS]{"say": "[TOOL_CALLS]a"}[TOOL_CALLS]clock[ARGS]{}', "", "",
     [("clock", {"say": "[TOOL_CALLS]a"}), ("clock", {})]),
    ("granite", f"<|tool_call|>[{SAYS % '<|/tool_call|>'}]<|/tool_call|>", "", "",
     [("clock", {"say": "<|/tool_call|>"})]),
    ("deepseek", deepseek('clock%s{"say": "<\uff5ctool\u2581calls\u2581end\uff5c>"}'), "", "",
     [("clock", {"say": "<\uff5ctool\u2581calls\u2581end\uff5c>"})]),
    # An argument that is not closed hides no end.
    ("hermes", f'<tool_call>{{"name": "clock</tool_call><tool_call>{CLOCK}</tool_call>', "",
     '<tool_call>{"name": "clock</tool_call>', [("clock", {})]),
    # Thoughts, whatever stands in them; blanks around them are left out.
    ("hermes", f"<think>\nor <tool_call>{CLOCK}</tool_call>?\n</think>\n\ndone",
     f"or <tool_call>{CLOCK}</tool_call>?", "done", []),
    ("hermes", f"\n<think>a <tool_call>{CLOCK}</tool_call></think>\n<tool_call>{WEATHER}"
     "</tool_call>", f"a <tool_call>{CLOCK}</tool_call>", "", FIRST),
    ("hermes", f"Hm. <think>a <tool_call>{CLOCK}</tool_call>",
     f"a <tool_call>{CLOCK}</tool_call>", "Hm. ", []),
    ("hermes", f"<tool_call>{SAYS % '<think>'}</tool_call><tool_call>{CLOCK}</tool_call>", "", "",
     [("clock", {"say": "<think>"}), ("clock", {})]),
    ("hermes", "<think>a <b> </thin <think> c</think>d", "a <b> </thin <think> c", "d", []),
    ("hermes", "<think>\n\n</think>\n\nd", "", "d", []),
    ("hermes", "<think>cut within", "cut within", "", []),
    ("llama3", f"<think>{CLOCK}</think>\n\n{CLOCK}", CLOCK, "", [("clock", {})]),
    ("mistral", f"[THINK][TOOL_CALLS]clock[ARGS]{{}}[/THINK][TOOL_CALLS][{CLOCK}]",
     "[TOOL_CALLS]clock[ARGS]{}", "", [("clock", {})]),
    ("granite", f"<think>[{CLOCK}]</think>no", f"[{CLOCK}]", "no", []),
    ("gemma", f"<|channel>thought\nHm.\n<channel|>{GEMMA}", "Hm.", "", BOTH),
    ("seed_oss", "<seed:think>Hm. <think></seed:think>a", "Hm. <think>", "a", []),
    (HARMONY, channel("final", "Hi <b>.", ""), "", "Hi <b>.", []),
    (HARMONY, channel("analysis", "Hm.") + "<|start|>assistant" + channel("final", "Hi.", ""),
     "Hm.", "Hi.", []),
    (HARMONY, channel("analysis", "Hm.") + "<|start|>assistant"
     + channel("commentary", GIVEN, "", "weather"), "Hm.", "", FIRST),
    (HARMONY, channel("commentary", "I look.") + "<|start|>assistant to=functions.weather"
     f"<|channel|>commentary json<|message|>{GIVEN}<|call|><|start|>assistant"
     + channel("commentary", "{}", "<|call|>", "clock"), "", "I look.", BOTH),
    (HARMONY, channel("commentary", "no JSON", "<|call|>", "clock"), "", "no JSON", []),
    (HARMONY, "plain text", "", "plain text", []),
    (HARMONY, channel("analysis", "<tool_call> cut", ""), "<tool_call> cut", "", []),
]  # fmt: skip
THINKS = {"mistral": "mistral", "gemma": "gemma", "seed_oss": "seed_oss"}


def form_of(name, thinking="auto"):
    """Return a form by name, with the marks of thoughts that go with it."""
    marks = THINKS.get(name, "think") if thinking == "auto" else thinking
    return AnswerForm.of("", lambda text: False, tool_parser=name, reasoning_parser=marks)


def read(form, *pieces, cut=False, tools=TOOLS, **more):
    """Return what is read of an answer that comes in pieces: thought, text, calls."""
    reader, thought, text, calls = form.reader(tools=tools, **more), "", "", []
    for place, piece in enumerate(pieces):
        ended = place == len(pieces) - 1
        for delta in reader.push(piece, ended=ended, cut=ended and cut):
            assert len(delta) == 1 and all(delta.values()), "empty deltas say nothing"
            thought += delta.get("reasoning_content", "")
            text += delta.get("content", "")
            calls += delta.get("tool_calls", ())
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert all(call["type"] == "function" for call in calls)
    named = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    return thought, text, named, [call["id"] for call in calls]


@pytest.mark.parametrize(("name", "script", "thought", "text", "calls"), SCRIPTS)
def test_scripts_read_the_same_whole_and_cut_anywhere(name, script, thought, text, calls):
    form = form_of(name)
    *found, ids = read(form, script)
    assert found == [thought, text, calls]
    if name == "kimi_k2":  # its template wants the model's own
        assert ids == ["functions.weather:0", "functions.clock:1"]
    else:
        length = 9 if name == "mistral" else 29  # Mistral's templates take no other
        assert {len(own) for own in ids} <= {length} and len(set(ids)) == len(ids)
    assert read(form, *script)[:3] == (thought, text, calls)
    for cut in range(1, len(script)):
        assert read(form, script[:cut], script[cut:])[:3] == (thought, text, calls)


@pytest.mark.parametrize("word", ["NaN", "-Infinity"])
@pytest.mark.parametrize(("name", "script"), [row[:2] for row in SCRIPTS if "2" in row[1]])
def test_arguments_are_json_whatever_stands_for_a_number(name, script, word):
    _, _, calls, _ = read(form_of(name), script.replace("2", word))
    assert json.dumps(calls, allow_nan=False)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "gemma", HARMONY])
def test_without_tools_nothing_is_a_call(name):
    for _, script, thought, text, calls in (row for row in SCRIPTS if row[0] == name):
        found = read(form_of(name), *script, tools=[])
        assert found[2] == [] and (calls or found[:2] == (thought, text))


def test_thoughts_stay_in_the_text_where_they_are_not_told_apart():
    script = f"<think>a <tool_call>{CLOCK}</tool_call></think>\n<tool_call>{WEATHER}</tool_call>"
    text = script[: script.index("\n")]
    form = form_of("hermes")
    for cut in range(len(script)):
        found = read(form, script[:cut], script[cut:], separate=False)
        assert (found[0], found[1].strip(), found[2]) == ("", text, FIRST)


@pytest.mark.parametrize("reasoning_parser", ["auto", None])
def test_no_call_is_read_inside_a_thought_of_a_model_that_shows_no_marks(reasoning_parser):
    form = AnswerForm.of(
        "<tool_call>", lambda text: False, tool_parser="hermes", reasoning_parser=reasoning_parser
    )
    thought = f"<think>a <tool_call>{CLOCK}</tool_call></think>"
    script = f"{thought} b <tool_call>{WEATHER}</tool_call>"
    for cut in range(len(script)):
        assert read(form, script[:cut], script[cut:])[:3] == ("", f"{thought} b ", FIRST)
    for text in (thought, thought.removesuffix("</think>"), "the tag <think> alone"):
        assert read(form, text)[:3] == ("", text, [])
        assert read(form, text, tools=[])[:3] == ("", text, [])
    assert read(form, f"<tool_call>{WEATHER}</tool_call> <think>")[:3] == ("", "<think>", FIRST)


def test_a_prompt_may_have_opened_the_thought():
    form = form_of("hermes")
    assert form.opens_thought("<|im_start|>assistant\n<think>\n")
    assert not form.opens_thought("<think>\n\n</think>\n\n")
    assert not AnswerForm().opens_thought("<think>")
    script = f"is it <tool_call>{CLOCK}</tool_call>?\n</think>\n<tool_call>{WEATHER}</tool_call>"
    for cut in range(len(script)):
        found = read(form, script[:cut], script[cut:], in_thought=True)
        assert found[:3] == (f"is it <tool_call>{CLOCK}</tool_call>?", "", FIRST)


@pytest.mark.parametrize(
    ("name", "script", "called"),
    [
        ("hermes", f"<tool_call>{WEATHER}", 1),
        ("hermes", f"<tool_call>{WEATHER[:-1]}", 0),
        ("glm", GLM.removesuffix("</tool_call>"), 0),
        ("glm", "<tool_call>clock", 0),
        ("qwen3_coder", CODER.partition("</function>")[0], 0),
        ("qwen3_coder", CODER.removesuffix("</tool_call>"), 1),
        ("minimax", INVOKE[:-30], 0),
        ("deepseek_v32", V32[:-30], 0),
        ("kimi_k2", KIMI[:-70], 0),
        ("gemma", GEMMA[:-15], 1),
        ("gemma", '<|tool_call>call:weather{city:<|"|>Os', 0),
        ("pythonic", '[weather(city="Os', 0),
        ("olmo3", '<function_calls>weather(city="Os', 0),
        (HARMONY, channel("commentary", GIVEN, "", "weather"), 0),
        ("hermes", f"<tool_call>{CLOCK}</tool_call><tool_call>{WEATHER[:-9]}", 1),
        ("llama3", WEATHER[:-1], 0),
        ("mistral", '[TOOL_CALLS]clock[ARGS]{"a": 1', 0),
        ("granite", f"<|tool_call|>[{WEATHER}", 0),
        ("deepseek", deepseek(f"weather%s{GIVEN}")[:-30], 0),
    ],
)
def test_what_the_token_limit_cuts_is_no_call(name, script, called):
    _, text, calls, _ = read(form_of(name), script, cut=True)
    assert len(calls) == called
    assert called or text == ("" if name == HARMONY else script)
    for cut in range(1, len(script)):
        assert len(read(form_of(name), script[:cut], script[cut:], cut=True)[2]) == called


def test_a_forced_call_comes_at_its_end_or_not_at_all():
    for name, script in (("weather", GIVEN), ("", WEATHER)):
        for cut in range(len(script)):
            reader = ForcedReader(Parts(), name)
            assert reader.push(script[:cut]) == []
            (delta,) = reader.push(script[cut:], ended=True)
            function = delta["tool_calls"][0]["function"]
            assert (function["name"], json.loads(function["arguments"])) == FIRST[0]
            reader = ForcedReader(Parts(), name)
            assert reader.push(script[:cut]) == reader.push("", ended=True, cut=True) == []


def test_one_call_is_read_where_no_more_are_wanted():
    script = f"a<tool_call>{CLOCK}</tool_call>\n<tool_call>{WEATHER}</tool_call>"
    assert read(form_of("hermes"), script, one_call=True)[1:3] == ("a", [("clock", {})])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "string"}, "7"),
        ("7", {"type": "integer"}, 7),
        ("7", {}, 7),
        ("seven", {"type": "integer"}, "seven"),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": ["boolean", "null"]}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("7", {"type": ["string", "null"]}, "7"),
        ("[1, 2]", {"anyOf": [{"type": "array"}, {"type": "string"}]}, [1, 2]),
        ("a\n", {"anyOf": [{"type": "array"}, {"type": "string"}]}, "a\n"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        (" text ", None, " text "),
    ],
)
def test_a_bare_value_is_what_its_schema_says(text, schema, value):
    assert typed_value(text, schema) == value


def test_a_template_shows_the_form():
    shown = {
        "{{ '<tool_call>' }}": "hermes",
        "{{ '<tool_call>\n<function=' }}": "qwen3_coder",
        "{{ '<tool_call>' ~ '<arg_key>' }}": "glm",
        "{{ '<|python_tag|>' }}": "llama3",
        '{"name": x, "parameters": y}': "llama3",
        "{{ '[TOOL_CALLS]' }}": "mistral",
        "{{ '<|tool_call|>' }}": "granite",
        "{{ '<|tool_call>call:' }}": "gemma",
        "{{ '<minimax:tool_call>' }}": "minimax",
        "{{ '<|tool_calls_section_begin|>' }}": "kimi_k2",
        "{{ '<seed:tool_call><function=' }}": "seed_oss",
        "{{ '<function_calls>' }}": "olmo3",
        "{{ '<|python_start|>' }}": "pythonic",
        deepseek("x"): "deepseek",
        V32: "deepseek_v32",
    }
    for template, name in shown.items():
        assert tool_form("auto", template) is FORMS[name]
    assert tool_form("auto", "{{ messages }}") is None
    assert tool_form("llama3", "{{ '<tool_call>' }}") is FORMS["llama3"]
    assert AnswerForm.of("<|channel|>x<|message|>", lambda text: False).harmony
    assert {*ALIASES.values()} <= {*NAMES}


def test_marks_of_thoughts_are_found_in_template_or_tokenizer():
    def no_token(text):
        return False

    assert thinking_marks("auto", "{% if '</think>' in content %}", no_token) is MARKS["think"]
    assert thinking_marks("auto", "{{ '[THINK]' }}", no_token) is MARKS["mistral"]
    assert thinking_marks("auto", "{{ x }}", lambda text: text == "</think>") is MARKS["think"]
    assert thinking_marks("auto", "{{ x }}", no_token) is None
    assert thinking_marks("gemma", "<think>", no_token) is MARKS["gemma"]
