"""llama.cpp's grammar notation (GBNF), read into rules.

root ::= "yes" | "no" [.!]{1,3}      # literals, classes, groups, * + ? {n} {n,} {n,m}, . for any character
"""

from __future__ import annotations

import re
from itertools import count
from typing import NoReturn

from edgeinfer.grammar.nodes import EMPTY, ROOT, Chars, Grammar, Node, Repeat, Rule, Text, chars, complement, unusable
from edgeinfer.grammar.nodes import alt as alt_of
from edgeinfer.grammar.nodes import seq as seq_of

MAX_CHARS = 1 << 20
MAX_RULES = 10_000
MAX_DEPTH = 64
"""Of parentheses in each other, and of operators on one element."""
MAX_REPEATS = 1_000_000

_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_BRACES = re.compile(r"\{[ \t]*(\d{1,9})?[ \t]*(,?)[ \t]*(\d{1,9})?[ \t]*\}")
_LITERAL_RUN = re.compile(r'[^"\\\r\n]+')
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_HEX = {"x": re.compile(r"[0-9a-fA-F]{2}"), "u": re.compile(r"[0-9a-fA-F]{4}"), "U": re.compile(r"[0-9a-fA-F]{8}")}
_HINT = "see docs/structured.md for the notation"


def parse_gbnf(source: str, subject: str = "the grammar") -> Grammar:
    """The rules of a grammar. Raises UnusableInputError for what is no grammar, with the line."""
    if len(source) > MAX_CHARS:
        unusable(subject, f"it is longer than {MAX_CHARS} characters", "shorten it")
    if _SURROGATE.search(source):
        unusable(subject, "it is not valid Unicode", "give UTF-8 text")
    return _Parser(source, subject).grammar()


class _Parser:
    def __init__(self, source: str, subject: str) -> None:
        self._source = source
        self._subject = subject
        self._at = 0
        self._rules: dict[str, Node] = {}
        self._used: dict[str, int] = {}  # the names that rules refer to, and where first

    def grammar(self) -> Grammar:
        self._skip(_BLANK_LINES)
        while self._at < len(self._source):
            self._rule()
            self._skip(_BLANK_LINES)
        for name, at in self._used.items():
            if name not in self._rules:
                self._refuse(f"there is no rule {name!r}", at)
        if ROOT not in self._rules:
            unusable(self._subject, f"there is no rule {ROOT!r}", f"the text begins with the rule {ROOT}: write one")
        return Grammar(self._rules, self._subject)

    def _rule(self) -> None:
        at = self._at
        name = self._name()
        self._skip(_BLANK)
        if not self._source.startswith("::=", self._at):
            self._refuse(f"after the name {name!r} stands no ::=")
        self._at += 3
        self._skip(_BLANK_LINES)
        if name in self._rules:
            self._refuse(f"there are two rules {name!r}", at)
        if len(self._rules) >= MAX_RULES:
            self._refuse(f"it has more than {MAX_RULES} rules", at)
        self._rules[name] = self._alternatives(depth=0)
        if self._at < len(self._source) and self._peek() not in "\r\n":
            self._refuse(f"unexpected {self._peek()!r}")

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self._refuse(f"parentheses in each other deeper than {MAX_DEPTH}")
        found = [self._sequence(depth)]
        while self._next_alternative():
            found.append(self._sequence(depth))
        return alt_of(found)

    def _next_alternative(self) -> bool:
        """Go over a `|`, which may stand on the next line: no rule begins with it."""
        blank = _BLANK_LINES.match(self._source, self._at)
        at = blank.end() if blank else self._at
        if self._source[at : at + 1] != "|":
            return False
        self._at = at + 1
        self._skip(_BLANK_LINES)
        return True

    def _sequence(self, depth: int) -> Node:
        blank = _BLANK_LINES if depth else _BLANK
        parts: list[Node] = []
        while (part := self._part(depth)) is not None:
            self._skip(blank)
            for n_operators in count():
                repeat = self._repeat(part)
                if repeat is None:
                    break
                if n_operators >= MAX_DEPTH:
                    self._refuse(f"more than {MAX_DEPTH} operators on one element")
                part = repeat
                self._skip(blank)
            parts.append(part)
        return seq_of(*parts)

    def _part(self, depth: int) -> Node | None:
        """The next element, None where the sequence ends."""
        match self._peek():
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return complement(())
            case "(":
                self._at += 1
                self._skip(_BLANK_LINES)
                inner = self._alternatives(depth + 1)
                self._expect(")")
                return inner
            case "<" | "!":
                self._refuse("tokens of a vocabulary are not supported")
            case c if _NAME.match(c):
                at = self._at
                name = self._name()
                self._used.setdefault(name, at)
                return Rule(name)
        return None

    def _repeat(self, part: Node) -> Node | None:
        """What an operator makes of an element; None where there is no operator."""
        least_most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if least_most is not None:
            self._at += 1
            return Repeat(part, *least_most)
        if self._peek() != "{":
            return None
        found = _BRACES.match(self._source, self._at)
        if found is None or (found[1] is None and found[3] is None):
            self._refuse("braces that are none of {n}, {n,}, {n,m}")
        least = int(found[1] or 0)
        most = int(found[3]) if found[3] else (None if found[2] else least)
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            self._refuse(f"{found[0]} is no range up to {MAX_REPEATS}")
        self._at = found.end()
        return Repeat(part, least, most) if most != 0 else EMPTY

    def _literal(self) -> Node:
        self._at += 1
        parts: list[str] = []
        while self._peek() != '"':
            if run := _LITERAL_RUN.match(self._source, self._at):
                parts.append(run[0])
                self._at = run.end()
            else:
                parts.append(self._char())
        self._at += 1
        return Text("".join(parts).encode())

    def _class(self) -> Chars:
        at = self._at
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        spans = []
        while self._peek() != "]":
            first = last = ord(self._char())
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = ord(self._char())
            if last < first:
                self._refuse("a range of characters that runs backwards")
            spans.append((first, last))
        self._at += 1
        found = complement(spans) if is_negated else chars(*spans)
        if not found.spans:
            self._refuse("a class without characters", at)
        return found

    def _char(self) -> str:
        """One character of a literal or a class, spelled out or escaped."""
        c = self._peek()
        if c in ("", "\r", "\n"):
            self._refuse("a literal or a class that does not end on its line")
        self._at += 1
        if c != "\\":
            return c
        kind = self._peek()
        self._at += 1
        if kind in _HEX:
            digits = _HEX[kind].match(self._source, self._at)
            value = int(digits[0], 16) if digits else -1
            if not 0 <= value <= 0x10FFFF or 0xD800 <= value <= 0xDFFF:
                self._refuse(f"\\{kind} without the number of a character")
            self._at += len(digits[0]) if digits else 0
            return chr(value)
        if kind not in _ESCAPES:
            self._refuse(f"the escape \\{kind} is not known")
        return _ESCAPES[kind]

    def _name(self) -> str:
        found = _NAME.match(self._source, self._at)
        if found is None:
            self._refuse(f"unexpected {self._peek()!r}")
        self._at = found.end()
        return found[0]

    def _expect(self, c: str) -> None:
        if self._peek() != c:
            self._refuse(f"{c!r} is missing")
        self._at += 1

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._source, self._at)
        self._at = found.end() if found else self._at

    def _refuse(self, reason: str, at: int | None = None) -> NoReturn:
        line = self._source.count("\n", 0, self._at if at is None else at) + 1
        unusable(self._subject, f"line {line}: {reason}", _HINT)
