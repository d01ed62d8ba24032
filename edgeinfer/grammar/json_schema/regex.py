"""Regular expressions, as far as they are regular: what `pattern` may say.

Where ECMAScript and Python disagree (\\w, \\d, \\s and their opposites beyond ASCII), only what both accept is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from edgeinfer.errors import UnusableInputError
from edgeinfer.grammar.nodes import EMPTY, Alt, Chars, Node, Repeat, Seq, Span, alt, chars, complement, seq

MAX_CHARS = 10_000
MAX_DEPTH = 32
MAX_REPEATS = 100_000

_DIGITS: tuple[Span, ...] = ((0x30, 0x39),)
_WORDS: tuple[Span, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: tuple[Span, ...] = ((0x09, 0x0D), (0x20, 0x20))
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_BREAKS: tuple[Span, ...] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
_BRACES = re.compile(r"\{(\d{1,6})(?:(,)(\d{1,6})?)?\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression over decoded characters, and whether it must reach the ends of the text."""

    node: Node
    from_start: bool
    to_end: bool


def parse_pattern(source: str) -> Pattern:
    """Read an expression. Raises UnusableInputError with what is not supported in it."""
    if len(source) > MAX_CHARS:
        raise UnusableInputError(f"a pattern longer than {MAX_CHARS} characters", "shorten it")
    parser = _Parser(source)
    branches = parser.branches()
    if len({(from_start, to_end) for _, from_start, to_end in branches}) > 1:
        raise UnusableInputError(f"pattern {source!r}: ^ and $ in some of the alternatives only", "put (?:...) around")
    _, from_start, to_end = branches[0]
    return Pattern(alt(node for node, _, _ in branches), from_start, to_end)


def length_of(node: Node) -> tuple[int, int | None]:
    """The least and the most characters (None: without end) that a node over decoded characters matches."""
    match node:
        case Chars():
            return 1, 1
        case Seq(parts):
            lengths = [length_of(part) for part in parts]
            mosts = [most for _, most in lengths if most is not None]
            return sum(least for least, _ in lengths), sum(mosts) if len(mosts) == len(lengths) else None
        case Alt(parts):
            lengths = [length_of(part) for part in parts]
            mosts = [most for _, most in lengths if most is not None]
            return min(least for least, _ in lengths), max(mosts) if len(mosts) == len(lengths) else None
        case Repeat(part, least, most):
            low, high = length_of(part)
            return low * least, None if most is None or high is None else high * most
    raise AssertionError(node)


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def branches(self) -> list[tuple[Node, bool, bool]]:
        """The alternatives of the whole, each with its anchors."""
        found = []
        while True:
            from_start = self._take("^")
            node = self._sequence(0)
            to_end = self._take("$")
            found.append((node, from_start, to_end))
            if not self._take("|"):
                break
        if self._at < len(self._source):
            self._refuse(f"{self._peek()!r} here")
        return found

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self._refuse(f"groups in each other deeper than {MAX_DEPTH}")
        found = [self._sequence(depth)]
        while self._take("|"):
            found.append(self._sequence(depth))
        return alt(found)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")", "$"):
            part = self._part(depth)
            repeat = self._repeat(part)
            if repeat is not None and self._repeat(part) is not None:
                self._refuse("an operator after another")
            parts.append(part if repeat is None else repeat)
        return seq(*parts)

    def _part(self, depth: int) -> Node:
        c = self._peek()
        self._at += 1
        if c == "(":
            if self._source.startswith("?", self._at) and not self._take("?:"):
                self._refuse("a group that begins with (?")
            inner = self._alternatives(depth + 1)
            if not self._take(")"):
                self._refuse("a group without an end")
            return inner
        if c == "[":
            return self._class()
        if c == ".":
            return complement(_BREAKS)
        if c == "\\":
            spans, is_opposite = self._escape()
            return _ascii_complement(spans) if is_opposite else chars(*spans)
        if c in "*+?{^":
            self._refuse(f"{c!r} here")
        return chars((ord(c), ord(c)))

    def _repeat(self, part: Node) -> Node | None:
        least_most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if least_most is not None:
            self._at += 1
            least, most = least_most
        elif found := _BRACES.match(self._source, self._at):
            self._at = found.end()
            least = int(found[1])
            most = int(found[3]) if found[3] else (None if found[2] else least)
            if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
                self._refuse(f"{found[0]} is no range up to {MAX_REPEATS}")
        else:
            return None
        self._take("?")  # a lazy operator matches the same texts
        return Repeat(part, least, most) if most != 0 else EMPTY

    def _class(self) -> Chars:
        is_opposite = self._take("^")
        spans: list[Span] = []
        ascii_only = False
        while self._peek() != "]":
            first = self._class_part()
            if first is None:
                continue
            found, opposite = first
            if opposite:
                spans += _ascii_complement(found).spans
                ascii_only = True
            elif len(found) > 1 or found == _DIGITS:
                spans += found
                ascii_only = True
            elif self._peek() == "-" and self._source[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._class_part()
                if last is None or last[1] or last[0][0][0] != last[0][-1][1] or last[0][0][0] < found[0][0]:
                    self._refuse("a range of characters that is none")
                spans.append((found[0][0], last[0][0][1]))
            else:
                spans += found
        self._at += 1
        node = chars(*spans)
        if is_opposite:
            node = _ascii_complement(spans) if ascii_only else complement(spans)
        if not node.spans:
            self._refuse("a class without characters")
        return node

    def _class_part(self) -> tuple[tuple[Span, ...], bool] | None:
        c = self._peek()
        if c == "":
            self._refuse("a class without an end")
        self._at += 1
        return self._escape() if c == "\\" else (((ord(c), ord(c)),), False)

    def _escape(self) -> tuple[tuple[Span, ...], bool]:
        """The characters of an escape, and whether it means the opposite of them."""
        c = self._peek()
        if c.lower() in _SETS and c:
            self._at += 1
            return _SETS[c.lower()], c.isupper()
        if found := _HEX.match(self._source, self._at):
            self._at = found.end()
            value = int(found[1] or found[2], 16)
            if 0xD800 <= value <= 0xDFFF:
                self._refuse(f"the escape \\{found[0]}")
        elif c in _CONTROLS or (c.isascii() and c.isprintable() and c and not c.isalnum()):
            self._at += 1
            value = _CONTROLS.get(c, ord(c))
        else:
            self._refuse(f"the escape \\{c}")
        return ((value, value),), False

    def _take(self, what: str) -> bool:
        found = self._source.startswith(what, self._at)
        self._at += len(what) if found else 0
        return found

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _refuse(self, reason: str) -> NoReturn:
        shown = self._source if len(self._source) <= 40 else self._source[:37] + "..."
        raise UnusableInputError(
            f"pattern {shown!r}: {reason} is not supported", "use literals, classes, groups, | * + ? {n,m}, ^ and $"
        )


def _ascii_complement(spans: tuple[Span, ...] | list[Span]) -> Chars:
    """The other characters of ASCII."""
    return complement([*spans, (0x80, 0x10FFFF)])
