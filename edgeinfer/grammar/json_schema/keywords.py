"""The keywords of JSON Schema (2020-12, and older names) that are known here, and values that they may have."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any, NoReturn

from edgeinfer.grammar.nodes import MAX_REASON_CHARS, unusable

Schema = Any
"""An object as JSON gives it, or true or false."""
Flat = dict[str, Any]
"""A schema without references and combinations; `enum` for const, `type` a list, `minimum` and the like as Decimal."""

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
BY_TYPE = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const")
_ANNOTATIONS = (
    *("$schema", "$comment", "$defs", "definitions", "title", "description", "default", "example", "examples"),
    *("deprecated", "readOnly", "writeOnly", "discriminator"),
)
KNOWN = {*_ANNOTATIONS, *_COMBINING, *(name for names in BY_TYPE.values() for name in names)}
_PATH_CHARS = 80
_REASON_CHARS = MAX_REASON_CHARS - _PATH_CHARS - 10
_SCHEMAS = {"items", "additionalProperties"}


def refuse(subject: str, path: str, reason: str, hint: str) -> NoReturn:
    """Refuse what stands at a place of the schema."""
    where = path if len(path) <= _PATH_CHARS else "..." + path[3 - _PATH_CHARS :]
    shown = reason if len(reason) <= _REASON_CHARS else reason[: _REASON_CHARS - 3] + "..."
    unusable(subject, f"{shown} (at {where})", hint)


def unsupported(subject: str, path: str, keyword: str, why: str = "") -> NoReturn:
    """Refuse a keyword."""
    refuse(
        subject, path, f"the keyword {keyword!r} is not supported{why}", "leave it out; docs/structured.md lists all"
    )


def check(schema: Schema, subject: str, path: str) -> None:
    """Refuse keywords that are not known and values that they cannot have; not in subschemas, whose turn comes."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        refuse(subject, path, "a schema is an object, true or false", "see json-schema.org")
    for keyword, value in schema.items():
        if keyword not in KNOWN and not keyword.startswith("x-") and not (keyword == "$id" and path == "#"):
            unsupported(subject, path, keyword)
        if not _is_sound(keyword, value):
            refuse(subject, f"{path}/{keyword}", f"{keyword} cannot be {shown(value)}", "see json-schema.org")


def _is_sound(keyword: str, value: Any) -> bool:
    match keyword:
        case "type":
            names = value if isinstance(value, list) else [value]
            return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)
        case "enum" | "prefixItems":
            return isinstance(value, list)
        case "allOf" | "anyOf" | "oneOf":
            return isinstance(value, list) and bool(value)
        case "properties":
            return isinstance(value, dict)
        case "required":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "$ref" | "pattern" | "format":
            return isinstance(value, str)
        case "uniqueItems":
            return isinstance(value, bool)
        case _ if keyword in _COUNTS:
            return is_number(value) and value == int(value) and value >= 0
        case _ if keyword in BY_TYPE["number"]:
            return is_number(value)
        case _ if keyword in _SCHEMAS:
            return isinstance(value, dict | bool)
    return True


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that is finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def flat(schema: dict[str, Any]) -> Flat:
    """The keywords that say something of a value itself, in one spelling."""
    found: Flat = {}
    for keyword, value in schema.items():
        if keyword == "type":
            found["type"] = list(value) if isinstance(value, list) else [value]
        elif keyword == "const":
            found["enum"] = [v for v in found.get("enum", [value]) if same(v, value)]
        elif keyword == "enum":
            found["enum"] = [v for v in value if "enum" not in found or any(same(v, w) for w in found["enum"])]
        elif keyword in _COUNTS:
            found[keyword] = int(value)
        elif keyword in BY_TYPE["number"]:
            found[keyword] = Decimal(repr(value))
        elif any(keyword in names for names in BY_TYPE.values()):
            found[keyword] = value
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1, but 1.0 is."""
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def type_of(value: Any) -> str:
    """The narrowest type of a value."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case float() if not value.is_integer():
            return "number"
    return "integer"


def types_of(schema: Flat) -> set[str]:
    """The types that a schema declares; all where it declares none. With `number` goes `integer`."""
    names = set(schema.get("type", TYPES))
    return names | {"integer"} if "number" in names else names


def shown(value: Any) -> str:
    """A value for a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
