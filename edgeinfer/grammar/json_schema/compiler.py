"""From a JSON Schema to the rules of a grammar."""

from __future__ import annotations

import json
import math
from itertools import count
from typing import Any

from edgeinfer.errors import UnusableInputError
from edgeinfer.grammar.json_schema import numbers, strings
from edgeinfer.grammar.json_schema.disjoint import never_valid, written_types
from edgeinfer.grammar.json_schema.flatten import REF, Flattener, is_reference
from edgeinfer.grammar.json_schema.keywords import Flat, Schema, refuse, shown, type_of, types_of, unsupported
from edgeinfer.grammar.json_schema.merge import NOT
from edgeinfer.grammar.nodes import (
    EMPTY,
    NEVER,
    ROOT,
    Grammar,
    Node,
    Repeat,
    Rule,
    Text,
    alt,
    chars,
    optional,
    seq,
    unusable,
)

MAX_CHARS = 1 << 20
"""Of a schema as a text."""
MAX_DEPTH = 64
MAX_RULES = 50_000

# Bounded, for a model that is left to it can write nothing but blanks.
_BLANK = optional(alt([Text(b" "), seq(Text(b"\n"), Repeat(chars((0x09, 0x09), (0x20, 0x20)), 0, 20))]))
_COMMA = seq(Text(b","), _BLANK)
_COLON = seq(Text(b":"), optional(Text(b" ")))
_ANY, _ANY_OBJECT, _ANY_ARRAY, _STRING, _NUMBER = "any", "any-object", "any-array", "string", "number"


def parse_schema(source: str, subject: str = "the schema") -> Grammar:
    """The grammar of a JSON Schema that is given as a text. Raises UnusableInputError for what is none."""
    if len(source) > MAX_CHARS:
        unusable(subject, f"it is longer than {MAX_CHARS} characters", "shorten it")
    try:
        document = json.loads(source)
        source.encode()
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        unusable(subject, f"not JSON: {error}", "give a JSON Schema")
    return compile_schema(document, subject)


def compile_schema(document: Schema, subject: str = "the schema") -> Grammar:
    """The grammar of a JSON Schema. Raises UnusableInputError for what a grammar cannot promise, by its keyword."""
    try:
        return _Compiler(document, subject).grammar()
    except RecursionError:
        unusable(subject, "it is nested too deeply", "make it flatter, or use $ref")


