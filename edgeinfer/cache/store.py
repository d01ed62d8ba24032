"""The blocks of one model under one set of options: found by their tokens, read whole, written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer.cache.block import (
    BLOCK_TOKENS,
    MIN_TOKENS,
    SUFFIX,
    WRITING,
    Block,
    Place,
    agreement,
    chain,
    open_file,
    read_block,
    read_tokens,
    root_key,
    siblings_prefix,
    write_block,
)
from edgeinfer.cache.folder import PARTIAL_SUFFIX, CacheFolder
from edgeinfer.types import Tokens

MAX_SIBLINGS = 64
"""How many blocks with the same parent and beginning are compared, to find the one that agrees furthest."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file whose first tokens are wanted: those of positions `[p0, p1)`."""

    path: Path
    parent: bytes
    p0: int
    p1: int


class BlockStore:
    """What is on disk under a fingerprint. Other processes write and evict at any time."""

    def __init__(self, folder: CacheFolder, fingerprint: bytes, model: str) -> None:
        self._folder = folder
        self.fingerprint = fingerprint
        self._model = model
        self.root = folder.root / fingerprint.hex()[:32]

    def has(self, place: Place) -> bool:
        """Whether the block is there."""
        return os.path.exists(self.path(place.name))

    def find(self, tokens: Tokens) -> list[Found]:
        """The files that together hold the longest stored beginning of `tokens`.

        Whole blocks as far as they agree, then the one that agrees longest of those that could follow. Raises nothing.
        """
        found, parent, position = [], root_key(self.fingerprint), 0
        for place in chain(tokens, self.fingerprint):
            if not self.has(place):
                break
            found.append(Found(self.path(place.name), parent, place.p0, place.p1))
            parent, position = place.key, place.p1
        rest = tokens[position:]
        best = max(self._siblings(parent, rest), default=None, key=lambda sibling: sibling[0])
        if best is not None and best[0] >= MIN_TOKENS:
            found.append(Found(best[1], parent, position, position + best[0]))
        return found

    def covers(self, place: Place) -> bool:
        """Whether the block or a longer one that begins with it is there."""
        n_tokens = len(place.tokens)
        return self.has(place) or (
            n_tokens < BLOCK_TOKENS
            and any(agreed == n_tokens for agreed, _ in self._siblings(place.parent, place.tokens))
        )

    def read(self, found: Found, tokens: Tokens) -> Block | None:
        """The block that was found for `tokens`, verified; None when it is gone.

        What is damaged or not what its name says is deleted, so that it can be stored again.
        """
        try:
            block = read_block(found.path, found.parent, self.fingerprint)
        except OSError:
            return None
        if block is None or block.place.name != found.path.name:
            with suppress(OSError):
                found.path.unlink()
            return None
        wanted = tokens[found.p0 : found.p1]
        return block if agreement(block.place.tokens, wanted) == len(wanted) else None

    def touch(self, paths: Iterable[Path], used_ns: int) -> None:
        """Note when the blocks of a chain, given in order, were used."""
        with suppress(OSError):  # on a disk that can only be read, eviction is not ours either
            for index, path in enumerate(paths):
                _set_used(path, used_ns, index * BLOCK_TOKENS)

    def write(self, blocks: Sequence[Block]) -> None:
        """Write blocks that are not there yet, parents first. Raises OSError; what was written before it stays."""
        with self._folder.locked():
            for block in blocks:
                path = self.path(block.place.name)
                if path.exists():
                    continue
                if not self._folder.reserve(block.nbytes):
                    return  # nor is there a use for what follows it
                self._write(path, block)
                self._delete_beginnings(path, block.place)

    def _write(self, path: Path, block: Block) -> None:
        """Under another name, flushed to the disk, then renamed: under its own name a block is whole."""
        self._make_folder(path.parent)
        part = path.with_name(path.name + PARTIAL_SUFFIX)
        try:
            with open_file(part, WRITING | os.O_TRUNC) as file:
                write_block(file, block)
                file.flush()
                os.fsync(file.fileno())
            _set_used(part, block.used_ns, block.place.p0)
            part.replace(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self.root.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        with open_file(self.root / "model", WRITING | os.O_TRUNC) as file:
            file.write(f"{self._model}\n".encode("utf-8", "backslashreplace"))

    def _delete_beginnings(self, path: Path, place: Place) -> None:
        """Blocks that are no more than a beginning of this one can only be less useful."""
        for agreed, other in self._siblings(place.parent, place.tokens, only_beginnings=True):
            if agreed < len(place.tokens) and other != path:
                other.unlink(missing_ok=True)

    def _siblings(self, parent: bytes, tokens: Tokens, *, only_beginnings: bool = False) -> list[tuple[int, Path]]:
        """Files after `parent` that begin like `tokens`, each with how many tokens it has in common with them."""
        if len(tokens) < MIN_TOKENS:
            return []
        prefix = siblings_prefix(parent, tokens)
        folder = self.path(prefix).parent
        found = []
        for name in _names(folder, prefix)[:MAX_SIBLINGS]:
            theirs = _tokens_in(folder / name)
            agreed = agreement(theirs, tokens)
            if len(theirs) and (agreed == len(theirs) or not only_beginnings):
                found.append((agreed, folder / name))
        return found

    def path(self, name: str) -> Path:
        """The file of that name, whether it is there or not."""
        return self.root / name[:2] / name


def _set_used(path: Path, used_ns: int, p0: int) -> None:
    """The deeper in its chain, the older: evicting from the end leaves the beginnings useful."""
    used_ns -= 1000 * p0
    os.utime(path, ns=(used_ns, used_ns))


def _names(folder: Path, prefix: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(SUFFIX))
    except OSError:
        return []


def _tokens_in(path: Path) -> Tokens:
    """The tokens that a file says it holds; none when it is gone or no block."""
    try:
        tokens = read_tokens(path)
    except OSError:
        tokens = None
    return np.empty(0, np.int32) if tokens is None else tokens
