"""Earlier answers of a model on disk, as tokens: bounded, their owner's only, written whole or not at all.

They lie in the prefix cache's folder of the model: what clears that, or turns it off, does the same to them. Of two
processes that end at a time, the later one's answers stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer.cache.block import READING, WRITING, open_file
from edgeinfer.cache.prefix import DiskPrefixCache
from edgeinfer.options import RuntimeOptions
from edgeinfer.speculation.memory import MAX_TOKENS, Memory

_MAGIC = b"edgeinfer answers 1\n"
_DIGEST_NBYTES = 32
_MAX_NBYTES = 4 * MAX_TOKENS
_END = -1


@dataclass(slots=True)
class Answers:
    """A model's memory of its answers and where that is kept."""

    memory: Memory
    file: AnswerFile
    was_there: bool

    @classmethod
    def of(cls, cache: DiskPrefixCache | None, options: RuntimeOptions, n_vocab: int) -> Answers | None:
        """What earlier processes left; None where nothing is to be kept."""
        if cache is None or cache.folder is None or options.draft == "off":
            return None
        file = AnswerFile(cache.folder / "answers")
        return cls(Memory(file.read(n_vocab)), file, file.path.exists())

    def write(self) -> None:
        """Keep what has been answered since, unless somebody cleared meanwhile what this memory began with."""
        if self.memory.has_changed and self.was_there <= self.file.path.exists():
            self.file.write(self.memory.answers)
            self.memory.has_changed = False
            self.was_there = self.file.path.exists()


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """A file of answers: what it is, the SHA-256 of the rest, then every answer's tokens (int32) and -1."""

    path: Path

    def read(self, n_vocab: int) -> list[list[int]]:
        """The answers, the newest last; none where the file is missing or not as it was written."""
        try:
            with open_file(self.path, READING) as file:
                raw = file.read(len(_MAGIC) + _DIGEST_NBYTES + _MAX_NBYTES + 1) or b""
        except OSError:
            return []
        start = len(_MAGIC) + _DIGEST_NBYTES
        body = raw[start:]
        if raw[:start] != _MAGIC + hashlib.sha256(body).digest() or len(body) > _MAX_NBYTES or len(body) % 4:
            return []
        found: list[list[int]] = [[]]
        for token in np.frombuffer(body, "<i4").tolist():
            if token == _END:
                found.append([])
            elif 0 <= token < n_vocab:
                found[-1].append(token)
            else:
                return []
        return [answer for answer in found if answer]

    def write(self, answers: Sequence[Sequence[int]]) -> None:
        """Replace the file, if that can be."""
        body = np.array([token for answer in answers for token in (*answer, _END)], "<i4").tobytes()
        partial = self.path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                with open_file(partial, WRITING | os.O_TRUNC) as file:
                    file.write(_MAGIC + hashlib.sha256(body).digest() + body)
                partial.replace(self.path)
            finally:
                partial.unlink(missing_ok=True)
