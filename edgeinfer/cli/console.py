"""Streams and exit codes: results to stdout, everything else to stderr, one line per error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

from edgeinfer.errors import EdgeinferError


def result(text: str) -> None:
    """Print a result (and nothing else) to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def result_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    result(json.dumps(document, ensure_ascii=False))


def note(text: str) -> None:
    """Tell a person something, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def fail(error: EdgeinferError, *, as_json: bool = False) -> NoReturn:
    """Report an error as the contract has it, and exit with its code."""
    if as_json:
        result_json(error.as_json())
    note(_one_line(f"error: {error.message}" + (f" ({error.hint})" if error.hint else "")))
    raise SystemExit(error.exit_code)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def wants_colour(stream: Any) -> bool:
    """Whether escape codes may be written to `stream`: a terminal, and no NO_COLOR."""
    return not os.environ.get("NO_COLOR") and bool(stream.isatty())
