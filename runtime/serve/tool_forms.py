"""How families write calls of tools, and what is read of it: names and arguments.

    hermes (Qwen)     <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...
    hermes (GLM)      <tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ... </tool_call>
    llama3            {"name": ..., "parameters": {...}}, alone, maybe behind <|python_tag|>
    mistral           [TOOL_CALLS][{...}, {...}], or [TOOL_CALLS]name[ARGS]{...} ...
    granite (Phi-4)   <|tool_call|>[{...}, {...}]<|/tool_call|>, the end may be missing
    deepseek          <T calls begin><T call begin>name<T sep>{...}<T call end> ... <T calls end>

Marks of mistral and granite are special tokens of some tokenizers, so that an answer's text may
lack them. What does not read as a call stays text, and so does what stands inside a thought.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

Call = tuple[str, str]
"""A tool's name, and its arguments as JSON."""
Schemas = Mapping[str, Mapping[str, Any]]
"""Of each tool: the schemas of its arguments."""
TAG = "<|python_tag|>"
_BAR, _GAP = "\uff5c", "\u2581"


def _deepseek(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _GAP)}{_BAR}>"


_DEEPSEEK = re.compile(
    rf"{_deepseek('tool call begin')}(?:function{_deepseek('tool sep')})?(?P<name>[^\n<]+?)"
    rf"(?:{_deepseek('tool sep')}|\n)\s*(?:```json)?(?P<arguments>.*?)(?:```)?\s*"
    rf"{_deepseek('tool call end')}",
    re.DOTALL,
)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


class Calls(Enum):
    """How calls stand in an answer."""

    NONE = "none"
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    GRANITE = "granite"
    DEEPSEEK = "deepseek"
    WHOLE = "whole"
    """The answer is one call: name and arguments."""
    ARGUMENTS = "arguments"
    """The answer is the arguments of a tool that is known."""

    @classmethod
    def of(cls, wanted: str, template: str) -> Calls:
        """Return the form that was asked for, or that a model's template shows."""
        if wanted != "auto":
            return cls(wanted)
        for form, (opened, _) in MARKS.items():
            if opened in template:
                return form
        return cls.LLAMA3 if TAG in template or '"parameters"' in template else cls.NONE


MARKS: Mapping[Calls, tuple[str, str]] = {
    Calls.HERMES: ("<tool_call>", "</tool_call>"),
    Calls.MISTRAL: ("[TOOL_CALLS]", ""),
    Calls.GRANITE: ("<|tool_call|>", "<|/tool_call|>"),
    Calls.DEEPSEEK: (_deepseek("tool calls begin"), _deepseek("tool calls end")),
}
"""What is before and behind calls; nothing is behind Mistral's, which go to the answer's end."""
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
"""What is before and behind what a model says to itself."""
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class Inside:
    """Looks through what follows a call's mark, as it comes, for the mark that ends it.

    One inside a JSON string or a value of GLM's belongs to an argument.
    """

    def __init__(self, end: str) -> None:
        self._end = end
        self._at = self._depth = 0
        self._in_string = self._in_value = False

    def find_end(self, text: str) -> int:
        """Return where the ending mark is; -1 while it has not come. `text` may have grown."""
        while self._at < len(text):
            at, sign = self._at, text[self._at]
            step = 1
            if self._in_value:
                at = text.find(_VALUE_END, at)
                if at < 0:
                    self._at = max(self._at, len(text) - len(_VALUE_END) + 1)
                    return -1
                self._in_value, step = False, at - self._at + len(_VALUE_END)
            elif self._in_string:
                step = 2 if sign == "\\" else 1
                self._in_string = sign != '"'
            elif sign == '"' and self._depth:
                self._in_string = True
            elif sign in "{}":
                self._depth = max(0, self._depth + (1 if sign == "{" else -1))
            elif text.startswith(self._end, at):
                return at
            elif text.startswith(_VALUE, at):
                self._in_value, step = True, len(_VALUE)
            elif self._end.startswith(text[at:]) or _VALUE.startswith(text[at:]):
                return -1  # the beginning of one of them, or not
            self._at += step
        return -1


def read_calls(text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
    """Return the calls that a text is; none if it is something else.

    `cut`: it may lack its end, so that values without one are none.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        found = [*_marked(text), *([] if cut else _pairs(text, schemas))]
        return found or _named(text)
    several = data if isinstance(data, list) else [data]
    calls = [call for call in map(_of_json, several) if call is not None]
    return calls if len(calls) == len(several) else []


def may_be_bare(text: str, form: Calls, schemas: Schemas) -> bool:
    """Whether an answer so far may be calls whose mark its text lacks, or their beginning."""
    start = text.lstrip()
    if form in (Calls.LLAMA3, Calls.WHOLE):
        return not start or start.startswith("{") or TAG.startswith(start[: len(TAG)])
    if form not in (Calls.MISTRAL, Calls.GRANITE):
        return False
    if MARKS[form][0].startswith(start) or re.match(r"\[\s*(\{|$)", start):
        return True
    return form is Calls.MISTRAL and any(
        name.startswith(start) or re.match(re.escape(name) + r"\s*(\[|\{|$)", start)
        for name in schemas
    )


def _of_json(data: object) -> Call | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    return data["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)


def _marked(text: str) -> Iterator[Call]:
    """Yield DeepSeek's calls."""
    for found in _DEEPSEEK.finditer(text):
        arguments = _json_of(found["arguments"].strip())
        if isinstance(arguments, dict):
            yield found["name"].strip(), json.dumps(arguments)


def _pairs(text: str, schemas: Schemas) -> Iterator[Call]:
    """Yield GLM's call: a value is JSON, unless its schema says that it is a text."""
    name, _, _ = text.strip().partition("<arg_key>")
    name = name.strip()
    if name and "\n" not in name and (_PAIR.search(text) or name in schemas):
        own, told = schemas.get(name, {}), {}
        for key, value in _PAIR.findall(text):
            schema = own.get(key.strip())
            is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
            told[key.strip()] = value if is_text else _json_of(value)
        yield name, json.dumps(told)


def _named(text: str) -> list[Call]:
    """Return Mistral's calls: names, each before its arguments."""
    calls, place = [], 0
    while text[place:].strip():
        found = _NAMED.match(text, place)
        if found is None:
            return []
        try:
            arguments, place = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            return []
        calls.append((found[1], json.dumps(arguments)))
    return calls


def _json_of(text: str) -> Any:
    """Return what a text says as JSON, itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
