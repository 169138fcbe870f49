"""GLM-4.5 and later: a name, then keys and values between tags.

<tool_call>name
<arg_key>k</arg_key>
<arg_value>v</arg_value>
</tool_call>
"""

from __future__ import annotations

import json
import re

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, typed_value

_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class Glm(ToolForm):
    """Values stand as they are; their schemas say which are numbers."""

    name = "glm"
    begin, end = "<tool_call>", "</tool_call>"
    values = (("<arg_value>", "</arg_value>"),)

    def is_in(self, template: str) -> bool:
        """Return whether a chat template shows this form."""
        return self.begin in template and "<arg_key>" in template

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the call of one pair of marks; one without arguments must be of a known tool."""
        name = text.partition("<arg_key>")[0].strip()
        pairs = _PAIR.findall(text)
        if cut or not name or "\n" in name or not (pairs or name in schemas):
            return []
        own = schemas.get(name, {})
        arguments = {key.strip(): typed_value(value, own.get(key.strip())) for key, value in pairs}
        return [Call(name, json.dumps(arguments))]
