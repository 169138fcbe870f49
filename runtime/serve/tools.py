"""Calls of tools in what a model writes: its family's own form, or JSON that a guide forced.

    hermes (Qwen)   text <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...
    llama3          {"name": ..., "parameters": {...}}, alone, maybe behind <|python_tag|>

What does not read as a call stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

_OPEN, _CLOSE, _TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"


class Calls(Enum):
    """How calls stand in an answer."""

    NONE = "none"
    HERMES = "hermes"
    LLAMA3 = "llama3"
    WHOLE = "whole"
    """The answer is one call: name and arguments."""
    ARGUMENTS = "arguments"
    """The answer is the arguments of a tool that is known."""

    @classmethod
    def of(cls, wanted: str, template: str) -> Calls:
        """Return the form that was asked for, or that a model's template shows."""
        if wanted != "auto":
            return cls(wanted)
        if _OPEN in template:
            return cls.HERMES
        return cls.LLAMA3 if _TAG in template or '"parameters"' in template else cls.NONE


def forced_schema(functions: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return what an answer must be that calls a tool, any of them where the name is empty."""
    if name:
        return _arguments(next(f for f in functions if f["name"] == name))
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": f["name"]}, "arguments": _arguments(f)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for f in functions
        ]
    }


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    return dict(schema) if schema else {"type": "object", "additionalProperties": False}


class ToolReader:
    """Reads one answer, piece by piece or whole."""

    def __init__(self, form: Calls, name: str | None = None) -> None:
        """`name`: of the tool that is called, where the answer is its arguments."""
        self._form, self._name = form, name
        self._held = ""
        """Text that may be a call, or the beginning of one."""
        self._begun = False
        self.num_calls = 0

    def whole(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Return an answer's text, None without any, and its calls."""
        content, calls = "", []
        for part in self.push(text, ended=True):
            content += part.get("content") or ""
            for call in part.get("tool_calls", ()):
                calls.append({key: value for key, value in call.items() if key != "index"})
        return (content or None) if calls else content, calls

    def push(self, text: str, *, ended: bool = False) -> list[dict[str, Any]]:
        """Take a piece of text; return deltas: `content`, or whole or growing `tool_calls`."""
        if self._form is Calls.NONE:
            return [{"content": text}] if text else []
        if self._form is Calls.ARGUMENTS:
            return self._grow(text)
        self._held += text
        if self._form is Calls.HERMES:
            return self._hermes(ended)
        if not ended and _may_be_call(self._held):
            return []
        held, self._held = self._held, ""
        if not ended:  # it is text, and so is what follows
            self._form = Calls.NONE
            return [{"content": held}]
        call = _read_call(held.strip().removeprefix(_TAG))
        return [self._call(*call)] if call is not None else _content(held)

    def _grow(self, text: str) -> list[dict[str, Any]]:
        """Return arguments as they come; the first piece names the tool."""
        if not text:
            return []
        if self._begun:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self._begun = True
        return [self._call(self._name or "", text)]

    def _hermes(self, ended: bool) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        while True:
            before, opened, rest = self._held.partition(_OPEN)
            if not opened:
                keep = 0 if ended else _overlap(self._held, _OPEN)
                cut = len(self._held) - keep
                parts += _content(self._held[:cut], after_call=self.num_calls > 0)
                self._held = self._held[cut:]
                return parts
            inside, closed, behind = rest.partition(_CLOSE)
            if not closed and not ended:
                parts += _content(before, after_call=self.num_calls > 0)
                self._held = opened + rest
                return parts
            parts += _content(before, after_call=self.num_calls > 0)
            call = _read_call(inside)
            if call is None:
                parts += _content(opened + inside + closed)
            else:
                parts.append(self._call(*call))
            self._held = behind

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        call = {
            "index": self.num_calls,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self.num_calls += 1
        return {"tool_calls": [call]}


def _content(text: str, *, after_call: bool = False) -> list[dict[str, Any]]:
    """Return text as a delta; blanks between calls say nothing."""
    return [{"content": text}] if text and not (after_call and not text.strip()) else []


def _read_call(text: str) -> tuple[str, str] | None:
    """Return a call's name and its arguments as JSON; None if it is none."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    return data["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)


def _may_be_call(text: str) -> bool:
    start = text.lstrip()
    return not start or start.startswith("{") or _TAG.startswith(start[: len(_TAG)])


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end may be the beginning of a mark."""
    return next((k for k in range(len(mark) - 1, 0, -1) if text.endswith(mark[:k])), 0)
