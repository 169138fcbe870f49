"""Hermes, Qwen 2.5 and 3, Granite 4: <tool_call>{"name": ..., "arguments": ...}</tool_call> ..."""

from __future__ import annotations

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, calls_in_json


class Hermes(ToolForm):
    """A JSON object a call, each between marks."""

    name = "hermes"
    begin, end = "<tool_call>", "</tool_call>"

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls of one pair of marks."""
        return calls_in_json(text)
