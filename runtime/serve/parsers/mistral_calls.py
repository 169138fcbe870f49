"""Mistral: [TOOL_CALLS][{...}, {...}], or [TOOL_CALLS]name[ARGS]{...} each."""

from __future__ import annotations

import json
import re

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, calls_in_json
from llmpq.runtime.text.strict_json import DECODER

_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


class Mistral(ToolForm):
    """Nothing is behind calls; the mark is a special token of some tokenizers."""

    name = "mistral"
    begin = "[TOOL_CALLS]"
    short_ids = True

    def may_be_bare(self, text: str, schemas: Schemas) -> bool:
        """Return whether an answer so far may be calls without the mark, or their beginning."""
        start = text.lstrip()
        return (
            self.begin.startswith(start)
            or re.match(r"\[\s*(\{|$)", start) is not None
            or any(
                name.startswith(start) or re.match(re.escape(name) + r"\s*(\[|\{|$)", start)
                for name in schemas
            )
        )

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return a list of calls, or calls of which each has its name before its arguments."""
        if listed := calls_in_json(text):
            return listed
        calls, place = [], 0
        while text[place:].strip():
            found = _NAMED.match(text, place)
            if found is None:
                return []
            try:
                arguments, place = DECODER.raw_decode(text, found.end())
            except (ValueError, RecursionError):
                return []
            calls.append(Call(found[1], json.dumps(arguments)))
        return calls
