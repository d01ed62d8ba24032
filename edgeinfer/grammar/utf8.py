"""Runs of code points as runs of bytes: what UTF-8 makes of them."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.grammar.nodes import Span

_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # RFC 3629


def byte_spans(first: int, last: int) -> Iterator[tuple[Span, ...]]:
    """Sequences of byte ranges that together are the encodings of the code points `first` to `last`.

    There must be no surrogates among them.
    """
    start = first
    for end in _LAST_OF_LENGTH:
        if start <= min(end, last):
            yield from _same_length(chr(start).encode(), chr(min(end, last)).encode())
            start = end + 1


def _same_length(low: bytes, high: bytes) -> Iterator[tuple[Span, ...]]:
    """Between two encodings of one length, both included."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    n_rest = len(low) - 1
    lowest, highest = b"\x80" * n_rest, b"\xbf" * n_rest
    if low[0] == high[0]:
        for rest in _same_length(low[1:], high[1:]):
            yield ((low[0], low[0]), *rest)
        return
    begin, end = low[0], high[0]
    if low[1:] != lowest:
        for rest in _same_length(low[1:], highest):
            yield ((begin, begin), *rest)
        begin += 1
    whole_to = end if high[1:] == highest else end - 1
    if begin <= whole_to:
        yield ((begin, whole_to), *(((0x80, 0xBF),) * n_rest))
    if whole_to < end:
        for rest in _same_length(lowest, high[1:]):
            yield ((end, end), *rest)
