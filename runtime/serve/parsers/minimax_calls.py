"""MiniMax M2: tags with names.

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import json
import re

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, json_of, typed_value


class MiniMax(ToolForm):
    """Values stand as they are; their schemas say which are numbers."""

    name = "minimax"
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    values = (("<parameter name=", "</parameter>"),)

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls between the marks."""
        return [] if cut else calls_in_tags(text, schemas)


def calls_in_tags(text: str, schemas: Schemas, *, prefix: str = "") -> list[Call]:
    """Return calls written as tags `invoke` and `parameter`, whose names have a prefix.

    A parameter may say whether it is a text (`string="true"`); else its schema does.
    """
    own = re.escape(prefix)
    invoke = re.compile(rf'\s*<{own}invoke name="([^"\n]+)">(.*?)</{own}invoke>\s*', re.DOTALL)
    parameter = re.compile(
        rf'\s*<{own}parameter name="([^"\n]+)"(?: string="(true|false)")?>(.*?)'
        rf"</{own}parameter>\s*",
        re.DOTALL,
    )
    calls, place = [], 0
    while place < len(text):
        # Parameters are read one by one: the value of one may have the text of a closing tag.
        found = invoke.match(text, place)
        if found is None:
            return []
        name, at = found[1], found.start(2)
        arguments: dict[str, object] = {}
        while value := parameter.match(text, at):
            key, as_text, given = value.groups()
            schema = schemas.get(name, {}).get(key)
            if as_text is not None:
                arguments[key] = given if as_text == "true" else json_of(given.strip())
            else:
                arguments[key] = typed_value(given, schema)
            at = value.end()
        closed = re.compile(rf"\s*</{own}invoke>\s*").match(text, at)
        if closed is None:
            whole = json_of(found[2].strip())  # arguments as one JSON object
            if not isinstance(whole, dict):
                return []
            arguments, at = whole, found.end()
        calls.append(Call(name, json.dumps(arguments)))
        place = at if closed is None else closed.end()
    return calls
