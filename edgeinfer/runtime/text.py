"""From the bytes of tokens to text that can be shown: whole characters only, and nothing past a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Takes pieces of bytes, gives text as soon as it is certain.

    A multi-byte character waits for its last byte; bytes that are no UTF-8 become U+FFFD. Text that may be the
    beginning of a stop string waits until that is decided. The stop string that is complete first ends the text
    (of two that end together, the longer), and is not part of it. The result does not depend on how the bytes
    are cut.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False
        """Whether a stop string has been found; everything after it is ignored."""

    def feed(self, piece: bytes) -> str:
        """Add bytes; returns the text that has become certain, possibly ""."""
        return self._add(self._decoder.decode(piece))

    def finish(self) -> str:
        """No more bytes will come; returns what was held back."""
        text = self._add(self._decoder.decode(b"", True))
        held, self._held = self._held, ""
        return text + held

    def _add(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        if not self._stop:
            return text
        self._held += text
        found = [(start + len(s), start) for s in self._stop if (start := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            certain, self._held = self._held[: min(found)[1]], ""
            return certain
        certain_length = len(self._held) - self._possible_beginning()
        certain, self._held = self._held[:certain_length], self._held[certain_length:]
        return certain

    def _possible_beginning(self) -> int:
        """The length of the longest end of the held text that a stop string begins with."""
        for length in range(min(max(map(len, self._stop)) - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return length
        return 0
