"""Texts that a person gives: arguments, files, standard input. Nothing is read without an end."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import BinaryIO

from edgeinfer.errors import NotFoundError, UnusableInputError, UsageError

MAX_NBYTES = 64 << 20
"""Of a text; several times what the longest context holds."""


def argument(text: str, what: str) -> str:
    """A text from the command line. Arguments that are not UTF-8 reach Python as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not UTF-8", "convert it, for example with iconv") from None
    return text


def file(path: Path) -> str:
    """A UTF-8 file. Raises NotFoundError, UnusableInputError where it cannot be read, UsageError for what is in it."""
    try:
        with open(path, "rb") as opened:
            return _read(opened, str(path))
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file", "check the path") from None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the path") from None


def standard_input() -> str:
    """All of it. Raises UnusableInputError where it cannot be read, UsageError for what is in it."""
    try:
        return _read(sys.stdin.buffer, "standard input")
    except (OSError, io.UnsupportedOperation) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnusableInputError(f"standard input cannot be read ({reason})", "pipe a text into it") from None


def _read(stream: BinaryIO, what: str) -> str:
    data = stream.read(MAX_NBYTES + 1)
    if len(data) > MAX_NBYTES:
        raise UsageError(f"{what} is longer than {MAX_NBYTES} bytes", "give a part of it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 (byte {error.start})", "convert it, for example with iconv") from None
