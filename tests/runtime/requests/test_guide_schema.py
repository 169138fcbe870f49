"""JSON schemas before they guide: references that lead nowhere, formats that are not known."""

from __future__ import annotations

import pytest

from llmpq.runtime.requests.guide_schema import followable, in_our_terms

pytestmark = pytest.mark.pure


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


def needs(schema):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


NULL = {"type": "null"}
ENDLESS = {
    "itself": {**ref("A"), "$defs": {"A": ref("A")}},
    "the root": {"$ref": "#"},
    "two in turn": {**ref("A"), "$defs": {"A": ref("B"), "B": ref("A")}},
    "through allOf": {**ref("A"), "$defs": {"A": {"allOf": [{"type": "object"}, ref("A")]}}},
    "through every branch": {**ref("A"), "$defs": {"A": {"anyOf": [ref("A"), needs(ref("A"))]}}},
    "a property that must be there": needs({"$ref": "#"}),
    "any property that must be there": {
        "type": "object",
        "required": ["b"],
        "additionalProperties": {"$ref": "#"},
    },
    "an array of at least one": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "the first of an array": {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    "of an older draft": {"type": "array", "items": [{"$ref": "#"}], "minItems": 1},
    "behind one that ends": {"anyOf": [NULL, ref("A")], "$defs": {"A": needs(ref("A"))}},
    "an escaped name": {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"$ref": "#"}}},
}
ENDING = {
    "a list": {**ref("N"), "$defs": {"N": needs({"anyOf": [ref("N"), NULL]})}},
    "a tree": {
        "type": "object",
        "properties": {"c": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["c"],
    },
    "an optional property": {"type": "object", "properties": {"next": {"$ref": "#"}}},
    "an array or a text": {"type": ["array", "string"], "items": {"$ref": "#"}, "minItems": 1},
    "one that nothing reaches": {"type": "string", "$defs": {"A": ref("A")}},
    "another document's": needs({"$ref": "https://example.com/a"}),
    "into a list": {
        "type": "object",
        "properties": {
            "a": {"anyOf": [NULL, {"type": "integer"}]},
            "b": {"$ref": "#/properties/a/anyOf/1"},
        },
    },
    "a property called $ref": needs({"type": "object", "properties": {"$ref": NULL}}),
    "an enum": {"enum": [1, 2], **needs({"$ref": "#"})},
    "true": True,
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_references_that_no_text_can_finish_are_refused(schema):
    with pytest.raises(ValueError, match="leads back to itself"):
        followable(schema, lambda _: True)


@pytest.mark.parametrize("schema", ENDING.values(), ids=ENDING)
def test_references_that_end_somewhere_are_left_alone(schema):
    assert followable(schema, lambda _: True) == schema


def test_formats_that_are_not_known_are_left_out_of_schemas_only():
    date, phone = {"type": "string", "format": "date"}, {"type": "string", "format": "phone"}
    schema = {
        "properties": {"format": date, "a": {"items": phone}, "b": {"$ref": "#/own/phone"}},
        "anyOf": [phone, date],
        "default": {"format": "phone"},
        "own": {"phone": phone, "format": "phone"},
    }
    got = followable(schema, "date".__eq__)
    assert got["properties"]["format"] == date and got["default"] == {"format": "phone"}
    assert got["properties"]["a"]["items"] == got["anyOf"][0] == {"type": "string"}
    assert got["own"] == {"phone": {"type": "string"}, "format": "phone"}
    assert schema["anyOf"][0] == phone, "the given one was changed"


@pytest.mark.parametrize(
    "wrap",
    [lambda s: {"type": "array", "items": s}, lambda s: {"anyOf": [s]}, lambda s: {"default": [s]}],
)
def test_a_schema_of_thousands_of_levels_is_refused(wrap):
    schema = NULL
    for _ in range(3000):
        schema = wrap(schema)
    with pytest.raises(ValueError, match="more than 120 levels"):
        followable(schema, lambda _: True)


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ('Unimplemented keys: ["uniqueItems", "not"]', "keywords not, uniqueItems; leave them out"),
        ("oneOf constraints are not supported. Enable 'coerce_one_of'", "write anyOf"),
        (
            "at 3(5): failed to compile JSON schema: Invalid type: x\n   1 | start: a",
            "^Invalid type: x$",
        ),
        (
            "Parser Error: Current row has 12 items; max is 2; consider making\n<state>\nTokens",
            r"too many ways open at once \(Current row has 12 items; max is 2\)$",
        ),
        (
            "lexer error: too many expressions constructed\n<non-verbose/>",
            r"too many ways open at once \(too many expressions constructed\)$",
        ),
        (
            "Resource 'json-schema:///other.json' is not present in a registry and retrieving it "
            "failed: Default retriever does not fetch resources",
            "^'\\$ref' leads to 'other.json', and nothing is fetched; put that schema under",
        ),
        ("Pointer '/$defs/x' does not exist", "leads to '#/\\$defs/x', which is not there"),
        ("Anchor 'x' does not exist", "leads to '#x', which is not there"),
        ("Unsatisfiable schema: anyOf is empty", "^no text fits: an enum"),
    ],
)
def test_the_librarys_sentences_are_put_in_a_schemas_terms(said, ours):
    import re

    assert re.search(ours, in_our_terms(said))


ROUNDED = [2**53 + 1, -(2**53) - 1, 1234567890123456789, 2**63, 10**400 + 1, 123456789.12345679]
EXACT = [
    0,
    -1,
    2**53,
    10**25,
    0.1,
    -2.5e-7,
    1e300,
    1234567890.123456,
    True,
    None,
    "1234567890123456789",
]


@pytest.mark.parametrize("number", ROUNDED)
def test_numbers_that_would_be_rounded_are_refused(number):
    for schema in ({"const": number}, needs({"enum": ["a", {"b": [number]}]})):
        with pytest.raises(ValueError, match="rounds .*make it a string"):
            followable(schema, lambda _: True)


def test_numbers_that_are_written_as_they_are_pass():
    wide = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1, "default": 2**53 + 1}
    for schema in (*({"const": value} for value in EXACT), {"enum": EXACT}, wide):
        assert followable(schema, lambda _: True) == schema
