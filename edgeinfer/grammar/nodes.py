"""What a grammar is made of: rules by name, each a tree of these nodes. Texts are UTF-8, characters code points."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from edgeinfer.errors import UnusableInputError

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""No characters of their own: UTF-8 has no bytes for them."""
ROOT = "root"

Span = tuple[int, int]
"""The first and the last of a run of code points."""


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly these bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these, ascending and without overlap."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; of none, nothing."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of them; of none, nothing at all matches."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` of it; None is without end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What the rule of this name says."""

    name: str


Node = Text | Chars | Seq | Alt | Repeat | Rule


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules; `subject` is what messages call it. The text begins with the rule `root`."""

    rules: dict[str, Node]
    subject: str


MAX_REASON_CHARS = 250
EMPTY = Seq(())
NEVER = Alt(())


def text(value: str) -> Text:
    """These characters."""
    return Text(value.encode())


def seq(*parts: Node) -> Node:
    """One after the other."""
    return parts[0] if len(parts) == 1 else Seq(parts)


def alt(parts: Iterable[Node]) -> Node:
    """One of them."""
    found = tuple(parts)
    return found[0] if len(found) == 1 else Alt(found)


def optional(part: Node) -> Node:
    """It, or nothing."""
    return Alt((part, EMPTY))


def chars(*spans: Span) -> Chars:
    """One character of these runs, given in any order; surrogates are left out."""
    low, high = SURROGATES
    cut = [half for a, b in spans for half in ((a, min(b, low - 1)), (max(a, high + 1), b)) if half[0] <= half[1]]
    merged: list[Span] = []
    for first, last in sorted(cut):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return Chars(tuple(merged))


def complement(spans: Iterable[Span]) -> Chars:
    """Every character but these."""
    rest, start = [], 0
    for first, last in chars(*spans).spans:
        rest.append((start, first - 1))
        start = last + 1
    return chars(*((a, b) for a, b in [*rest, (start, MAX_CODE_POINT)] if a <= b))


def unusable(subject: str, reason: str, hint: str) -> NoReturn:
    """Refuse a grammar or a schema, in a line of bounded length."""
    shown = reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 3] + "..."
    raise UnusableInputError(f"{subject}: {shown}", hint)
