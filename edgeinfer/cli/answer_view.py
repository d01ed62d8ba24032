"""An answer on a terminal while it streams: its reasoning dimmed or folded to a line, then the answer itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from os import terminal_size
from typing import Protocol

from edgeinfer.cli import console
from edgeinfer.runtime.reasoning import Part, ReasoningSplitter

MIN_COLUMNS = 40
_DIM, _RESET, _TO_LINE_START = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
_PLAIN_TITLES = ("(reasoning)", "(answer)")


class AnswerView:
    """Feed what a model says, call `end`; `write` puts text on the terminal at once.

    `closing_tag` is awaited when the prompt has begun the reasoning. Plain is text as it comes, without escape codes.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        size: Callable[[], terminal_size] = shutil.get_terminal_size,
        *,
        plain: bool,
        folded: bool,
        closing_tag: str | None = None,
    ) -> None:
        self._write = write
        self._plain = plain
        self._folded = folded
        self._splitter = ReasoningSplitter(closing_tag)
        self._answer: _TextView = _PlainText(write) if plain else _markdown(write, size)
        self._n_words = 0
        self._last = ""  # what may go on as one word
        self._was_reasoning = False
        self._has_answer = False

    def feed(self, text: str) -> None:
        """Show what has become certain with this text."""
        for part in self._splitter.feed(text):
            self._show(part)

    def end(self) -> None:
        """Show the rest and end the line."""
        for part in self._splitter.finish():
            self._show(part)
        if self._was_reasoning:
            self._end_reasoning()
        if self._has_answer:
            self._answer.end()

    def _show(self, part: Part) -> None:
        text = printable(part.text)
        if part.is_reasoning:
            self._show_reasoning(text)
            return
        if self._was_reasoning:
            self._end_reasoning()
            if self._plain and not self._folded:
                self._write(_PLAIN_TITLES[1] + "\n")
        self._has_answer = True
        self._answer.feed(text)

    def _show_reasoning(self, text: str) -> None:
        begins = not self._was_reasoning
        self._was_reasoning = True
        self._n_words += len((self._last + text).split()) - bool(self._last)
        self._last = text[-1:].strip()
        if not self._folded:
            title = f"{_PLAIN_TITLES[0]}\n" if begins and self._plain else ""
            self._write(title + (text if self._plain else _DIM + text + _RESET))
        elif not self._plain:
            self._write(f"{_TO_LINE_START}{_DIM}reasoning: {self._n_words} words so far{_RESET}")

    def _end_reasoning(self) -> None:
        self._was_reasoning = False
        if not self._folded:
            self._write("\n\n")
            return
        line = f"({self._n_words} words of reasoning: /show reasoning)"
        self._write(f"{line}\n" if self._plain else f"{_TO_LINE_START}{_DIM}{line}{_RESET}\n\n")


class _TextView(Protocol):
    def feed(self, text: str) -> None: ...

    def end(self) -> None: ...


class _PlainText:
    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def feed(self, text: str) -> None:
        self._write(text)

    def end(self) -> None:
        self._write("\n")


def _markdown(write: Callable[[str], None], size: Callable[[], terminal_size]) -> _TextView:
    from edgeinfer.cli.markdown import MarkdownStream

    return MarkdownStream(write, size)


def is_plain(stream: object) -> bool:
    """Whether answers are shown as they come: no colour is wanted, the terminal knows none, or it is too narrow."""
    return is_dumb() or not console.wants_colour(stream) or shutil.get_terminal_size().columns < MIN_COLUMNS


def is_dumb() -> bool:
    """Whether the terminal takes no escape codes at all."""
    return os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")


def printable(text: str) -> str:
    """Text without the characters that would command a terminal: a model may say anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or ord(c) > 0x9F else "\ufffd" for c in text)
