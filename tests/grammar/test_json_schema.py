"""Whatever is written for a JSON Schema is valid for it; what cannot be promised is refused by name."""

import json
from decimal import Decimal

import jsonschema
import pytest
from grammar_parts import of_schema, schemas, standing, written
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import UnusableInputError
from edgeinfer.grammar.json_schema.compiler import compile_schema, parse_schema


def validate(schema, text):
    """Raises where a text is no JSON, or not valid; formats are checked too."""
    validator = jsonschema.Draft202012Validator
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


SCHEMAS = {
    "anything": True,
    "object": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]},
    "others": {
        "type": "object",
        "properties": {"ab": {"type": "integer"}, "ac": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2, "minProperties": 1},
    "required without a property": {"required": ["z"]},
    "array": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "tuple": {"prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 2}], "items": False},
    "tuple and more": {"prefixItems": [{"type": "integer"}], "items": {"type": "null"}, "minItems": 3, "maxItems": 4},
    "enum": {"enum": [1, "x", None, [1, 2], {"k": 1.5}, 'é😀\x00"']},
    "enum and more": {"enum": [1, 5, "x", "long"], "type": ["integer", "string"], "minimum": 2, "maxLength": 2},
    "types": {"type": ["string", "null", "boolean"], "maxLength": 1},
    "recursion": {
        "$defs": {"n": {"properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}},
        "$ref": "#/$defs/n",
    },
    "the whole again": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
    "tagged": {
        "oneOf": [
            {"properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k", "x"]},
            {"properties": {"k": {"const": "b"}}, "required": ["k"]},
        ]
    },
    "either": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 3}, "b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "one of the types": {
        "oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "array", "items": {"type": "null"}}]
    },
    "ranges": {"oneOf": [{"type": "number", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}]},
    "many optional": {"properties": {str(i): {"type": "integer"} for i in range(40)}},
    "annotations": {"title": "x", "description": "y", "default": 1, "examples": [1], "x-mine": 1, "type": "integer"},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_is_valid(name):
    grammar = of_schema(SCHEMAS[name])
    texts = [text for seed in range(12) if (text := written(grammar, seed)) is not None]
    assert len(texts) >= 6
    for text in texts:
        validate(SCHEMAS[name], text)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(schemas(), st.integers(0, 99))
def test_whatever_is_written_for_any_schema_is_valid(schema, seed):
    try:
        grammar = of_schema(schema)
    except UnusableInputError:  # contradictory, or a oneOf that is not certain
        return
    for text in (written(grammar, seed), written(grammar, seed + 1)):
        if text is not None:
            validate(schema, text)


@pytest.mark.parametrize(
    ("schema", "matches", "refused"),
    [
        ({"type": "integer", "minimum": -12, "maximum": 1034}, "-12 -1 0 9 10 999 1000 1034", "-13 1035 -0 01 1.0 1e1"),
        ({"type": "integer", "exclusiveMinimum": 5, "maximum": 7.5}, "6 7", "5 8"),
        ({"type": "integer", "minimum": 10**30}, str(10**30) + " 5" + "0" * 30, str(10**30 - 1)),
        ({"type": "integer", "maximum": -5}, "-5 -6 -10 -99", "-4 0 5"),
        ({"type": "number", "minimum": 0.25, "exclusiveMaximum": 1}, "0.25 0.3 0.9999 0.250", "0.2 0 1 0.24 -0.3 1.0"),
        ({"type": "number", "minimum": -3.5, "maximum": -0.001}, "-3.5 -0.001 -2 -3.49 -1.0", "-3.51 0 -0.0009 1"),
        ({"type": "number", "exclusiveMinimum": 5}, "5.1 6 5.0001 10.5", "5 5.0 4.9"),
        ({"type": "number", "minimum": 0, "maximum": 0}, "0 0.0", "0.1 1"),
        ({"type": "number"}, "0 -1.5 1e9 2E-7 10.25", "01 .5 1. +1 NaN"),
        ({"type": "string", "pattern": r"^[A-Z]{2}-\d+$"}, '"AB-1" "ZZ-007"', '"A-1" "AB-" "AB-1x"'),
        ({"type": "string", "pattern": "b"}, '"b" "abc" "ab"', '"a" ""'),
        ({"type": "string", "pattern": r"^[^\"]\\\n$"}, r'"a\\\n"', r'"\"\\\n"'),
        ({"type": "string", "minLength": 2, "maxLength": 3}, r'"ab" "é😀x" "\u00e9\ud83d\ude00"', '"a" "abcd"'),
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, '"ab" "abc"', '"a" "abcd" "A1"'),
        ({"type": "string", "format": "date"}, '"2026-02-28" "1999-12-31"', '"2026-02-30" "2026-13-01" "26-1-1"'),
        (
            {"type": "string", "format": "date-time"},
            '"2026-11-30T02:00:00Z" "2026-11-30T02:00:00.5+01:00"',
            '"2026-11-30"',
        ),
        ({"type": "string", "format": "ipv4"}, '"127.0.0.1" "255.255.255.0"', '"256.0.0.1" "1.1.1" "01.1.1.1"'),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 1}, "[] [null]", "[null,null]"),
        ({"const": {"a": [1, None]}}, '{"a":%20[1,%20null]}', '{"a":%20[1]}'),
        ({"type": "string"}, r'"\ud83d\ude00" "\u00e9\n" "\ud7ff"', '"\\ud800" "\\udc00" "\n" "\\x"'),
    ],
)
def test_examples(schema, matches, refused):
    grammar = of_schema(schema)
    for text in matches.split(" "):
        text = text.replace("%20", " ")
        assert standing(grammar, text) in ("end", "complete"), text
        validate(schema, text)
    for text in refused.split(" "):
        assert standing(grammar, text.replace("%20", " ")) in ("dead", "more"), text


