"""Followed grammars over the fake vocabulary of bytes, and random schemas."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import strategies as st

from edgeinfer.grammar.constraint import Lexicon, TokenGrammar
from edgeinfer.grammar.gbnf import parse_gbnf
from edgeinfer.grammar.json_schema.compiler import compile_schema
from edgeinfer.runtime.fake import FakeVocabulary

LEXICON = Lexicon(FakeVocabulary())
CLOSING = frozenset(b'"]},:0 ')
"""Bytes that bring a text of JSON to its end."""


class Among:
    """A constraint that allows some tokens, wherever it stands."""

    is_complete = False

    def __init__(self, allowed, n_choices):
        self._allowed, self.n_choices = allowed, n_choices
        self.n_masks = 0

    def allows(self, token):
        return bool(self._allowed[token])

    def allowed_of(self, tokens):
        return filter(self.allows, tokens)

    def allowed(self):
        self.n_masks += 1
        return self._allowed

    def accept(self, token):
        pass


def of_gbnf(source):
    return TokenGrammar(parse_gbnf(source), LEXICON)


def of_schema(schema):
    return TokenGrammar(compile_schema(schema), LEXICON)


def standing(grammar, text):
    """`dead`, `more` (must go on), `end` (may end), `complete` (must end) after a text."""
    data = text.encode() if isinstance(text, str) else text
    automaton = grammar.automaton
    automaton.rest()
    row = grammar.after(automaton.row(automaton.start), data)
    if row == 0:
        return "dead"
    position = automaton.position(row)
    return ("complete" if position.must_end else "end") if position.can_end else "more"


def written(grammar, seed, most=2000):
    """A random text of a grammar, or None where it did not end in time."""
    constraint, rng, text = grammar.constraint(), random.Random(seed), bytearray()
    for _ in range(most):
        if constraint.is_complete:
            return bytes(text)
        allowed = np.flatnonzero(constraint.allowed()).tolist()
        if any(token > 255 for token in allowed) and rng.random() < 0.5:
            return bytes(text)
        closing = [token for token in allowed if token in CLOSING] if rng.random() < 0.4 else []
        token = rng.choice(closing or [token for token in allowed if token < 256])
        constraint.accept(token)
        text.append(token)
    return None


_NAMES = st.sampled_from(["a", "b", "ab", "name", "é", 'q"x', "x\ny", ""])
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-1000, 1000),
        st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3)),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_NAMES, inner, max_size=3)),
    max_leaves=5,
)
_BOUNDS = st.one_of(st.integers(-2000, 2000), st.integers(-(10**6), 10**6).map(lambda n: n / 1000))


@st.composite
def _numbers(draw):
    schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if draw(st.integers(0, 3)) == 0:
            schema[keyword] = draw(_BOUNDS)
    return schema


@st.composite
def _strings(draw):
    schema = {"type": "string"}
    kind = draw(st.integers(0, 4))
    if kind == 0:
        schema["pattern"] = draw(
            st.sampled_from(
                [
                    *(
                        r"^[a-z]+$",
                        r"^\d{2,4}-[A-F]*$",
                        "x",
                        r"^(foo|ba[rz])?$",
                        r'["\\]',
                        r"^[^a]{0,3}$",
                        r"^.\w\W\s\S$",
                    ),
                    *(r"^\u00e9\x41", r"(ab)+c?$", "^a|^b", r"[\d.-]", r"^[\^\]]$", r"^[^\d]$", "^a{3}?b{,2}$"),
                ]
            )
        )
    elif kind == 1:
        schema["format"] = draw(
            st.sampled_from(["date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "uri"])
        )
    else:
        for keyword in ("minLength", "maxLength"):
            if draw(st.booleans()):
                schema[keyword] = draw(st.integers(0, 12))
    return schema


@st.composite
def _objects(draw, inner):
    names = draw(st.lists(_NAMES, unique=True, max_size=4))
    schema = {"type": "object", "properties": {name: draw(inner) for name in names}}
    schema["required"] = draw(st.lists(st.sampled_from([*names, "other"]), unique=True, max_size=3))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(inner)
    elif draw(st.integers(0, 2)) == 0:
        schema["maxProperties"] = draw(st.integers(len({*names, *schema["required"]}), 9))
    return schema


@st.composite
def _arrays(draw, inner):
    schema = {"type": "array"}
    if draw(st.booleans()):
        schema["items"] = draw(inner)
    if draw(st.integers(0, 2)) == 0:
        schema["prefixItems"] = draw(st.lists(inner, max_size=3))
    for keyword in ("minItems", "maxItems"):
        if draw(st.integers(0, 2)) == 0:
            schema[keyword] = draw(st.integers(0, 4))
    return schema


@st.composite
def _combined(draw, inner):
    kind = draw(st.sampled_from(["anyOf", "oneOf", "allOf"]))
    schema = draw(inner) if draw(st.integers(0, 3)) == 0 else {}
    schema = dict(schema) if isinstance(schema, dict) else {}
    return {**schema, kind: draw(st.lists(inner, min_size=1, max_size=3))}


_LEAVES = st.one_of(
    st.booleans(),
    st.just({}),
    st.builds(lambda v: {"const": v}, _VALUES),
    st.builds(lambda v: {"enum": v}, st.lists(_VALUES, max_size=4)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "string", "null"], "minimum": 3}]),
    st.sampled_from([{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/leaf"}]),
    _numbers(),
    _strings(),
)
TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["value"],
}


@st.composite
def schemas(draw):
    """JSON Schemas of all keywords that are known, also contradictory ones."""
    schema = draw(
        st.recursive(_LEAVES, lambda inner: st.one_of(_objects(inner), _arrays(inner), _combined(inner)), max_leaves=6)
    )
    if isinstance(schema, bool):
        return schema
    return {**schema, "$defs": {"tree": TREE, "leaf": {"type": "integer", "minimum": 0}}}
