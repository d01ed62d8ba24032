"""Reads small files, most of them JSON, that nobody vouches for."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from edgeinfer.errors import NotFoundError, UnusableInputError

MAX_JSON_NBYTES = 256 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character, escaped, or text that looks so behind a backslash of its own."""


def parse_object(data: bytes, subject: str) -> dict[str, Any]:
    """Parse a JSON object; UnusableInputError names `subject` when it is none, or names a key twice."""
    try:
        value = json.loads(data, object_pairs_hook=_unique_keys)
        if any(_is_escape(data, found.start()) for found in _SURROGATE.finditer(data)):
            # Half a surrogate pair is no text: no file and no terminal could take it.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UnusableInputError(f"{subject}: not valid JSON ({error})", "download the file again") from None
    if not isinstance(value, dict):
        raise UnusableInputError(f"{subject}: not a JSON object", "download the file again")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; the errors of `read_file` and `parse_object`."""
    return parse_object(read_file(path, MAX_JSON_NBYTES), str(path))


def read_object_if_there(path: Path) -> dict[str, Any]:
    """The same, or an empty object when there is no such file; a link that leads nowhere is an error."""
    return read_object(path) if os.path.lexists(path) else {}


def read_file(path: Path, max_nbytes: int) -> bytes:
    """The whole file. Raises NotFoundError when there is none, UnusableInputError when it is unreadable or larger."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            data = file.read(max_nbytes + 1)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file", "is the checkpoint complete?") from None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the permissions") from None
    if len(data) > max_nbytes:
        raise UnusableInputError(f"{path}: larger than {max_nbytes >> 20} MiB", "is this the right file?")
    return data


def check_regular(path: Path) -> None:
    """Raise UnusableInputError for a directory, and for a pipe or device, which could be endless; OSError as `stat`."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnusableInputError(f"{path}: not a regular file", "is the checkpoint complete?")


def _is_escape(data: bytes, backslash: int) -> bool:
    """Whether no other backslash takes away the meaning of the one at this place."""
    before = backslash
    while before and data[before - 1] == ord("\\"):
        before -= 1
    return (backslash - before) % 2 == 0


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key!r} stands twice")
            seen.add(key)
    return result
