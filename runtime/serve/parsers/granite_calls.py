"""Granite 3 and Phi-4-mini: <|tool_call|>[{...}, {...}]<|/tool_call|>, whose end may be missing."""

from __future__ import annotations

import re

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, calls_in_json


class Granite(ToolForm):
    """A JSON list; the marks are special tokens of some tokenizers."""

    name = "granite"
    begin, end = "<|tool_call|>", "<|/tool_call|>"

    def may_be_bare(self, text: str, schemas: Schemas) -> bool:
        """Return whether an answer so far may be calls without the mark, or their beginning."""
        start = text.lstrip()
        return self.begin.startswith(start) or re.match(r"\[\s*(\{|$)", start) is not None

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls of a list."""
        return calls_in_json(text)
