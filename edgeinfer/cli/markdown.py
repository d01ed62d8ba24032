"""Markdown that is shown while it streams, without flicker.

Blocks that are complete are written once. Of the block that still grows only the lines that change are written again,
in one go; nothing is cleared first.
"""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from os import terminal_size

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MAX_WIDTH = 120
_LEAST_PAUSE_S = 0.04
_PAUSE_PER_WORK = 10  # so that showing takes at most a tenth of the time
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # terminals that know these show what is between them at once


class MarkdownStream:
    """Feed text, call `end`; `write` gets what a terminal shows, `size` says how large that is now."""

    def __init__(
        self,
        write: Callable[[str], None],
        size: Callable[[], terminal_size],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._size = size
        self._clock = clock
        self._text = ""
        self._lines: list[str] = []  # of the block that still grows, as they stand on the screen; the cursor ends them
        self._columns = size().columns
        self._next_s = 0.0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def feed(self, text: str) -> None:
        """Add text, and show it soon: not many times a second, but also when nothing follows for a while."""
        with self._lock:
            self._text += text
            wait_s = self._next_s - self._clock()
            if wait_s <= 0:
                self._update()
            elif self._timer is None:
                self._timer = threading.Timer(wait_s, self._flush)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """Show all of it and end the line."""
        with self._lock:
            self._update()
            self._write("\n")

    def _flush(self) -> None:
        with self._lock, suppress(Exception, SystemExit):  # a terminal that is gone is met by the main thread as well
            if self._timer is not None:
                self._update()

    def _update(self) -> None:
        self._timer = None  # one that waits for the lock has nothing to do any more
        started_s = self._clock()
        self._refresh()
        now_s = self._clock()
        self._next_s = now_s + max(_LEAST_PAUSE_S, _PAUSE_PER_WORK * (now_s - started_s))

    def _refresh(self) -> None:
        size = self._size()
        if size.columns != self._columns:
            # How the terminal wraps what it shows is unknown: leave that, and write the block again below.
            self._columns = size.columns
            if self._lines:
                self._write("\n")
            self._lines = []
        done, rest = split_complete(self._text)
        width = min(size.columns - 1, _MAX_WIDTH)
        lines = rendered(rest, width)
        if not done:
            self._show(lines, size.lines)
            return
        finished = rendered(done, width)
        self._show([*finished, "", *lines], size.lines)
        self._text, self._lines = rest, lines

    def _show(self, lines: list[str], n_rows: int) -> None:
        """Make the screen show these lines where it shows `_lines`; what has scrolled away stays as it is."""
        old, self._lines = self._lines, lines
        same = next((i for i, (a, b) in enumerate(zip(old, lines, strict=False)) if a != b), min(len(old), len(lines)))
        if lines == old or not lines:
            self._lines = lines or old
            return
        first = min(max(same, len(old) - n_rows + 1), len(lines) - 1)
        if first >= len(old):
            start = "\n" if old else ""
        else:
            up = len(old) - 1 - first
            start = (f"\x1b[{up}A" if up else "") + "\r"
        body = "\n".join(line + "\x1b[K" for line in lines[first:])
        self._write(_BEGIN + start + body + ("\x1b[J" if len(lines) < len(old) else "") + _END)


def split_complete(text: str) -> tuple[str, str]:
    """Blocks that nothing that follows can change, and the rest: cut before the last line that begins a block."""
    cut, at, after_blank, fence = 0, 0, False, ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if not fence and after_blank and line.strip() and not line[0].isspace():
            cut = at
        if found and (not fence or (found[1].startswith(fence) and not line[found.end() :].strip())):
            fence = "" if fence else found[1]
        after_blank = not fence and not line.strip() and line.endswith("\n")
        at += len(line)
    return text[:cut], text[cut:]


def rendered(text: str, width: int) -> list[str]:
    """The lines that a terminal of this width shows for Markdown, escape codes in them, without empty ones around."""
    console = Console(file=io.StringIO(), force_terminal=True, width=max(width, 1), legacy_windows=False)
    with console.capture() as captured:
        console.print(_Markdown(text, code_theme="ansi_dark", hyperlinks=False))
    lines = [line.rstrip(" ") for line in captured.get().split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


class _LeftHeading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    elements = {**Markdown.elements, "heading_open": _LeftHeading}  # noqa: RUF012
