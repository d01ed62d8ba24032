"""Whether what is written for one schema can be valid for another: the proof that oneOf needs."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from edgeinfer.grammar.json_schema.keywords import BY_TYPE, Flat, Schema, same, type_of, types_of

Expand = Callable[[Schema], list[Flat]]
"""A schema's alternatives without references."""
_MAX_DEPTH = 8


def written_types(schema: Flat) -> set[str]:
    """The types of what is written for a schema: those that it declares, or that its keywords are about, or all."""
    declared = types_of(schema)
    if "type" in schema or "enum" in schema:
        return declared
    about = {name for name, keywords in BY_TYPE.items() if any(keyword in schema for keyword in keywords)}
    return (about | {"integer"} if "number" in about else about) or declared


def never_valid(a: Flat, b: Flat, expand: Expand, depth: int = 0) -> bool:
    """Whether it is certain that nothing that is written for `a` is valid for `b`. Both without references."""
    shared = written_types(a) & types_of(b)
    if not shared:
        return True
    if "enum" in a:
        values = [v for v in a["enum"] if type_of(v) in shared]
        if "enum" in b:
            return not any(same(v, w) for v in values for w in b["enum"])
        return not values
    if "enum" in b:
        shared &= {type_of(v) for v in b["enum"]}
        if not shared:
            return True
    if shared == {"object"}:
        return _never_valid_object(a, b, expand, depth)
    if shared <= {"integer", "number"}:
        return _below(a, b) or _below(b, a)
    if shared <= {"string", "array"}:
        least, most = ("minLength", "maxLength") if shared == {"string"} else ("minItems", "maxItems")
        return len(shared) == 1 and any(x.get(least, 0) > y.get(most, x.get(least, 0)) for x, y in ((a, b), (b, a)))
    return False


def _never_valid_object(a: Flat, b: Flat, expand: Expand, depth: int) -> bool:
    mine, theirs = a.get("properties", {}), b.get("properties", {})
    required, asked = set(a.get("required", ())), set(b.get("required", ()))
    # Others are written only where a schema says so; without any declared ones, all may be.
    writes_others = a.get("additionalProperties", not mine and not required) is not False
    if any(name not in mine and name not in required for name in asked) and not writes_others:
        return True
    if b.get("additionalProperties") is False and any(name not in theirs for name in required):
        return True
    if depth >= _MAX_DEPTH:
        return False
    names = [name for name in mine if name in theirs and (name in required or name in asked)]
    return any(never_valid_any(mine[name], theirs[name], expand, depth + 1) for name in names)


def never_valid_any(a: Schema, b: Schema, expand: Expand, depth: int) -> bool:
    """The same of whole schemas."""
    return all(never_valid(x, y, expand, depth) for x in expand(a) for y in expand(b))


def _below(a: Flat, b: Flat) -> bool:
    """Whether all numbers of `a` are smaller than all of `b`."""
    highs: list[tuple[Decimal, bool]] = [(a[k], k != "maximum") for k in ("maximum", "exclusiveMaximum") if k in a]
    lows: list[tuple[Decimal, bool]] = [(b[k], k != "minimum") for k in ("minimum", "exclusiveMinimum") if k in b]
    return any(high < low or (high == low and (x or y)) for high, x in highs for low, y in lows)
