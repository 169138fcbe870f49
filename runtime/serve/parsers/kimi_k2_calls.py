"""Kimi K2: each call has an id, `functions.NAME:INDEX`, which the template wants to see again.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>
{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import json
import re

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, json_of

_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>\s*",
    re.DOTALL,
)


class KimiK2(ToolForm):
    """JSON behind an id."""

    name = "kimi_k2"
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls between the marks."""
        calls, place = [], 0
        while place < len(text):
            found = _CALL.match(text, place)
            arguments = json_of(found["arguments"].strip()) if found is not None else None
            if found is None or not isinstance(arguments, dict):
                return []
            calls.append(Call(found["name"], json.dumps(arguments), id=found["id"]))
            place = found.end()
        return calls
