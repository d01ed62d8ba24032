"""Reads JSON files that nobody vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeinfer.errors import NotFoundError, UnusableInputError

MAX_JSON_NBYTES = 256 << 20


def parse_object(data: bytes, subject: str) -> dict[str, Any]:
    """Parse a JSON object; UnusableInputError names `subject` when it is none, or names a key twice."""
    try:
        value = json.loads(data, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise UnusableInputError(f"{subject}: not valid JSON ({error})", "download the file again") from None
    if not isinstance(value, dict):
        raise UnusableInputError(f"{subject}: not a JSON object", "download the file again")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; the errors of `parse_object`, NotFoundError when there is no file."""
    try:
        if path.stat().st_size > MAX_JSON_NBYTES:
            raise UnusableInputError(f"{path}: larger than {MAX_JSON_NBYTES >> 20} MiB", "this cannot be a config")
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file", "is the checkpoint complete?") from None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the permissions") from None
    return parse_object(data, str(path))


def read_object_if_there(path: Path) -> dict[str, Any]:
    """The same, or an empty object when there is no such file."""
    return read_object(path) if path.exists() else {}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key!r} stands twice")
            seen.add(key)
    return result
