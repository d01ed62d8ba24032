"""Numbers within bounds, digit by digit.

At most 15 significant digits are written where bounds matter: so many survive the way through a double, and a number
that is within the bounds as a text is so as a value.
"""

from __future__ import annotations

import math
from decimal import Decimal

from edgeinfer.grammar.nodes import EMPTY, NEVER, Node, Repeat, Text, alt, chars, optional, seq, text

MAX_DIGITS = 40
"""Of a bound."""
_SIGNIFICANT = 15
_DIGIT = chars((0x30, 0x39))
_Bound = tuple[Decimal, bool]
"""A bound, and whether it is itself excluded."""

INTEGER: Node = seq(optional(Text(b"-")), alt([Text(b"0"), seq(chars((0x31, 0x39)), Repeat(_DIGIT, 0, 14))]))
NUMBER: Node = seq(
    INTEGER,
    optional(seq(Text(b"."), Repeat(_DIGIT, 1, 15))),
    optional(seq(chars((0x45, 0x45), (0x65, 0x65)), optional(chars((0x2B, 0x2B), (0x2D, 0x2D))), Repeat(_DIGIT, 1, 2))),
)


def is_too_long(bound: Decimal) -> bool:
    """Whether a bound has more digits than are followed."""
    return bound.adjusted() >= MAX_DIGITS or Decimal(bound).as_tuple().exponent < -_SIGNIFICANT + 1  # type: ignore[operator]


def integer(least: _Bound | None, most: _Bound | None) -> Node:
    """Whole numbers within two bounds; None is none."""
    low = None if least is None else math.floor(least[0]) + 1 if least[1] else math.ceil(least[0])
    high = None if most is None else math.ceil(most[0]) - 1 if most[1] else math.floor(most[0])
    parts = [_natural(max(0, low or 0), high)] if high is None or high >= 0 else []
    if low is None or low < 0:
        parts.append(seq(Text(b"-"), _natural(max(1, -high if high is not None else 1), None if low is None else -low)))
    return alt(parts)


def number(least: _Bound | None, most: _Bound | None) -> Node:
    """Numbers within two bounds; None is none."""
    parts = []
    zero = (Decimal(0), False)
    if most is None or most[0] >= 0:
        parts.append(_magnitude(least if least and least[0] >= 0 else zero, most))
    if least is None or least[0] < 0:
        nearest = (-most[0], most[1]) if most and most[0] <= 0 else zero
        parts.append(seq(Text(b"-"), _magnitude(nearest, None if least is None else (-least[0], least[1]))))
    return alt(parts)


def _magnitude(least: _Bound, most: _Bound | None) -> Node:
    """Numbers without a sign."""
    low, low_fraction = _split(least[0])
    high, high_fraction = _split(most[0]) if most else (None, "")
    n_places = max(_SIGNIFICANT - len(str(low if high is None else high)), 0)
    lower, upper = (low_fraction, least[1]), (high_fraction, most[1]) if most else None
    if high is not None and low > high:
        return NEVER
    if low == high:
        return seq(text(str(low)), _fraction(lower, upper, n_places))
    parts = [seq(text(str(low)), _fraction(lower, None, n_places))]
    if high is not None:
        parts.append(seq(text(str(high)), _fraction(None, upper, n_places)))
    if high is None or low + 1 <= high - 1:
        parts.append(seq(_natural(low + 1, None if high is None else high - 1), _fraction(None, None, n_places)))
    return alt(parts)


def _split(value: Decimal) -> tuple[int, str]:
    """The whole part, and the digits of the rest without zeros behind."""
    whole = int(value)
    digits = f"{value - whole:f}".partition(".")[2].rstrip("0")
    return whole, digits


def _fraction(least: tuple[str, bool] | None, most: tuple[str, bool] | None, n_places: int) -> Node:
    """A fraction, possibly none, of up to so many digits; the bounds are digits, and whether they are excluded."""
    n_places = max(n_places, *(len(bound[0]) for bound in (least, most) if bound), 0)
    if n_places == 0:
        return EMPTY if not ((least and least[1]) or (most and most[1])) else NEVER
    low = (least[0].ljust(n_places, "0"), least[1]) if least else None
    high = (most[0].ljust(n_places, "0"), most[1]) if most else None
    digits = _digits_between(low, high, 0, n_places)
    with_point = seq(Text(b"."), digits)
    return alt([EMPTY, with_point]) if _may_end(low, high, 0) else with_point


def _may_end(low: tuple[str, bool] | None, high: tuple[str, bool] | None, at: int) -> bool:
    """Whether nothing but zeros, after digits equal to the bounds', is within them."""
    if low and (low[0][at:].strip("0") or low[1]):
        return False
    return not (high and high[1] and not high[0][at:].strip("0"))


def _digits_between(low: tuple[str, bool] | None, high: tuple[str, bool] | None, at: int, n_places: int) -> Node:
    """At least one digit from `at` on; a bound counts as long as all digits before were equal to its own."""
    first, last = int(low[0][at]) if low else 0, int(high[0][at]) if high else 9
    rest_length = n_places - at - 1
    if low is None and high is None:
        return Repeat(_DIGIT, 1, rest_length + 1)
    parts: list[Node] = []
    for digit in sorted({first, last}):
        if first <= last:
            below = low if low and digit == first else None
            above = high if high and digit == last else None
            end = [EMPTY] if _may_end(below, above, at + 1) else []
            more = [_digits_between(below, above, at + 1, n_places)] if rest_length else []
            parts.append(seq(text(str(digit)), alt([*end, *more])))
    if first + 1 <= last - 1:
        parts.append(seq(chars((0x30 + first + 1, 0x30 + last - 1)), Repeat(_DIGIT, 0, rest_length)))
    return alt(parts)


def _natural(low: int, high: int | None) -> Node:
    """Whole numbers without a sign; without a bound, up to 15 digits or as many as `low` has."""
    if high is None:
        high = 10 ** max(_SIGNIFICANT, len(str(low))) - 1
    parts: list[Node] = []
    while low <= high:
        upto = min(high, 10 ** len(str(low)) - 1)
        parts.append(_same_length(str(low), str(upto)))
        low = upto + 1
    return alt(parts)


def _same_length(low: str, high: str) -> Node:
    if low == high:
        return text(low)
    n_rest = len(low) - 1
    if not n_rest:
        return _digits(low, high)
    if low[0] == high[0]:
        return seq(text(low[0]), _same_length(low[1:], high[1:]))
    parts: list[Node] = []
    begin, end = int(low[0]), int(high[0])
    if low[1:].strip("0"):
        parts.append(seq(text(low[0]), _same_length(low[1:], "9" * n_rest)))
        begin += 1
    if high[1:].strip("9"):
        parts.append(seq(text(high[0]), _same_length("0" * n_rest, high[1:])))
        end -= 1
    if begin <= end:
        parts.append(seq(_digits(str(begin), str(end)), Repeat(_DIGIT, n_rest, n_rest)))
    return alt(parts)


def _digits(low: str, high: str) -> Node:
    return chars((ord(low), ord(high)))
