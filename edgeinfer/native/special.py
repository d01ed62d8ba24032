"""The tokens that the library looks for in a text before it splits the rest, and where they end it safely."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from edgeinfer.native.library import llama

_KEY_NBYTES = 3


class SpecialTokens:
    """Spellings of control tokens and user-defined ones, to be found fast in texts that may be full of them."""

    FEW_NBYTES: ClassVar[int] = 1 << 14
    """A text this short has no more of them than the library can take."""
    MOST_IN_A_PIECE: ClassVar[int] = 1 << 9

    def __init__(self, spellings: Iterable[bytes]) -> None:
        self._spellings = frozenset(filter(None, spellings))
        self._lengths: dict[bytes, list[int]] = {}
        for length in sorted({(s[:_KEY_NBYTES], len(s)) for s in self._spellings}, key=lambda item: -item[1]):
            self._lengths.setdefault(length[0], []).append(length[1])
        keys = b"|".join(re.escape(key) for key in sorted(self._lengths, key=len, reverse=True))
        self._beginning = re.compile(keys) if keys else None

    @classmethod
    def of(cls, vocab: Any, *, with_control: bool) -> SpecialTokens:
        """Those that the library would find; without `with_control` only the user-defined ones."""
        wanted = llama.LLAMA_TOKEN_ATTR_USER_DEFINED
        if with_control:
            wanted |= llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        attribute, text = llama.llama_vocab_get_attr, llama.llama_vocab_get_text
        n_tokens = int(llama.llama_vocab_n_tokens(vocab))
        return cls(text(vocab, token) for token in range(n_tokens) if attribute(vocab, token) & wanted)

    def cut(self, data: bytes) -> Iterator[bytes]:
        """The text in pieces with at most about `MOST_IN_A_PIECE` tokens each: one piece, of almost every text.

        A piece but the last ends with a token that the library finds there in any case. It takes the longest first, so
        that is one that no longer one overlaps, nor one as long that is another; the same again begins later and loses.
        """
        start = n_found = 0
        for end, is_certain in self._found(data):
            n_found += 1
            if is_certain and n_found >= self.MOST_IN_A_PIECE and not data[end : end + 1].isspace():
                yield data[start:end]
                start, n_found = end, 0
        if start < len(data) or start == 0:
            yield data[start:]

    def _found(self, data: bytes) -> Iterator[tuple[int, bool]]:
        """Where the next token, or several that overlap, end; whether it is one that nothing can take the place of."""
        if self._beginning is None:
            return
        at = 0
        while found := self._beginning.search(data, at):
            at = found.start() + 1
            if not (length := self._longest(data, found.start())):
                continue
            end, is_certain = found.start() + length, True
            spelling = data[found.start() : end]
            while inner := self._beginning.search(data, at, end + _KEY_NBYTES - 1):
                if inner.start() >= end:
                    break
                at = inner.start() + 1
                other = self._longest(data, inner.start())
                if inner.start() + other <= end:
                    continue
                loses = other < length or data[inner.start() : inner.start() + other] == spelling
                if not is_certain or not loses:
                    end, is_certain = inner.start() + other, False
            at = end
            yield end, is_certain

    def _longest(self, data: bytes, start: int) -> int:
        """The length of the longest spelling that begins here, 0 if none does."""
        for n_key in range(_KEY_NBYTES, 0, -1):
            for length in self._lengths.get(data[start : start + n_key], ()):
                if data[start : start + length] in self._spellings:
                    return length
        return 0
