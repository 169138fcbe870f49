"""DeepSeek V3, R1 and V3.1; V3.2 and later.

V3    <T calls begin><T call begin>function<T sep>name, a block of ```json, <T call end> ...
V3.1  <T calls begin><T call begin>name<T sep>{...}<T call end> ... <T calls end>
V3.2  <DSML function_calls><DSML invoke name="..."><DSML parameter name="k" string="true">v ...
"""

from __future__ import annotations

import json
import re

from llmpq.runtime.serve.parsers.minimax_calls import calls_in_tags
from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, json_of

_BAR, _GAP = "\uff5c", "\u2581"


def _mark(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _GAP)}{_BAR}>"


_CALL = re.compile(
    rf"{_mark('tool call begin')}(?:function{_mark('tool sep')})?(?P<name>[^\n<]+?)"
    rf"(?:{_mark('tool sep')}|\n)\s*(?:```json)?(?P<arguments>.*?)(?:```)?\s*"
    rf"{_mark('tool call end')}",
    re.DOTALL,
)


class DeepSeek(ToolForm):
    """V3, R1 and V3.1: JSON between marks of the tokenizer."""

    name = "deepseek"
    begin, end = _mark("tool calls begin"), _mark("tool calls end")

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls whose arguments are JSON."""
        calls = []
        for found in _CALL.finditer(text):
            arguments = json_of(found["arguments"].strip())
            if isinstance(arguments, dict):
                calls.append(Call(found["name"].strip(), json.dumps(arguments)))
        return calls


_DSML = f"{_BAR}DSML{_BAR}"


class DeepSeekV32(ToolForm):
    """V3.2 and later: tags; a parameter says whether it is a text."""

    name = "deepseek_v32"
    begin, end = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"
    values = ((f"<{_DSML}parameter ", f"</{_DSML}parameter>"),)

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls between the marks."""
        return [] if cut else calls_in_tags(text, schemas, prefix=_DSML)


class DeepSeekV4(DeepSeekV32):
    """The same within another tag."""

    name = "deepseek_v4"
    begin, end = f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"
