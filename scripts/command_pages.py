"""Writes docs/commands.md: the help of every command, as a person sees it who asks for it.

    python scripts/command_pages.py

tests/test_docs.py fails when the page is not what this writes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
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


def help_of(*command: str) -> str:
    """What a command says of itself, on a terminal of 100 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "edgeinfer", *command, "--help"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout.strip()


def page() -> str:
    """The whole of docs/commands.md."""
    return "\n".join([BEGINNING, *_sections()])


def _sections(*group: str) -> list[str]:
    text = help_of(*group)
    names = [line.split()[0] for line in text.partition("Commands:\n")[2].splitlines()]
    sections = [f"## {' '.join(('edgeinfer', *group))}\n\n```\n{text}\n```\n"]
    for name in names:
        sections += _sections(*group, name)
    return sections


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
