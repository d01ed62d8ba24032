"""Writes docs/commands.md and docs/edgeinfer.1: the help of every command, as a person sees it who asks for it.

    python scripts/command_pages.py

tests/test_docs.py fails when the pages are not what this writes. The second is installed for `man edgeinfer`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from unittest import mock

from edgeinfer.cli.app import app

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, MAN_PAGE = DOCS / "commands.md", DOCS / "edgeinfer.1"
_COLUMNS, _MAN_COLUMNS = 100, 72  # man indents by 7, on terminals of 80
BEGINNING = """\
# Commands

What `--help` says, made by `scripts/command_pages.py`.

| exit code | |
| --- | --- |
| 0 | done |
| 1 | a bug of ours |
| 2 | wrong usage |
| 3 | not found |
| 4 | unusable input |
| 5 | not enough memory or disk, or the output cannot be written |
| 6 | the prompt does not fit the context |
| 7 | a check failed |
| 129, 130, 143 | ended by a signal: hang-up, Ctrl-C, termination |
| 141 | the reader of a pipe has gone |

| environment variable | |
| --- | --- |
| `EDGEINFER_HOME` | where models, prefix cache, sessions and calibration data are |
| `EDGEINFER_PREFIX_CACHE_SIZE` | what the prefix cache may take: see [cache.md](cache.md) |
| `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` | those of the Hugging Face Hub's own library |
| `NO_COLOR` | no escape codes |
| `VISUAL`, `EDITOR` | the editor of a chat |
"""


def help_of(*command: str, columns: int = _COLUMNS) -> str:
    """What a command says of itself on a terminal."""
    text = io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": str(columns)}), contextlib.redirect_stdout(text):
        app(args=[*command, "--help"], prog_name="edgeinfer", standalone_mode=False)
    return text.getvalue().strip()


def page() -> str:
    """The whole of docs/commands.md."""
    sections = (f"## {' '.join(('edgeinfer', *command))}\n\n```\n{text}\n```\n" for command, text in helps(_COLUMNS))
    return "\n".join([BEGINNING, *sections])


def man_page() -> str:
    """The whole of docs/edgeinfer.1, in roff."""
    (_, about), *commands = helps(_MAN_COLUMNS)
    what_for = " ".join(about.split("\n\n")[1].split()).rstrip(".")
    lines = ['.TH EDGEINFER 1 "" edgeinfer', ".SH NAME", f"edgeinfer \\- {_roff(what_for)}"]
    lines += [".SH SYNOPSIS", ".B edgeinfer", "COMMAND [ARGUMENTS]...", ".br", ".B edgeinfer", "COMMAND \\-\\-help"]
    sections = [(" ".join(command), text) for command, text in commands]
    for name, text in [("examples", dedent(about.partition("Examples:\n")[2])), *sections]:
        lines += [f".SH {_roff(name).upper()}", ".nf", *map(_roff, text.splitlines()), ".fi"]
    for table in BEGINNING.split("\n\n")[2:]:
        (head, _), _, *rows = ([_plain(cell) for cell in line.split(" | ")] for line in table.splitlines())
        lines.append(f".SH {head.upper()}S")
        for name, meaning in rows:
            lines += [".TP", f".B {_roff(name)}", _roff(meaning)]
    return "\n".join(lines) + "\n"


def helps(columns: int, *group: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command of a group, itself first, with its help."""
    text = help_of(*group, columns=columns)
    yield group, text
    for line in text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines():
        if re.match(r"  \S", line):  # what goes on is indented further
            yield from helps(columns, *group, line.split()[0])


def _plain(cell: str) -> str:
    """A cell of a table without its bars, links and quotes."""
    return re.sub(r"\[(.+?)\]\(.+?\)", r"\1", cell).replace("`", "").strip("| ")


def _roff(text: str) -> str:
    """Text that means nothing else to roff."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{text}" if text.startswith(".") else text


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    MAN_PAGE.write_text(man_page(), "utf-8")
