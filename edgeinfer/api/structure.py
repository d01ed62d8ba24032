"""What answers of a model may be held to: JSON Schemas and grammars, each made ready once."""

from __future__ import annotations

import json
from typing import Any

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.grammar.constraint import Lexicon, TokenGrammar
from edgeinfer.grammar.gbnf import parse_gbnf
from edgeinfer.grammar.json_schema.compiler import parse_schema
from edgeinfer.grammar.nodes import Grammar
from edgeinfer.types import Constraint, Vocabulary

_MAX_KEPT = 16


class Structures:
    """For one vocabulary. What has been computed for a grammar serves all answers that are held to it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._lexicon = Lexicon(vocabulary)
        self._kept: dict[tuple[bool, str], TokenGrammar] = {}

    def constraint(self, json_schema: Any, grammar: str | Grammar | None) -> Constraint:
        """What a new answer is held to: one of the two, the other is None.

        A schema is a text, or what JSON makes of one. Raises UsageError for both at once, UnusableInputError for what
        is neither a schema nor a grammar that can be followed.
        """
        if json_schema is not None and grammar is not None:
            raise UsageError("both a JSON Schema and a grammar are given", "give one of them")
        self._lexicon.prepare()
        if isinstance(grammar, Grammar):
            return TokenGrammar(grammar, self._lexicon).constraint()
        source = grammar if grammar is not None else _as_text(json_schema)
        key = (grammar is None, source)
        if key not in self._kept:
            parsed = parse_schema(source) if grammar is None else parse_gbnf(source)
            if len(self._kept) >= _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = TokenGrammar(parsed, self._lexicon)
        return self._kept[key].constraint()

    def close(self) -> None:
        """Wait for what reads the vocabulary, which is about to go."""
        self._lexicon.close()


def _as_text(json_schema: Any) -> str:
    if isinstance(json_schema, str):
        return json_schema
    try:
        return json.dumps(json_schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableInputError(f"the schema is not JSON: {error}", "give a JSON Schema") from None
