"""Plain text tables: columns apart by two spaces, no lines, nothing that a pipe would have to strip."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

WIDTH_OF_A_PIPE = 1 << 30


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
    text = printable(text)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_A_PIPE
    room = max(width - indent, 8)
    return text if len(text) <= room else text[: room - 1] + "…"
