"""Calls of tools in what a model writes: its family's own form, or JSON that a guide forced."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from llmpq.runtime.serve.tool_forms import MARKS, TAG, Call, Calls, may_be_bare, read_calls


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

    def __init__(
        self, form: Calls, name: str | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`name`: of the tool that is called, where the answer is its arguments."""
        self._form, self._name = form, name
        self._schemas = {
            tool["name"]: (tool.get("parameters") or {}).get("properties") or {} for tool in tools
        }
        self._held = ""
        """Text that may be a call, or the beginning of one."""
        self._begun = False
        self._bare = True
        """Whether the answer so far may be calls without a mark."""
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
        self._bare = self._bare and may_be_bare(self._held, self._form, self._schemas)
        if self._bare and not ended:
            return []
        if self._bare:
            calls = read_calls(self._held.strip().removeprefix(TAG), self._schemas)
            if calls:
                self._held = ""
                return [self._call(call) for call in calls]
        if self._form in MARKS:
            return self._marked(ended)
        held, self._held, self._form = self._held, "", Calls.NONE  # so is what follows
        return _content(held)

    def _grow(self, text: str) -> list[dict[str, Any]]:
        """Return arguments as they come; the first piece names the tool."""
        if not text:
            return []
        if self._begun:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self._begun = True
        return [self._call((self._name or "", text))]

    def _marked(self, ended: bool) -> list[dict[str, Any]]:
        """Return what stands before, between and behind marks, and the calls between them."""
        parts: list[dict[str, Any]] = []
        mark, end = MARKS[self._form]
        while True:
            before, opened, rest = self._held.partition(mark)
            if not opened:
                keep = 0 if ended else _overlap(self._held, mark)
                cut = len(self._held) - keep
                parts += self._text(self._held[:cut])
                self._held = self._held[cut:]
                return parts
            parts += self._text(before)
            inside, closed, behind = rest.partition(end or mark)
            if not closed and not ended:
                self._held = opened + rest
                return parts
            if not end:  # the next one's mark
                closed, behind = "", closed + behind
            calls = read_calls(inside.strip(), self._schemas)
            parts += [self._call(call) for call in calls] or _content(opened + inside + closed)
            self._held = behind

    def _text(self, text: str) -> list[dict[str, Any]]:
        """Return text as a delta; blanks between calls say nothing."""
        return [] if self.num_calls and not text.strip() else _content(text)

    def _call(self, call: Call) -> dict[str, Any]:
        # Mistral's templates take ids of nine letters and digits only.
        short = self._form is Calls.MISTRAL
        told = {
            "index": self.num_calls,
            "id": uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call[0], "arguments": call[1]},
        }
        self.num_calls += 1
        return {"tool_calls": [told]}


def _content(text: str) -> list[dict[str, Any]]:
    return [{"content": text}] if text else []


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end may be the beginning of a mark."""
    return next((k for k in range(len(mark) - 1, 0, -1) if text.endswith(mark[:k])), 0)
