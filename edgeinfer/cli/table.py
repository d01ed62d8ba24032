"""Plain text tables: columns apart by two spaces, no lines, nothing that a pipe would have to strip."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from textwrap import wrap

MIN_COLUMNS = 40
"""A narrower terminal breaks lines itself: to cut them would leave nothing of them."""


def render(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table with a line per row; `align` has `<` or `>` for each column."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def size(nbytes: int) -> str:
    """Bytes for people: three digits and a binary unit."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{amount:.2f} {unit}" if amount < 10 else f"{amount:.1f} {unit}"


def printable(text: str) -> str:
    """`text` without control characters (a model file is not trusted), whole: a path is there to be copied."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def one_line(text: str, indent: int = 0) -> str:
    """`printable`, cut to the terminal's width."""
    text, room = printable(text), _room(indent)
    return text if room is None or len(text) <= room else text[: room - 1] + "…"


def hanging(text: str, indent: int) -> str:
    """`printable`, broken between words to the terminal's width, each line below the beginning of the first."""
    text, room = printable(text), _room(indent)
    if room is None:
        return text
    return ("\n" + " " * indent).join(wrap(text, room, break_long_words=False, break_on_hyphens=False))


def _room(indent: int) -> int | None:
    """How many characters a line has behind an indent; None where it may have as many as there are."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    return width - indent if width >= MIN_COLUMNS else None
