"""JSON schemas for guided decoding: references followed, formats that it knows.

llguidance checks the rest; its sentences are put into terms of the schema here. Standard library
only.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any] | bool
_DEEPEST = 120
"""Levels of a schema; llguidance reads 128 of its own form."""
_ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
)
_SCALARS = {"string", "number", "integer", "boolean", "null"}


def followable(schema: Schema, knows_format: Callable[[str], bool]) -> Schema:
    """Return a schema without the formats that are not known, which JSON Schema has ignored.

    `ValueError` for references with which no text can be finished (`A` is `A`), for more than
    120 levels, and for numbers that llguidance would round, in `const` and `enum`.
    """
    _check_depth(schema)
    root = copy.deepcopy(schema)
    references: dict[str, Any] = {}
    for node in _reached(root, references):
        name = node.get("format")
        if isinstance(name, str) and not knows_format(name):
            del node["format"]
        for number in _numbers([node.get("const"), *_listed(node, "enum")]):
            if not _is_kept(number):
                raise ValueError(
                    f"a guide writes numbers as 64-bit floats, which rounds {number!r:.40}; make "
                    "it a string"
                )
    finite = _finite(references)
    endless = [pointer for pointer in references if pointer not in finite]
    if endless:
        raise ValueError(
            f"'$ref': {endless[0]!r:.100} leads back to itself, so that no text can be finished; "
            "give it a branch that ends"
        )
    return root


def other_than_object(schema: Schema) -> str | None:
    """Return what a schema holds its values to where none of them is an object; None elsewhere.

    Every reference is followed once.
    """
    followed: set[str] = set()

    def of(node: Any, level: int) -> str | None:
        if node is False:
            return "false"
        if not isinstance(node, Mapping) or level > _DEEPEST:
            return None
        kinds = node.get("type")
        if kinds is not None and "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            return f"type {kinds!r:.100}"
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list) and not any(isinstance(value, dict) for value in values):
            return f"values {values!r:.100}"
        parts, pointer = _listed(node, "allOf"), node.get("$ref")
        if isinstance(pointer, str) and pointer not in followed:
            followed.add(pointer)
            parts = [*parts, _at(schema, pointer)]
        for part in parts:
            if (found := of(part, level + 1)) is not None:
                return found
        for key in ("anyOf", "oneOf"):
            each = [of(part, level + 1) for part in _listed(node, key)]
            if each and None not in each:
                return " or ".join(dict.fromkeys(map(str, each)))
        return None

    return of(schema, 0)


def in_our_terms(said: str) -> str:
    """Return what llguidance says of a guide as one sentence about what the user wrote."""
    text = " ".join(said.split("<state>")[0].split("\n   1 |")[0].split())
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)
    unknown = re.search(r"Unimplemented keys: (\[.*?\])", text)
    if unknown:
        names = ", ".join(sorted(re.findall(r'"(.*?)"', unknown[1])))
        return f"nothing enforces the keywords {names}; leave them out"
    if "oneOf constraints are not supported" in text:
        return (
            "oneOf asks that only one branch fits, and more than one of these may; write anyOf, or "
            "give each branch a required property with a 'const' of its own"
        )
    if lost := re.search(r"Resource '(?:json-schema:///)?(.*?)' is not present", text):
        return (
            f"'$ref' leads to {lost[1]!r:.100}, and nothing is fetched; put that schema under "
            "'$defs' of this one"
        )
    if lost := re.search(r"(?:Pointer|Anchor) '(.*?)' does not exist", text):
        return f"'$ref' leads to '#{lost[1]}', which is not there"
    if text.endswith(("anyOf is empty", "oneOf is empty")):
        return "no text fits: an enum, anyOf or oneOf has nothing in it"
    if "min/maxProperties only supported" in text:
        return "minProperties and maxProperties need every property to be required"
    if text.startswith(("Parser Error: ", "lexer error: ")):
        text = text.partition(": ")[2].split("; consider")[0].removesuffix(" <non-verbose/>")
        text = f"it leaves too many ways open at once ({text})"
    return text[:300]


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _is_kept(number: float) -> bool:
    """Whether llguidance, which keeps 16 digits of a float, writes a number as it is."""
    try:
        return type(number)(Decimal(f"{float(number):.16g}")) == number
    except OverflowError:
        return False


def _check_depth(schema: Schema) -> None:
    level: list[Any] = [schema]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise ValueError(f"it is nested more than {_DEEPEST} levels deep")


def _children(node: Any) -> list[Any]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in children if isinstance(child, dict | list)]


def _reached(root: Any, references: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every schema that a text may be held to, once; note where local references lead."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        pointer = node.get("$ref")
        if isinstance(pointer, str) and pointer not in references:
            target = _at(root, pointer)
            if target is not None:
                references[pointer] = target
                waiting.append(target)
        waiting += [node[key] for key in _ONE if key in node]
        for key in _SEVERAL:
            if isinstance(node.get(key), list):
                waiting += node[key]
        for key in _NAMED:
            if isinstance(node.get(key), dict):
                waiting += node[key].values()


def _at(root: Any, pointer: str) -> Any:
    """Return what a reference into the same schema names, None for others and for nothing."""
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    found = root
    for part in unquote(pointer[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _finite(references: Mapping[str, Any]) -> set[str]:
    """Return the references that some finite text may fit: as many as have each other's help."""
    finite: set[str] = set()
    while True:
        new = {
            pointer
            for pointer, target in references.items()
            if pointer not in finite and _ends(target, references, finite)
        }
        if not new:
            return finite
        finite |= new


def _ends(schema: Any, references: Mapping[str, Any], finite: set[str]) -> bool:
    """Whether a finite text may fit a schema, where references must be among the `finite`."""
    if not isinstance(schema, dict):
        return True

    def ends(part: Any) -> bool:
        return _ends(part, references, finite)

    pointer = schema.get("$ref")
    if pointer in references and pointer not in finite:
        return False
    if not all(ends(part) for part in _listed(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(ends(part) for part in _listed(schema, key)):
            return False
    kinds = schema.get("type")
    if "const" in schema or "enum" in schema or kinds is None:
        return True
    own = {kinds} if isinstance(kinds, str) else {*kinds} if isinstance(kinds, list) else set()
    if own & _SCALARS or not own:
        return True
    return ("object" in own and _object_ends(schema, ends)) or (
        "array" in own and _array_ends(schema, ends)
    )


def _object_ends(schema: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties", True)
    return all(ends(properties.get(name, others)) for name in _listed(schema, "required"))


def _array_ends(schema: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    least = schema.get("minItems", 0)
    items, first = schema.get("items", True), _listed(schema, "prefixItems")
    if isinstance(items, list):  # as drafts before 2020 call what comes first
        first, items = items, schema.get("additionalItems", True)
    needed = first[: int(least)] if isinstance(least, int | float) else []
    more = isinstance(least, int | float) and least > len(first)
    return all(ends(item) for item in needed) and (not more or ends(items))


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
