"""Strings as JSON writes them: free, of a length, of a pattern, of a format, or any but some."""

from __future__ import annotations

import json
from collections.abc import Iterable

from edgeinfer.errors import UnusableInputError
from edgeinfer.grammar.json_schema.regex import Pattern, length_of, parse_pattern
from edgeinfer.grammar.nodes import (
    EMPTY,
    Alt,
    Chars,
    Node,
    Repeat,
    Rule,
    Seq,
    Span,
    Text,
    alt,
    chars,
    complement,
    seq,
    text,
)

MAX_AVOIDED_CHARS = 10_000
"""Of all names together that `other_key` can leave out."""
QUOTE = Text(b'"')
_ESCAPED: tuple[Span, ...] = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""Characters that a string cannot hold as they are."""
_PLAIN = complement(_ESCAPED)
_HEX = chars((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
_OCTAL = chars((0x30, 0x37))
_D = chars((0x44, 0x44), (0x64, 0x64))
_HIGH_HALF = seq(_D, chars((0x38, 0x39), (0x41, 0x42), (0x61, 0x62)), _HEX, _HEX)
_LOW_HALF = seq(_D, chars((0x43, 0x46), (0x63, 0x66)), _HEX, _HEX)
_NOT_D = chars((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66))
CHARACTER: Node = alt(
    [
        _PLAIN,
        seq(
            Text(b"\\"),
            alt(
                [
                    chars(*((ord(c), ord(c)) for c in '"\\/bfnrt')),
                    # Halves of a pair only together: alone they are no text.
                    seq(Text(b"u"), alt([seq(_NOT_D, _HEX, _HEX, _HEX), seq(_D, _OCTAL, _HEX, _HEX)])),
                    seq(Text(b"u"), _HIGH_HALF, Text(b"\\u"), _LOW_HALF),
                ]
            ),
        ),
    ]
)
"""One character, as it is or escaped."""

_DATE = (
    r"[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_LEAST = r"[A-Za-z0-9_+-]{1,30}"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "email": rf"^{_LEAST}(?:\.{_LEAST})?@{_LABEL}(?:\.{_LABEL})?\.[a-z]{{2,10}}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
    "uri": rf"^https?://{_LABEL}(?:\.{_LABEL}){{1,3}}(?:/[A-Za-z0-9_.~-]{{1,30}}){{0,8}}/?$",
}


def string(least: int, most: int | None, pattern: str | None) -> Node:
    """A string of `least` to `most` characters (None: any number), or one that a pattern is found in.

    Raises UnusableInputError for a pattern that is not regular, or that says nothing of the asked length.
    """
    if pattern is None:
        return seq(QUOTE, Repeat(CHARACTER, least, most) if most != 0 else EMPTY, QUOTE)
    parsed = parse_pattern(pattern)
    body = _of_length(parsed, least, most)
    before = EMPTY if parsed.from_start else Repeat(CHARACTER, 0, None)
    after = EMPTY if parsed.to_end else Repeat(CHARACTER, 0, None)
    return seq(QUOTE, before, _in_json(body), after, QUOTE)


def _of_length(pattern: Pattern, least: int, most: int | None) -> Node:
    """The pattern, within a length too."""
    node, is_whole = pattern.node, pattern.from_start and pattern.to_end
    shortest, longest = length_of(node)
    if shortest >= least and (most is None or (is_whole and longest is not None and longest <= most)):
        return node
    if is_whole and isinstance(node, Repeat) and isinstance(node.part, Chars):
        low = max(least, node.least)
        high = min(n for n in (most, node.most) if n is not None) if (most, node.most) != (None, None) else None
        if high is not None and high < low:
            return Alt(())
        return Repeat(node.part, low, high) if high != 0 else EMPTY
    raise UnusableInputError(
        "a pattern (or format) together with a length that it does not imply", "write the length into the pattern"
    )


def _in_json(node: Node) -> Node:
    """A node over decoded characters as one over JSON's spelling of them."""
    match node:
        case Chars(spans):
            return alt([part for part in (_plain(spans), *_escaped(spans)) if part is not None])
        case Seq(parts):
            return Seq(tuple(map(_in_json, parts)))
        case Alt(parts):
            return Alt(tuple(map(_in_json, parts)))
        case Repeat(part, least, most):
            return Repeat(_in_json(part), least, most)
    return node


def _plain(spans: tuple[Span, ...]) -> Node | None:
    kept = complement([*complement(spans).spans, *_ESCAPED])
    return kept if kept.spans else None


def _escaped(spans: tuple[Span, ...]) -> list[Node]:
    """Those characters that have to be escaped."""
    codes = [code for low, high in _ESCAPED for code in range(low, high + 1)]
    wanted = [code for code in codes if any(first <= code <= last for first, last in spans)]
    return [Text(json.dumps(chr(code))[1:-1].encode()) for code in wanted]


def other_key(names: Iterable[str], prefix: str, rules: dict[str, Node]) -> Node:
    """A key that is none of these names; its rules get names that begin with `prefix`.

    Written without escapes, so that what is compared is what it means.
    """
    tree: dict[str, dict[str, bool]] = {"": {}}  # by what names begin with: the next characters
    wanted = {name for name in names if all(_is_plain(c) for c in name)}
    for name in wanted:
        for i, c in enumerate(name):
            tree.setdefault(name[:i], {})[c] = True
            tree.setdefault(name[: i + 1], {})
    rest = Repeat(_PLAIN, 0, None)
    numbers = {beginning: f"{prefix}{i}" for i, beginning in enumerate(tree)}
    for beginning, following in tree.items():
        others = complement([*_ESCAPED, *((ord(c), ord(c)) for c in following)])
        parts: list[Node] = [seq(others, rest)]
        parts += [seq(text(c), Rule(numbers[beginning + c])) for c in following]
        rules[numbers[beginning]] = alt(parts if beginning in wanted else [EMPTY, *parts])
    return seq(QUOTE, Rule(numbers[""]), QUOTE)


def _is_plain(c: str) -> bool:
    return any(first <= ord(c) <= last for first, last in _PLAIN.spans)
