"""The prefix cache's directory, shared by all models and all processes: its lock, its budget, its order of eviction.

    lock                                  held by whoever writes or deletes
    total                                 the sum of the blocks' bytes, or more
    <fingerprint>/model                   the model's path, for people
    <fingerprint>/<xx>/<name>.kv          the blocks of one model and its options, by the first digits of their names

A block's time of modification is that of its last use. The parts of a chain are used together, so the beginnings,
which the rest is worthless without, are made a little younger than what follows them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgeinfer import file_lock
from edgeinfer.cache.block import READING, SUFFIX, WRITING, open_file

MAX_BUDGET_NBYTES = 4 << 30
PARTIAL_SUFFIX = ".part"
LOCK_WAIT_S = 30.0
_ROOM_AFTER_EVICTION = 1 / 16  # of the budget: not every block that comes shall cost a scan
_TOTAL_DIGITS = 20
_MAX_MODEL_NBYTES = 1 << 16
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """What one model under one set of options takes."""

    model: str
    blocks: int
    bytes: int
    last_used_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    nbytes: int
    used_ns: int


class CacheFolder:
    """One directory of blocks. `budget_nbytes` None is the smaller of 4 GiB and a tenth of the free disk."""

    def __init__(self, root: Path, budget_nbytes: int | None = None) -> None:
        self.root = root
        self._budget_nbytes = budget_nbytes

    def prepare(self) -> None:
        """Make the directory, for its owner only. Raises OSError when it cannot be or belongs to somebody else."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "geteuid"):
            status = self.root.stat()
            if status.st_uid != os.geteuid():
                raise PermissionError(None, "it belongs to another user", str(self.root))
            if status.st_mode & 0o077:
                self.root.chmod(0o700)

    def budget_nbytes(self) -> int:
        """The most bytes that all blocks together may take. Raises OSError."""
        if self._budget_nbytes is None:
            there = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
            free = shutil.disk_usage(there).free + (self._read_total() or 0)  # what it has taken is its to take
            self._budget_nbytes = min(MAX_BUDGET_NBYTES, free // 10)
        return self._budget_nbytes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing and deleting. Raises TimeoutError, and OSError where it cannot be."""
        lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not file_lock.lock(lock, LOCK_WAIT_S):
                raise TimeoutError(None, "another process holds its lock")
            try:
                yield
            finally:
                file_lock.unlock(lock)
        finally:
            os.close(lock)

    def reserve(self, nbytes: int) -> bool:
        """Make room in the budget for a file that comes next, when `locked`; False when it can never fit.

        Counted before it is written: who dies in between leaves too large a sum, which the next eviction corrects.
        """
        budget = self.budget_nbytes()
        if nbytes > budget:
            return False
        total = self._read_total()
        if total is None or total + nbytes > budget:
            total = self._evict(nbytes, budget)
        if total + nbytes > budget:
            return False
        self._write_total(total + nbytes)
        return True

    def usage(self) -> list[ModelUsage]:
        """What each model takes, the most recently used first."""
        found = [_usage(folder) for folder in self._model_folders()]
        return sorted((u for u in found if u.blocks), key=lambda u: -u.last_used_s)

    def clear(self) -> int:
        """Delete every block; returns how many bytes that were. Raises OSError."""
        if not self.root.is_dir():
            return 0
        with self.locked():
            nbytes = sum(entry.nbytes for entry in self._entries())
            for folder in self._model_folders():
                shutil.rmtree(folder)
            total = self.root / "total"  # whatever stands there now; without it the blocks are counted
            shutil.rmtree(total) if total.is_dir() and not total.is_symlink() else total.unlink(missing_ok=True)
        return nbytes

    def _evict(self, nbytes: int, budget: int) -> int:
        """Count the blocks, and delete the least recently used unless `nbytes` more fit; returns the new sum.

        Whatever is half written was left by somebody who died: nobody else holds the lock.
        """
        for part in self.root.glob(f"*/*/*{PARTIAL_SUFFIX}"):
            with suppress(OSError):
                part.unlink()
        entries = sorted(self._entries(), key=lambda entry: entry.used_ns)
        total = sum(entry.nbytes for entry in entries)
        if total + nbytes <= budget:
            return total
        target = min(budget - nbytes, int(budget * (1 - _ROOM_AFTER_EVICTION)))
        for entry in entries:
            if total <= target:
                break
            with suppress(OSError):  # what cannot be deleted still counts
                entry.path.unlink(missing_ok=True)
                total -= entry.nbytes
        return total

    def _entries(self) -> Iterator[_Entry]:
        for folder in self._model_folders():
            yield from _entries(folder)

    def _model_folders(self) -> list[Path]:
        names = [entry.name for entry in _scan(self.root) if entry.is_dir(follow_symlinks=False)]
        return [self.root / name for name in names if _FOLDER_NAME.fullmatch(name)]

    def _read_total(self) -> int | None:
        try:
            total = int(_beginning(self.root / "total", _TOTAL_DIGITS))
        except (OSError, ValueError):
            return None
        return total if total >= 0 else None

    def _write_total(self, total: int) -> None:
        # Of constant length and in place: who dies here leaves the old sum or the new one.
        with open_file(self.root / "total", WRITING) as file:
            file.write(b"%0*d" % (_TOTAL_DIGITS, total))


def _entries(folder: Path) -> Iterator[_Entry]:
    for shard in _scan(folder):
        if not shard.is_dir(follow_symlinks=False):
            continue
        for file in _scan(Path(shard.path)):
            with suppress(OSError):  # deleted meanwhile
                if file.name.endswith(SUFFIX) and not file.is_dir(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    yield _Entry(Path(file.path), status.st_size, status.st_mtime_ns)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _beginning(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file that anything may have happened to. Raises OSError."""
    with open_file(path, READING) as file:
        return file.read(nbytes) or b""


def _usage(folder: Path) -> ModelUsage:
    entries = list(_entries(folder))
    try:
        model = _beginning(folder / "model", _MAX_MODEL_NBYTES).decode("utf-8", "replace").strip()
    except OSError:
        model = ""
    used_ns = max((entry.used_ns for entry in entries), default=0)
    return ModelUsage(model, len(entries), sum(entry.nbytes for entry in entries), used_ns / 1e9)
