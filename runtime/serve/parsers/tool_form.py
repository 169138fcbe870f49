"""How a family writes calls of tools: the marks around them, and what is read between the marks.

A form is looked up by name, or by what a chat template contains (tool_forms.py). Text that does not
read as a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.runtime.text.strict_json import DECODER

Schemas = Mapping[str, Mapping[str, Any]]
"""By tool: the JSON schemas of its arguments, by argument."""


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: str
    """A JSON object."""
    id: str | None = None
    """Where the model gives calls names of their own, which its template wants to see again."""


class ToolForm:
    """One way to write calls."""

    name = ""
    begin = ""
    """Mark before calls; empty: calls are the whole answer."""
    end = ""
    """Mark behind calls; empty: they end at the next `begin` or with the answer."""
    values: Sequence[tuple[str, str]] = ()
    """Marks around values, inside which `end` is a part of the value."""
    short_ids = False
    """Whether the template takes ids of nine letters and digits only."""

    def is_in(self, template: str) -> bool:
        """Return whether a chat template shows this form."""
        return bool(self.begin) and self.begin in template

    def may_be_bare(self, text: str, schemas: Schemas) -> bool:
        """Return whether an answer so far may be calls without marks, or their beginning."""
        return False

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls that stand between the marks, none if it is something else.

        `cut`: the answer ended before its closing mark, so that a value without its end is none.
        """
        raise NotImplementedError


class EndFinder:
    """Looks through what follows a form's opening mark, as it comes, for the closing mark.

    A closing mark inside a JSON string or between the form's marks of values is not one.
    """

    def __init__(self, form: ToolForm) -> None:
        self._end = form.end or form.begin
        self._values = form.values
        self._marks = (self._end, *(begin for begin, _ in form.values))
        self._longest = max(map(len, self._marks))
        self._at = self._depth = 0
        self._in_string = False
        self._closes = ""
        """What ends the value that is open."""

    def find(self, text: str) -> int:
        """Return where the closing mark is, -1 while it has not come; `text` may have grown."""
        while self._at < len(text):
            at, sign = self._at, text[self._at]
            step = 1
            if self._closes:
                found = text.find(self._closes, at)
                if found < 0:
                    self._at = max(at, len(text) - len(self._closes) + 1)
                    return -1
                step, self._closes = found - at + len(self._closes), ""
            elif self._in_string:
                step = 2 if sign == "\\" else 1
                self._in_string = sign != '"'
            elif value := next((v for v in self._values if text.startswith(v[0], at)), None):
                step, self._closes = len(value[0]), value[1]
            elif sign == '"' and self._depth:
                self._in_string = True
            elif sign in "{}":
                self._depth = max(0, self._depth + (1 if sign == "{" else -1))
            elif text.startswith(self._end, at):
                return at
            elif len(text) - at < self._longest and any(
                mark.startswith(text[at:]) for mark in self._marks
            ):
                return -1  # the beginning of a mark, or not
            self._at += step
        return -1


def calls_in_json(text: str) -> list[Call]:
    """Return calls written as objects of `name` and `arguments` (or `parameters`), or as a list.

    Several objects may follow each other, with blanks, commas or semicolons between them.
    """
    found: list[Call] = []
    place = 0
    try:
        while blank := re.compile(r"[\s,;]*").match(text, place):
            place = blank.end()
            if place == len(text):
                return found
            data, place = DECODER.raw_decode(text, place)
            for one in data if isinstance(data, list) else [data]:
                call = _call_of(one)
                if call is None:
                    return []
                found.append(call)
    except (ValueError, RecursionError):
        pass
    return []


def _call_of(data: object) -> Call | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    return Call(
        data["name"], arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    )


def json_of(text: str) -> Any:
    """Return what a text says as JSON, or the text itself."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def typed_value(text: str, schema: object) -> Any:
    """Return an argument that was written without quotes, as its schema says it is meant.

    A text stays as it is where the schema allows texts and no other type fits; without a schema,
    or where none of its types fits, it is what JSON makes of it.
    """
    types = _types_of(schema)
    if types == {"string"}:
        return text
    bare = text.strip()
    value = _WORDS[bare] if bare in _WORDS else json_of(bare)
    if isinstance(value, str) and value == bare:
        value = text
    if "string" not in types:
        return value
    fits = any(
        isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in types & _TYPES.keys()
    )
    return value if fits else text


def _types_of(schema: object) -> set[str]:
    """Return the types that a schema allows, by the alternatives that it names."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {own} if isinstance(own, str) else {t for t in own or () if isinstance(t, str)}
    for key in ("anyOf", "oneOf"):
        several = schema.get(key)
        for one in several if isinstance(several, list) else ():
            types |= _types_of(one)
    choices = schema.get("enum")
    if not types and isinstance(choices, list):
        names = {bool: "boolean", int: "integer", float: "number", str: "string"}
        types = {names.get(type(choice), "object") for choice in choices}
    return types
