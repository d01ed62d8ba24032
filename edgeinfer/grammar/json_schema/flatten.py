"""References and combinations resolved: a schema as a list of flat ones, of which a value must match any."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from edgeinfer.errors import UnusableInputError
from edgeinfer.grammar.json_schema.keywords import Flat, Schema, check, flat, refuse
from edgeinfer.grammar.json_schema.merge import NOT, merged

REF = "$ref"
MAX_ALTERNATIVES = 1000
MAX_DEPTH = 100
"""Of references and combinations in each other."""
MAX_SCHEMAS = 20_000
"""Flattened in all."""


class Flattener:
    """Over one document. References go to parts of it."""

    def __init__(self, document: Schema, subject: str) -> None:
        self._document = document
        self._subject = subject
        self._n_flattened = 0
        self._expanded: dict[str, list[Flat]] = {}

    def alternatives(self, schema: Schema, path: str, depth: int = 0) -> list[Flat]:
        """The flat schemas of which a value must match any.

        One that is nothing but a reference (and what it must not be) stays one, so that recursion has an end.
        """
        self._n_flattened += 1
        if depth > MAX_DEPTH or self._n_flattened > MAX_SCHEMAS:
            refuse(self._subject, path, "the schema is nested too deeply or too large", "make it smaller")
        check(schema, self._subject, path)
        if isinstance(schema, bool):
            return [{}] if schema else []
        found = [flat(schema)]
        if REF in schema:
            self.target(schema[REF], path)  # exists
            found = self._product(found, [{REF: schema[REF]}], path, depth)
        for i, part in enumerate(schema.get("allOf", ())):
            found = self._product(found, self.alternatives(part, f"{path}/allOf/{i}", depth + 1), path, depth)
        if "anyOf" in schema:
            any_of = [self.alternatives(part, f"{path}/anyOf/{i}", depth + 1) for i, part in enumerate(schema["anyOf"])]
            found = self._product(found, [a for branch in any_of for a in branch], path, depth)
        if "oneOf" in schema:
            found = self._product(found, self._one_of(schema["oneOf"], f"{path}/oneOf", depth), path, depth)
        return found

    def expanded(self, alternative: Flat, path: str, depth: int = 0) -> list[Flat]:
        """The alternatives of what a reference refers to, with what stands beside it."""
        if REF not in alternative:
            return [alternative]
        reference = alternative[REF]
        if len(alternative) == 1 and reference in self._expanded:
            return self._expanded[reference]
        beside = {key: value for key, value in alternative.items() if key != REF}
        target = self.alternatives(self.target(reference, path), reference, depth + 1)
        found = self._product([beside], [b for a in target for b in self.expanded(a, path, depth + 1)], path, depth)
        if len(alternative) == 1:
            self._expanded[reference] = found
        return found

    def target(self, reference: str, path: str) -> Schema:
        """What a reference refers to. Raises UnusableInputError for nothing, and for other documents."""
        if reference != "#" and not reference.startswith("#/"):
            refuse(self._subject, path, f"$ref {reference!r} is not a part of this schema", "refer to #/$defs/...")
        found: Any = self._document
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and len(key) < 10 and int(key) < len(found):
                found = found[int(key)]
            else:
                refuse(self._subject, path, f"$ref {reference!r} refers to nothing", "check the path")
        return found

    def _one_of(self, parts: list[Schema], path: str, depth: int) -> list[Flat]:
        """Each branch with the others as what it must not be."""
        branches = [self.alternatives(part, f"{path}/{i}", depth + 1) for i, part in enumerate(parts)]
        found = []
        for i, branch in enumerate(branches):
            others = [a for j, other in enumerate(branches) if j != i for a in other]
            found += [{**a, NOT: [*a.get(NOT, ()), *others]} for a in branch]
        return found

    def _product(self, left: list[Flat], right: list[Flat], path: str, depth: int) -> list[Flat]:
        """Every one of the left with every one of the right, where that can be."""
        if len(left) * len(right) > MAX_ALTERNATIVES:
            refuse(self._subject, path, f"more than {MAX_ALTERNATIVES} combinations of alternatives", "make it smaller")
        found = []
        for a in left:
            for b in right:
                if (is_reference(a) and b.keys() - {NOT}) or (is_reference(b) and a.keys() - {NOT}):
                    pairs = [
                        (x, y) for x in self.expanded(a, path, depth + 1) for y in self.expanded(b, path, depth + 1)
                    ]
                else:
                    pairs = [(a, b)]
                found += [both for x, y in pairs if (both := self._merged(x, y, path)) is not None]
        if len(found) > MAX_ALTERNATIVES:
            refuse(self._subject, path, f"more than {MAX_ALTERNATIVES} combinations of alternatives", "make it smaller")
        return found

    def _merged(self, a: Flat, b: Flat, path: str) -> Flat | None:
        try:
            return merged(a, b)
        except UnusableInputError as error:
            refuse(self._subject, path, error.message, error.hint)


def is_reference(schema: Flat) -> bool:
    """Whether a flat schema is a reference, and nothing of its own."""
    return REF in schema
