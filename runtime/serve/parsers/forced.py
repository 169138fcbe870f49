"""Reads an answer that a guide holds to the form of a call: `tool_choice` forces one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmpq.runtime.serve.parsers.parts import Delta, Parts
from llmpq.runtime.serve.parsers.reading import Reader
from llmpq.runtime.serve.parsers.tool_form import Call, calls_in_json


def forced_guide(functions: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the guide of an answer that calls the named tool, or any where the name is empty."""
    if name:
        return {"json": _arguments(next(f for f in functions if f["name"] == name))}
    return {"calls": [(f["name"], _arguments(f)) for f in functions]}


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object whatever else it allows."""
    schema = function.get("parameters")
    if not schema:
        return {"type": "object", "additionalProperties": False}
    return {**schema, "type": "object"}


class ForcedReader:
    """Reads one answer, piece by piece or whole; what a limit or a stop text cuts is no call."""

    def __init__(self, parts: Parts, name: str, thoughts: Reader | None = None) -> None:
        """`name`: of the tool whose arguments the answer is; empty: the answer names it, too.

        `thoughts`: reads the thought that the prompt has opened, behind which the call stands.
        """
        self._parts = parts
        self._name = name
        self._held = ""
        self._thoughts = thoughts

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> list[Delta]:
        """Take a piece of text; return what is new of a thought, and the call at the end."""
        if self._thoughts is not None:
            deltas = self._thoughts.push(text, ended=ended, cut=cut)
            for delta in deltas:
                self._parts.thought(delta.get("reasoning_content", ""))
            text = "".join(delta.get("content", "") for delta in deltas)
        self._held += text
        if ended and not cut and self._held:
            self._parts.calls(self._called())
        return self._parts.take(ended=ended)

    def _called(self) -> list[Call]:
        if not self._name:
            return calls_in_json(self._held)
        try:
            json.loads(self._held)
        except ValueError:
            return []
        return [Call(self._name, self._held)]
