"""Files of JSON lines: read without trusting their lines, written so that an interrupted run can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError, UsageError


def open_lines(path: Path) -> BinaryIO:
    """Open a file to read. Raises NotFoundError and UnusableInputError."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file", "check the path") from None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the permissions") from None


def read_lines(file: BinaryIO, max_nbytes: int) -> Iterator[bytes]:
    """The lines of a file. Of one that is longer than `max_nbytes` only a little more than that is kept in memory."""
    while line := file.readline(max_nbytes + 1):
        yield line
        while len(line) > max_nbytes and not line.endswith(b"\n"):
            line = file.readline(max_nbytes + 1)


def encode(document: Any) -> bytes:
    """One line; characters that UTF-8 cannot hold are escaped."""
    try:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(document).encode() + b"\n"


class Output:
    """An output file, line by line. With `resume` it is continued, and `has` knows the ids that are in it.

    A last line that was cut off is removed. Eight bytes are kept of every id. Raises UsageError for a file that exists
    and is not to be resumed, UnusableInputError for one that is no output, ResourceError where it cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
        if path.exists() and not resume:
            raise UsageError(f"{path} exists already", "--resume goes on with it; or remove it")
        try:
            self._file: BinaryIO = path.open("r+b" if path.exists() else "xb")
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            if self._file.readable():
                self._resume()
        except BaseException:
            self.close()
            raise

    @property
    def n_rows(self) -> int:
        """How many rows were there already."""
        return len(self._hashes)

    def has(self, row_id: Any) -> bool:
        """Whether a row of this id was there already."""
        value = _hash(row_id)
        at = int(self._hashes.searchsorted(value))
        return at < len(self._hashes) and self._hashes[at] == value

    def write(self, document: Any) -> None:
        """Append a row; it is the system's before this returns, so that the process may be killed."""
        try:
            self._file.write(encode(document))
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _resume(self) -> None:
        hashes, end = [], 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                hashes.append(_hash(json.loads(line)["id"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UnusableInputError(
                    f"{self._path}: line {number} is not a row of output", "give another file, or remove it"
                ) from None
        self._hashes = np.unique(np.array(hashes, np.uint64))
        self._file.seek(end)
        self._file.truncate()

    def _unwritable(self, error: OSError) -> ResourceError:
        reason = error.strerror or os.strerror(error.errno or 0)
        is_missing = isinstance(error, FileNotFoundError)
        hint = "make the folder, or choose another -o" if is_missing else "free some space or check the permissions"
        return ResourceError(f"{self._path}: cannot be written ({reason})", hint)


def _hash(row_id: Any) -> np.uint64:
    digest = blake2b(json.dumps(row_id, sort_keys=True).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))
