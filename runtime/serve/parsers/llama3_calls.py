"""Llama 3: {"name": ..., "parameters": {...}} as the whole answer, maybe behind <|python_tag|>."""

from __future__ import annotations

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm, calls_in_json

_TAG = "<|python_tag|>"


class Llama3(ToolForm):
    """JSON objects without marks around them."""

    name = "llama3"

    def is_in(self, template: str) -> bool:
        """Return whether a chat template shows this form."""
        return _TAG in template or '"parameters"' in template

    def may_be_bare(self, text: str, schemas: Schemas) -> bool:
        """Return whether an answer so far may be calls, or their beginning."""
        start = text.lstrip()
        return not start or start.startswith("{") or _TAG.startswith(start[: len(_TAG)])

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls that an answer is."""
        return calls_in_json(text.strip().removeprefix(_TAG))