def test_properties_come_in_order_and_optional_ones_in_any_subset():
    grammar = of_schema({"properties": {name: {"type": "null"} for name in "abc"}, "required": ["b"]})
    for names in ("b", "ab", "bc", "abc"):
        text = "{" + ", ".join(f'"{name}": null' for name in names) + "}"
        assert standing(grammar, text) == "complete", text
    for names in ("", "a", "ac", "ba", "bb", "bd"):
        text = "{" + ",".join(f'"{name}":null' for name in names) + "}"
        assert standing(grammar, text) == "dead", text


def test_another_key_is_none_of_the_declared_ones():
    properties = {"ab": {"type": "null"}, "abc": {"type": "null"}, "": {"type": "null"}}
    grammar = of_schema({"properties": properties, "additionalProperties": {"type": "integer"}})
    for key in ("a", "b", "abcd", "abd", "é"):
        assert standing(grammar, f'{{"{key}":1}}') == "complete", key
    for key in ("ab", "abc", "", r"\u0061b"):
        assert standing(grammar, f'{{"{key}":1}}') == "dead", key


def test_blanks_have_an_end():
    grammar = of_schema({"type": "array"})
    assert standing(grammar, "[\n" + " " * 20 + "]") == "complete"
    assert standing(grammar, "[\n" + " " * 21) == "dead"


REFUSED = [
    ({"not": {}}, "'not'"),
    ({"if": {}}, "'if'"),
    ({"type": "object", "patternProperties": {}}, "'patternProperties'"),
    ({"properties": {"a": {"maxLenght": 3}}}, "'maxLenght' is not supported (at #/properties/a)"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "number", "multipleOf": 0.1}, "'multipleOf'"),
    ({"type": "string", "format": "color"}, "'format' is not supported as 'color'"),
    ({"type": "string", "pattern": "(?=x)"}, "(?"),
    ({"type": "string", "pattern": r"(a)\1"}, r"\1"),
    ({"type": "string", "pattern": "x", "maxLength": 3}, "length"),
    ({"$ref": "other.json"}, "'other.json'"),
    ({"$ref": "#/$defs/none"}, "refers to nothing"),
    ({"$anchor": "x"}, "'$anchor'"),
    ({"properties": {"a": {"$id": "x"}}}, "'$id'"),
    ({"type": "text"}, 'type cannot be "text"'),
    ({"type": "string", "minLength": -1}, "minLength cannot be -1"),
    ({"type": "string", "minLength": "2"}, "minLength"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum cannot be true"),
    ({"items": [{}]}, "items cannot be"),
    ({"required": "a"}, "required cannot be"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
    ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "'oneOf'"),
    ({"type": "integer", "enum": ["a"]}, "no text matches"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "no text matches"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "no text matches"),
    (False, "no text matches"),
    ({"$ref": "#"}, "no text matches"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no text matches"),
    ([], "a schema is an object"),
    (None, "a schema is an object"),
]


@pytest.mark.parametrize(("schema", "says"), REFUSED)
def test_what_cannot_be_promised_is_refused_by_name(schema, says):
    with pytest.raises(UnusableInputError) as error:
        of_schema(schema)
    assert says in error.value.message
    assert error.value.hint


@pytest.mark.parametrize("source", ["", "{", "{'a': 1}", "nul", '{"const": "\\ud800"}', "[" * 100_000])
def test_what_is_no_json_is_refused(source):
    with pytest.raises(UnusableInputError, match="not JSON"):
        parse_schema(source)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_numbers_within_any_bounds(data):
    bounds = st.one_of(st.integers(-(10**7), 10**7), st.integers(-(10**9), 10**9).map(lambda n: n / 10**4))
    schema = {"type": data.draw(st.sampled_from(["integer", "number"]))}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if data.draw(st.booleans()):
            schema[keyword] = data.draw(bounds)
    near = [Decimal(repr(v)) for k, v in schema.items() if k != "type"]
    steps = [Decimal(0), *(Decimal(sign * 10**n) / 10**4 for sign in (1, -1) for n in range(6))]
    try:
        grammar = of_schema(schema)
    except UnusableInputError:
        grammar = None
    for value in [Decimal(0), *(v + step for v in near for step in steps)]:
        if schema["type"] == "integer":
            value = value.to_integral_value()
        text = f"{value:f}" if value else "0"
        matches = grammar is not None and standing(grammar, text) in ("end", "complete")
        assert matches == jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text


def test_a_schema_of_python_is_one_of_json():
    assert compile_schema({"const": 1}).rules["root"] == parse_schema('{"const": 1}').rules["root"]
