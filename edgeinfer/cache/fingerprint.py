"""What KV state depends on besides tokens, as 32 bytes: another file, library or option is another cache.

A file counts by what its header says, by samples of every tensor, and by its size and times. The samples tell files
apart whose times a copy or an image made equal; the time of the last change of its inode, which no program can set,
tells when a file was edited in place. So a file that is moved, or written again, begins a cache of its own: that costs
a computation, whereas reading gigabytes at every start would cost everybody.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import fstat
from pathlib import Path

_FORMAT = b"edgeinfer fingerprint 1"
_SAMPLE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file that a model is made of: its first `header_nbytes`, and where its tensors lie, as (offset, bytes)."""

    path: Path
    header_nbytes: int
    tensors: Sequence[tuple[int, int]]


def digest(file: WeightFile) -> bytes:
    """What tells the file from all others, 32 bytes. Raises OSError."""
    found = hashlib.sha256(_FORMAT)
    with open(file.path, "rb", buffering=0) as raw:
        status = fstat(raw.fileno())
        found.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
        found.update(raw.read(file.header_nbytes))
        for offset, nbytes in file.tensors:
            for start in _samples(offset, nbytes):
                raw.seek(start)
                found.update(raw.read(min(_SAMPLE_NBYTES, nbytes)))
    return found.digest()


def _samples(offset: int, nbytes: int) -> tuple[int, ...]:
    """Where to read: at a tensor's beginning, in its middle, at its end."""
    last = max(nbytes - _SAMPLE_NBYTES, 0)
    return offset, offset + last // 2, offset + last


def fingerprint(files: Iterable[bytes], settings: Mapping[str, str | int | float | bool | None]) -> bytes:
    """One for a model: the digests of its files and adapters in order, and every setting that its KV state depends on.

    32 bytes.
    """
    found = hashlib.sha256(_FORMAT)
    for each in files:
        found.update(each)
    found.update(json.dumps(settings, sort_keys=True).encode())
    return found.digest()
