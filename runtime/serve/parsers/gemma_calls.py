"""Gemma 4, and FunctionGemma: <|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>."""

from __future__ import annotations

import json
import re
from typing import Any

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm
from llmpq.runtime.text.strict_json import DECODER

_NAME = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([\w.$-]+)\s*:")
_BARE = re.compile(r"[^,{}\[\]]+")
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class Gemma(ToolForm):
    """Keys without quotes; texts between quotes that are tokens, as they are."""

    name = "gemma"
    begin, end = "<|tool_call>", "<tool_call|>"
    quote = '<|"|>'
    values = ((quote, quote),)

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls between the marks."""
        calls, place = [], 0
        while text[place:].strip(" \n,"):
            found = _NAME.match(text, place)
            if found is None:
                return []
            try:
                arguments, place = self._value(text, found.end())
            except (ValueError, RecursionError, IndexError):
                return []
            calls.append(Call(found[1], json.dumps(arguments)))
        return calls

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        """Return the value that begins at a place, and where it ends."""
        at = _past(text, at, " \n\t")
        if text.startswith(self.quote, at):
            begin = at + len(self.quote)
            end = text.index(self.quote, begin)
            return text[begin:end], end + len(self.quote)
        if text[at] == '"':
            return json.JSONDecoder().raw_decode(text, at)
        if text[at] == "{":
            return self._mapping(text, at + 1)
        if text[at] == "[":
            return self._list(text, at + 1)
        found = _BARE.match(text, at)
        if found is None:
            raise ValueError("a value is missing")
        word = found[0].strip()
        return _WORDS[word] if word in _WORDS else DECODER.decode(word), found.end()

    def _mapping(self, text: str, at: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        while (at := _past(text, at)) < len(text) and text[at] != "}":
            key = _KEY.match(text, at)
            if key is not None:
                name, at = key[1], key.end()
            else:
                name, at = self._value(text, at)
                at = text.index(":", at) + 1
            values[str(name)], at = self._value(text, at)
        if text[at] != "}":
            raise ValueError("a mapping is not closed")
        return values, at + 1

    def _list(self, text: str, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        while (at := _past(text, at)) < len(text) and text[at] != "]":
            value, at = self._value(text, at)
            values.append(value)
        if text[at] != "]":
            raise ValueError("a list is not closed")
        return values, at + 1


class FunctionGemma(Gemma):
    """The same with marks of its own."""

    name = "functiongemma"
    begin, end = "<start_function_call>", "<end_function_call>"
    quote = "<escape>"
    values = ((quote, quote),)


def _past(text: str, at: int, signs: str = " \n\t,") -> int:
    """Return where blanks and commas end."""
    while at < len(text) and text[at] in signs:
        at += 1
    return at