class _Compiler:
    def __init__(self, document: Schema, subject: str) -> None:
        self._document = document
        self._subject = subject
        self._flattener = Flattener(document, subject)
        self._rules: dict[str, Node] = {}
        self._references: dict[str, str] = {}  # the rule of what each refers to
        self._todo: list[str] = []
        self._numbers = count()

    def grammar(self) -> Grammar:
        self._rules[ROOT] = NEVER
        self._references["#"] = ROOT
        self._rules[ROOT] = self._schema(self._document, "#", 0)
        while self._todo:
            reference = self._todo.pop()
            target = self._flattener.target(reference, reference)
            self._rules[self._references[reference]] = self._schema(target, reference, 0)
        self._define_any()
        return Grammar(self._rules, self._subject)

    def _schema(self, schema: Schema, path: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            refuse(self._subject, path, f"nested deeper than {MAX_DEPTH}", "make it flatter, or use $ref")
        return alt(self._alternative(a, path, depth) for a in self._flattener.alternatives(schema, path))

    def _alternative(self, schema: Flat, path: str, depth: int) -> Node:
        forbidden = schema.get(NOT, [])
        if forbidden:
            self._prove_one_of(schema, forbidden, path)
        if is_reference(schema):
            return self._reference(schema[REF])
        if "enum" in schema:
            return self._enum(schema, path)
        types = written_types(schema)
        if types >= types_of({}) and not set(schema) - {NOT, "type"}:
            return Rule(_ANY)
        if {"number", "integer"} <= types:
            types.discard("integer")
        return alt(self._of_type(name, schema, path, depth) for name in sorted(types))

    def _of_type(self, name: str, schema: Flat, path: str, depth: int) -> Node:
        match name:
            case "object":
                return self._object(schema, path, depth)
            case "array":
                return self._array(schema, path, depth)
            case "string":
                return self._string(schema, path)
            case "number" | "integer":
                return self._number(schema, path, is_whole=name == "integer")
            case "boolean":
                return alt([Text(b"true"), Text(b"false")])
        return Text(b"null")

    def _prove_one_of(self, schema: Flat, forbidden: list[Flat], path: str) -> None:
        """Raises UnusableInputError where what is written for a branch of oneOf could be valid for another."""
        mine = self._flattener.expanded({k: v for k, v in schema.items() if k != NOT}, path)
        for other in forbidden:
            theirs = self._flattener.expanded({k: v for k, v in other.items() if k != NOT}, path)
            if not all(never_valid(a, b, self._expand) for a in mine for b in theirs):
                refuse(
                    self._subject,
                    path,
                    "two branches of 'oneOf' could both match one value",
                    "use anyOf, or give each branch a property with a const of its own",
                )

    def _expand(self, schema: Schema) -> list[Flat]:
        found = self._flattener.alternatives(schema, "#")
        return [b for a in found for b in self._flattener.expanded(a, "#")]

    def _reference(self, reference: str) -> Node:
        if reference not in self._references:
            self._references[reference] = self._new_name("ref")
            self._rules[self._references[reference]] = NEVER
            self._todo.append(reference)
        return Rule(self._references[reference])

    def _enum(self, schema: Flat, path: str) -> Node:
        rest = {key: value for key, value in schema.items() if key not in ("enum", "type", NOT)}
        values = [value for value in schema["enum"] if type_of(value) in types_of(schema)]
        if rest:  # other keywords: only what is written for them is known to be valid
            values = [value for value in values if self._fits(value, rest, path)]
        return alt(_literal(value) for value in values)

    def _fits(self, value: Any, rest: Flat, path: str) -> bool:
        """Whether other keywords beside an enum allow one of its values."""
        applies = {key: v for key, v in rest.items() if type_of(value) in written_types({key: v})}
        if not applies:
            return True
        fits = None
        if isinstance(value, str):
            fits = _fits_string(value, applies)
        elif isinstance(value, int | float):
            fits = _fits_number(value, applies)
        if fits is None:
            unsupported(self._subject, path, next(iter(applies)), f" beside an enum that has {shown(value)}")
        return fits

    def _string(self, schema: Flat, path: str) -> Node:
        pattern, name = schema.get("pattern"), schema.get("format")
        if name is not None and name not in strings.FORMATS:
            unsupported(self._subject, path, "format", f" as {name!r}")
        if pattern is not None and name is not None:
            unsupported(self._subject, path, "format", " together with a pattern")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if most is not None and most < least:
            return NEVER
        if pattern is None and name is None and (least, most) == (0, None):
            return Rule(_STRING)
        try:
            return strings.string(least, most, pattern if name is None else strings.FORMATS[name])
        except UnusableInputError as error:
            refuse(self._subject, path, error.message, error.hint)

    def _number(self, schema: Flat, path: str, *, is_whole: bool) -> Node:
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if keyword in schema and numbers.is_too_long(schema[keyword]):
                unsupported(self._subject, path, keyword, f" with more than {numbers.MAX_DIGITS} digits")
        step = schema.get("multipleOf")
        if step is not None and not (step == 1 and is_whole):
            unsupported(self._subject, path, "multipleOf")
        lows = [(schema[k], k != "minimum") for k in ("minimum", "exclusiveMinimum") if k in schema]
        highs = [(schema[k], k != "maximum") for k in ("maximum", "exclusiveMaximum") if k in schema]
        low = max(lows) if lows else None
        high = min(highs, key=lambda bound: (bound[0], not bound[1])) if highs else None
        if low is None and high is None:
            return numbers.INTEGER if is_whole else Rule(_NUMBER)
        if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
            return NEVER
        return numbers.integer(low, high) if is_whole else numbers.number(low, high)

    def _array(self, schema: Flat, path: str, depth: int) -> Node:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        if schema.get("uniqueItems") and not (most is not None and most <= 1):
            unsupported(self._subject, path, "uniqueItems")
        if most is not None and most < least:
            return NEVER
        if items is True and not prefix and (least, most) == (0, None):
            return Rule(_ANY_ARRAY)
        prefix = prefix[:most]
        item = self._named(self._schema(items, f"{path}/items", depth + 1), "item") if items is not False else NEVER
        n_more = (max(0, least - len(prefix)), None if most is None else most - len(prefix))
        if prefix:
            body: Node = seq(Repeat(seq(_COMMA, item), *n_more), _BLANK) if n_more[1] != 0 else _BLANK
        elif n_more[1] == 0:
            return seq(Text(b"["), _BLANK, Text(b"]"))
        else:
            others = Repeat(seq(_COMMA, item), max(0, least - 1), None if most is None else most - 1)
            body = seq(item, others if most != 1 else EMPTY, _BLANK)
            return seq(Text(b"["), _BLANK, body if least else optional(body), Text(b"]"))
        for i in range(len(prefix) - 1, -1, -1):
            value = self._named(self._schema(prefix[i], f"{path}/prefixItems/{i}", depth + 1), "item")
            body = seq(value if i == 0 else seq(_COMMA, value), body)
            if i >= least:
                body = alt([body, EMPTY if i == 0 else _BLANK])
            body = self._named(body, "tuple")
        return seq(Text(b"["), _BLANK, body, Text(b"]"))

    def _object(self, schema: Flat, path: str, depth: int) -> Node:
        properties: dict[str, Schema] = dict(schema.get("properties", {}))
        required = dict.fromkeys(schema.get("required", ()))
        others = schema.get("additionalProperties", not properties and not required)
        for name in required:
            properties.setdefault(name, schema.get("additionalProperties", True))
        members = [
            (name in required, self._member(name, value, f"{path}/properties/{name}", depth))
            for name, value in properties.items()
            if value is not False or name in required
        ]
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if not members:
            if least > 1:
                unsupported(self._subject, path, "minProperties", " of more than 1 without properties")
            return self._map(others, path, depth, least, most)
        if least > len(required):
            unsupported(self._subject, path, "minProperties", " of more than are required")
        if most is not None and (others is not False or most < len(members)):
            unsupported(self._subject, path, "maxProperties", " of fewer than there can be")
        tail: Node = EMPTY
        if others is not False:
            names = schema.get("properties", {}).keys() | required
            if sum(map(len, names)) > strings.MAX_AVOIDED_CHARS:
                unsupported(self._subject, path, "additionalProperties", " beside so many long names")
            key = strings.other_key(names, self._new_name("key"), self._rules)
            value = self._named(self._schema(others, f"{path}/additionalProperties", depth + 1), "other")
            tail = seq(key, _COLON, value)
        return self._members(members, tail)

    def _members(self, members: list[tuple[bool, Node]], tail: Node) -> Node:
        """Any of the members that are not required, in order, then any number of the tail."""
        more: Node = Repeat(seq(_COMMA, tail), 0, None) if tail != EMPTY else EMPTY
        first: Node = alt([EMPTY, seq(tail, more, _BLANK)]) if tail != EMPTY else EMPTY
        more = seq(more, _BLANK)
        for is_required, member in reversed(members):
            behind = self._named(more, "more")
            here = self._named(seq(member, behind), "members")
            more = seq(_COMMA, here) if is_required else alt([seq(_COMMA, here), behind])
            first = here if is_required else alt([here, self._named(first, "first")])
        return seq(Text(b"{"), _BLANK, first, Text(b"}"))

    def _map(self, values: Schema, path: str, depth: int, least: int, most: int | None) -> Node:
        """An object whose keys are free."""
        if most is not None and most < least:
            return NEVER
        if values is True and (least, most) == (0, None):
            return Rule(_ANY_OBJECT)
        value: Node = NEVER
        if values is not False and most != 0:
            value = self._named(self._schema(values, f"{path}/additionalProperties", depth + 1), "value")
        member = seq(Rule(_STRING), _COLON, value)
        others = Repeat(seq(_COMMA, member), 0, None if most is None else most - 1) if most not in (0, 1) else EMPTY
        body = seq(member, others, _BLANK)
        return seq(Text(b"{"), _BLANK, body if least else optional(body), Text(b"}"))

    def _member(self, name: str, value: Schema, path: str, depth: int) -> Node:
        key = Text(json.dumps(name, ensure_ascii=False).encode())
        return seq(key, _COLON, self._named(self._schema(value, path, depth + 1), "value"))

    def _named(self, node: Node, kind: str) -> Node:
        """A rule for a node that is used more than once, or deep inside others."""
        if isinstance(node, Rule | Text) or node in (EMPTY, NEVER):
            return node
        name = self._new_name(kind)
        self._rules[name] = node
        return Rule(name)

    def _new_name(self, kind: str) -> str:
        if len(self._rules) >= MAX_RULES:
            unusable(self._subject, f"it needs more than {MAX_RULES} rules", "make it smaller")
        return f"{kind}-{next(self._numbers)}-"

    def _define_any(self) -> None:
        """The rules of JSON itself."""
        self._rules[_STRING] = strings.string(0, None, None)
        self._rules[_NUMBER] = numbers.NUMBER
        self._rules[_ANY_OBJECT] = self._map_of_any()
        items = seq(Rule(_ANY), Repeat(seq(_COMMA, Rule(_ANY)), 0, None), _BLANK)
        self._rules[_ANY_ARRAY] = seq(Text(b"["), _BLANK, optional(items), Text(b"]"))
        names = (_ANY_OBJECT, _ANY_ARRAY, _STRING, _NUMBER)
        self._rules[_ANY] = alt([*map(Rule, names), Text(b"true"), Text(b"false"), Text(b"null")])

    def _map_of_any(self) -> Node:
        member = seq(Rule(_STRING), _COLON, Rule(_ANY))
        body = seq(member, Repeat(seq(_COMMA, member), 0, None), _BLANK)
        return seq(Text(b"{"), _BLANK, optional(body), Text(b"}"))


def _literal(value: Any) -> Node:
    """A value in one spelling."""
    return Text(json.dumps(value, ensure_ascii=False, separators=(", ", ": ")).encode())


def _fits_string(value: str, applies: Flat) -> bool | None:
    """Whether a string has the length that is asked for; None where more is asked."""
    if applies.keys() & {"pattern", "format"}:
        return None
    return bool(applies.get("minLength", 0) <= len(value) <= applies.get("maxLength", len(value)))


def _fits_number(value: float, applies: Flat) -> bool | None:
    """Whether a number is within bounds; None where more is asked."""
    if "multipleOf" in applies:
        return None
    is_inside = applies.get("minimum", value) <= value <= applies.get("maximum", value)
    is_out = value <= applies.get("exclusiveMinimum", -math.inf) or value >= applies.get("exclusiveMaximum", math.inf)
    return bool(is_inside and not is_out)
