"""Llama 4 and OLMo 3: calls as Python writes them, [weather(city="Oslo", days=2), clock()]."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from llmpq.runtime.serve.parsers.tool_form import Call, Schemas, ToolForm

_JSON_WORDS = {"true": True, "false": False, "null": None}


class Pythonic(ToolForm):
    """A list of calls, between marks or as the whole answer."""

    name = "pythonic"
    begin, end = "<|python_start|>", "<|python_end|>"

    def may_be_bare(self, text: str, schemas: Schemas) -> bool:
        """Return whether an answer so far may be a list of calls, or its beginning."""
        start = text.lstrip()
        known = re.match(r"\[\s*([\w.]*)\s*(\(|$)", start)
        return not start or (
            known is not None and (known[2] == "(" or any(n.startswith(known[1]) for n in schemas))
        )

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls of a list."""
        return calls_in_python(text)


class Olmo3(ToolForm):
    """A call a line."""

    name = "olmo3"
    begin, end = "<function_calls>", "</function_calls>"

    def read(self, text: str, schemas: Schemas, *, cut: bool = False) -> list[Call]:
        """Return the calls between the marks."""
        return calls_in_python(text)


def calls_in_python(text: str) -> list[Call]:
    """Return calls with arguments by name whose values are literals; nothing is evaluated."""
    try:
        body = ast.parse(text.strip()).body
        calls: list[Call] = []
        for line in body:
            if not isinstance(line, ast.Expr):
                return []
            value = line.value
            for node in value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]:
                if not isinstance(node, ast.Call) or node.args:
                    return []
                if any(keyword.arg is None for keyword in node.keywords):
                    return []
                given = {str(word.arg): _literal(word.value) for word in node.keywords}
                calls.append(Call(ast.unparse(node.func), json.dumps(given, allow_nan=False)))
        return calls
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _literal(node: ast.expr) -> Any:
    """Return a literal's value; JSON's words for true, false and null are literals here."""
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        if any(key is None for key in node.keys):
            raise ValueError("a mapping inside a mapping is no literal")
        keys = [_literal(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)
