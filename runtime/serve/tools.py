"""Calls of tools in what a model writes: its family's own form, or JSON that a guide forced."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from llmpq.runtime.serve.tool_forms import (
    MARKS,
    TAG,
    THOUGHTS,
    Call,
    Calls,
    Inside,
    may_be_bare,
    read_calls,
)


def forced_call(functions: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return what an answer must be that calls a tool, any of them where the name is empty."""
    if name:
        return {"json": _arguments(next(f for f in functions if f["name"] == name))}
    return {"calls": [(f["name"], _arguments(f)) for f in functions]}


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object."""
    schema = function.get("parameters")
    if not schema:
        return {"type": "object", "additionalProperties": False}
    return dict(schema) if "type" in schema or "$ref" in schema else {"type": "object", **schema}


class ToolReader:
    """Reads one answer, piece by piece or whole."""

    def __init__(
        self,
        form: Calls,
        name: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool = False,
        one_call: bool = False,
    ) -> None:
        """`name`: of the tool that is called, where the answer is its arguments.

        `thinking`: the prompt ends inside a thought. `one_call`: calls after the first are dropped.
        """
        self._form, self._name, self._one_call = form, name, one_call
        self._schemas = {
            tool["name"]: (tool.get("parameters") or {}).get("properties") or {} for tool in tools
        }
        self._held = ""
        """Text that may be a call, or the beginning of one."""
        self._begun = False
        self._bare = True
        """Whether the answer so far, behind thoughts, may be calls without a mark."""
        self._closes = "</think>" if thinking else ""
        """What ends the thought that is under way; calls inside it are text."""
        self._inside: Inside | None = None
        """Where the call that is under way has been looked through."""
        self.num_calls = 0

    def whole(self, text: str, *, cut: bool = False) -> tuple[str | None, list[dict[str, Any]]]:
        """Return an answer's text, None without any, and its calls; `cut`: by the token limit."""
        if cut and self._form in (Calls.ARGUMENTS, Calls.WHOLE):
            return None, []
        content, calls = "", []
        for part in self.push(text, ended=True, cut=cut):
            content += part.get("content") or ""
            for call in part.get("tool_calls", ()):
                calls.append({key: value for key, value in call.items() if key != "index"})
        return (content or None) if calls else content, calls

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> list[dict[str, Any]]:
        """Take a piece of text; return deltas: `content`, or whole or growing `tool_calls`."""
        if self._form is Calls.NONE:
            return _content(text)
        if self._form is Calls.ARGUMENTS:
            return self._grow(text)
        self._held += text
        if self._form is Calls.WHOLE:
            return self._forced_call() if ended and not cut else []
        parts: list[dict[str, Any]] = []
        while self._held:
            left = len(self._held)
            parts += self._thought(ended) if self._closes else self._said(ended, cut)
            if len(self._held) == left:
                break
        return parts

    def _grow(self, text: str) -> list[dict[str, Any]]:
        """Return arguments as they come; the first piece names the tool."""
        if not text:
            return []
        if self._begun:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self._begun = True
        return self._calls([(self._name or "", text)])

    def _forced_call(self) -> list[dict[str, Any]]:
        """Return the call that the answer is."""
        held, self._held = self._held, ""
        calls = read_calls(held, self._schemas)
        return self._calls(calls) if calls else _content(held)

    def _thought(self, ended: bool) -> list[dict[str, Any]]:
        """Take what belongs to the thought under way; it is text."""
        at = self._held.find(self._closes)
        if at >= 0:
            end = at + len(self._closes)
            self._closes, self._bare = "", True
        else:
            end = len(self._held) - (0 if ended else _overlap(self._held, self._closes))
        text, self._held = self._held[:end], self._held[end:]
        return _content(text)

    def _said(self, ended: bool, cut: bool) -> list[dict[str, Any]]:
        """Take text up to a thought or a call, or a whole call."""
        self._bare = self._bare and may_be_bare(self._held, self._form, self._schemas)
        if self._bare:
            if not ended:
                return []
            calls = read_calls(self._held.strip().removeprefix(TAG), self._schemas)
            if calls:
                self._held = ""
                return self._calls(calls)
        marks = [opened for opened, _ in THOUGHTS]
        if self._form in MARKS:
            marks.append(MARKS[self._form][0])
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        at, mark = min(found, default=(-1, ""))
        if not mark:
            keep = 0 if ended else max(_overlap(self._held, mark) for mark in marks)
            at = len(self._held) - keep
        if at > 0:
            text, self._held = self._held[:at], self._held[at:]
            return self._text(text)
        if mark in dict(THOUGHTS):
            self._closes = dict(THOUGHTS)[mark]
            self._held = self._held.removeprefix(mark)
            return _content(mark)
        return self._marked(ended, cut) if mark else []

    def _marked(self, ended: bool, cut: bool) -> list[dict[str, Any]]:
        """Take the calls behind a mark, once they are whole; what is none is text."""
        mark, end = MARKS[self._form]
        end = end or mark  # calls without an end go to the next mark
        self._inside = self._inside or Inside(end)
        rest = self._held[len(mark) :]
        at = self._inside.find_end(rest)
        if at < 0 and not ended:
            return []
        self._inside = None
        if at < 0:
            calls = read_calls(rest.strip(), self._schemas, cut=cut)
            if calls:
                self._held = ""
                return self._calls(calls)
            at = rest.find(end)  # an argument that is not closed hides no end
        closed = at >= 0
        inside = rest[:at] if closed else rest
        behind = rest[at:] if closed else ""
        shown = mark + inside
        if end != mark and closed:
            behind, shown = behind.removeprefix(end), shown + end
        self._held = behind
        calls = read_calls(inside.strip(), self._schemas) if closed else []
        return self._calls(calls) if calls else _content(shown)

    def _text(self, text: str) -> list[dict[str, Any]]:
        """Return text as a delta; blanks between calls say nothing."""
        return [] if self.num_calls and not text.strip() else _content(text)

    def _calls(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Return calls as deltas, without those that are one too many."""
        told: list[dict[str, Any]] = []
        for name, arguments in calls:
            if self._one_call and self.num_calls:
                break
            # Mistral's templates take ids of nine letters and digits only.
            short = self._form is Calls.MISTRAL
            call = {
                "index": self.num_calls,
                "id": uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            self.num_calls += 1
            told.append({"tool_calls": [call]})
        return told


def _content(text: str) -> list[dict[str, Any]]:
    return [{"content": text}] if text else []


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end may be the beginning of a mark."""
    return next((k for k in range(len(mark) - 1, 0, -1) if text.endswith(mark[:k])), 0)
