"""Files of JSON lines: read without trusting their lines, written so that an interrupted run can go on."""

from __future__ import annotations

import errno
import json
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError, UsageError
from edgeinfer.file_lock import lock


def open_lines(path: Path) -> BinaryIO:
    """Open a file to read. Raises NotFoundError and UnusableInputError."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file", "check the path") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def read_lines(file: BinaryIO, max_nbytes: int) -> Iterator[bytes]:
    """The lines of a file. Of one that is longer than `max_nbytes` only a little more than that is kept in memory.

    Raises UnusableInputError when it cannot be read.
    """
    try:
        while line := file.readline(max_nbytes + 1):
            yield line
            while len(line) > max_nbytes and not line.endswith(b"\n"):
                line = file.readline(max_nbytes + 1)
    except OSError as error:
        raise _unreadable(file.name, error) from None


def _unreadable(name: object, error: OSError) -> UnusableInputError:
    return UnusableInputError(f"{name}: cannot be read ({error.strerror})", "check the permissions")


def encode(document: Any) -> bytes:
    """One line; characters that UTF-8 cannot hold are escaped."""
    try:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(document).encode() + b"\n"


class Output:
    """An output, line by line. With `resume` a file is continued, and `take` knows the ids that are in it.

    A last line that was cut off is removed. Sixteen bytes are kept of every id. What is no file (a pipe, a device) is
    just written to. Raises UsageError for a file that exists and is not to be resumed, UnusableInputError for one that
    is no output, ResourceError where it cannot be written, also because another process does.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        self.n_rows = 0
        """How many rows were there already."""
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._counts: NDArray[np.int64] = np.empty(0, np.int64)
        try:
            is_there = path.exists()
            is_file = path.is_file() or not is_there
            if is_there and is_file and not resume:
                raise UsageError(f"{path} exists already", "--resume goes on with it; or remove it")
            # Without a buffer: what a signal broke off must not be written by closing, which a full pipe would hold up.
            self._file = path.open(("r+b" if is_there else "xb") if is_file else "wb", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            if is_file:
                self._lock()
            if is_there and is_file:
                self._resume()
        except BaseException:
            self._file.close()
            raise

    def take(self, row_id: str | int) -> bool:
        """Whether a row of this id was there already. As often as it was there, so that ids may repeat themselves."""
        value = _hash(row_id)
        at = int(self._hashes.searchsorted(value))
        if at == len(self._hashes) or self._hashes[at] != value or not self._counts[at]:
            return False
        self._counts[at] -= 1
        return True

    def write(self, document: Any) -> None:
        """Append a row; it is the system's before this returns, so that the process may be killed."""
        try:
            rest = memoryview(encode(document))
            while rest:
                n_written = self._file.write(rest)
                if n_written is None:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                rest = rest[n_written:]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._unwritable(error) from None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _lock(self) -> None:
        locked = True
        with suppress(OSError):  # not every file system has locks
            locked = lock(self._file.fileno(), _LOCK_WAIT_S)
        if not locked:
            raise ResourceError(f"{self._path}: another process writes it", "wait for it, or give another file")

    def _resume(self) -> None:
        hashes, end = array("Q"), 0
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            while line := reader.readline(_MAX_NBYTES + 1):
                if line.endswith(b"\n"):
                    hashes.append(int(self._hash_of_row(line, len(hashes) + 1)))
                    end += len(line)
                elif len(line) <= _MAX_NBYTES and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                    break
                else:
                    raise self._foreign(len(hashes) + 1)
        self.n_rows = len(hashes)
        self._hashes, self._counts = np.unique(np.array(hashes, np.uint64), return_counts=True)
        try:
            self._file.seek(end)
            self._file.truncate()
        except OSError as error:
            raise self._unwritable(error) from None

    def _hash_of_row(self, line: bytes, number: int) -> np.uint64:
        try:
            row = json.loads(line)
            if row.keys() >= _KEYS:
                return _hash(row["id"])
        except (ValueError, AttributeError, RecursionError):
            pass
        raise self._foreign(number)

    def _foreign(self, number: int) -> UnusableInputError:
        return UnusableInputError(
            f"{self._path}: line {number} is not a row of output", "give another file, or remove it"
        )

    def _unwritable(self, error: OSError) -> ResourceError:
        reason = error.strerror or str(error)
        is_missing = isinstance(error, FileNotFoundError)
        hint = "make the folder, or choose another -o" if is_missing else "free some space or check the permissions"
        return ResourceError(f"{self._path}: cannot be written ({reason})", hint)


_BEGINNING = b'{"id": '  # of every row, as `encode` writes it
_KEYS = {"id", "text", "finish_reason", "usage", "error"}
_MAX_NBYTES = 1 << 28
_LOCK_WAIT_S = 1.0


def _hash(row_id: str | int) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(json.dumps(row_id).encode(), digest_size=8).digest(), "little"))
