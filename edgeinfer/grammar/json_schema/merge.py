"""Two schemas that must both hold, as one."""

from __future__ import annotations

from typing import Any

from edgeinfer.errors import UnusableInputError
from edgeinfer.grammar.json_schema.keywords import Flat, Schema, same, types_of

NOT = "\0not"
"""In a flat schema: lists of alternatives of which none may hold, from oneOf."""
_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def merged(a: Flat, b: Flat) -> Flat | None:
    """What both say; None where that is nothing. Raises UnusableInputError for what one keyword cannot say."""
    if not a or not b:
        return a or b
    both: Flat = {**a, **b}
    if "type" in a and "type" in b:
        names = types_of(a) & types_of(b)
        both["type"] = [name for name in names if not (name == "integer" and "number" in names)]
        if not names:
            return None
    if "enum" in a and "enum" in b:
        both["enum"] = [v for v in a["enum"] if any(same(v, w) for w in b["enum"])]
    for keyword in a.keys() & b.keys():
        if keyword in _LARGEST:
            both[keyword] = max(a[keyword], b[keyword])
        elif keyword in _SMALLEST:
            both[keyword] = min(a[keyword], b[keyword])
        elif keyword in ("pattern", "format", "multipleOf") and a[keyword] != b[keyword]:
            raise UnusableInputError(f"two different {keyword!r} for one value", "leave one of them out")
        elif keyword == "uniqueItems":
            both[keyword] = a[keyword] or b[keyword]
        elif keyword == NOT:
            both[keyword] = [*a[keyword], *b[keyword]]
    _merge_object(a, b, both)
    _merge_array(a, b, both)
    return both


def _merge_object(a: Flat, b: Flat, both: Flat) -> None:
    names = {**a.get("properties", {}), **b.get("properties", {})}
    if names:
        both["properties"] = {name: all_of([_property(schema, name) for schema in (a, b)]) for name in names}
    if "required" in a and "required" in b:
        both["required"] = list(dict.fromkeys([*a["required"], *b["required"]]))
    if "additionalProperties" in a and "additionalProperties" in b:
        both["additionalProperties"] = all_of([a["additionalProperties"], b["additionalProperties"]])


def _property(schema: Flat, name: str) -> Schema:
    properties: dict[str, Any] = schema.get("properties", {})
    return properties[name] if name in properties else schema.get("additionalProperties", True)


def _merge_array(a: Flat, b: Flat, both: Flat) -> None:
    n_prefix = max(len(schema.get("prefixItems", ())) for schema in (a, b))
    if n_prefix:
        both["prefixItems"] = [all_of([_item(schema, i) for schema in (a, b)]) for i in range(n_prefix)]
    if "items" in a and "items" in b:
        both["items"] = all_of([a["items"], b["items"]])


def _item(schema: Flat, index: int) -> Schema:
    prefix: list[Schema] = schema.get("prefixItems", [])
    return prefix[index] if index < len(prefix) else schema.get("items", True)


def all_of(schemas: list[Schema]) -> Schema:
    """One schema that says what all of them say."""
    if False in [s for s in schemas if isinstance(s, bool)]:
        return False
    rest = [s for s in schemas if s is not True and s != {}]
    return {"allOf": rest} if len(rest) > 1 else (rest[0] if rest else True)
