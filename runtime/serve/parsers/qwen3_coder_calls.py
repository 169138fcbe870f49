"""Qwen3-Coder, Qwen 3.5, Nemotron 3, Seed-OSS: functions and parameters as tags.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, typed_value

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>|(?=\n<parameter=)|\Z)", re.DOTALL
)


class Qwen3Coder(ToolForm):
    """Values stand as they are; their schemas say which are numbers."""

    name = "qwen3_coder"
    begin, end = "<tool_call>", "</tool_call>"
    values = (("<parameter=", "</parameter>"),)

    def is_in(self, template: str) -> bool:
        """Return whether a chat template shows this form."""
        return self.begin in template and "<function=" in template

    def may_be_bare(self, text: str, schemas: Schemas) -> bool:
        """Return whether an answer so far may be calls whose opening mark was left out."""
        start = text.lstrip()
        return start.startswith("<function=") or "<function=".startswith(start)

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls of one pair of marks."""
        text = text.strip().removesuffix(self.end)
        calls, place = [], 0
        while place < len(text):
            found = _FUNCTION.match(text, place)
            if found is None or (cut and not found[3]):
                return []
            name, body = found[1].strip(), found[2]
            own, arguments, at = schemas.get(name, {}), {}, 0
            while body[at:].strip():
                value = _PARAMETER.match(body, at)
                if value is None:
                    return []
                key = value[1].strip()
                arguments[key] = typed_value(value[2], own.get(key))
                at = value.end()
            calls.append(Call(name, json.dumps(arguments)))
            place = found.end()
        return calls


class SeedOss(Qwen3Coder):
    """The same between marks of its own."""

    name = "seed_oss"
    begin, end = "<seed:tool_call>", "</seed:tool_call>"
