"""`types.PrefixCache` on disk: what one process computed, the next one need not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from edgeinfer.cache.block import Block, chain
from edgeinfer.cache.folder import CacheFolder
from edgeinfer.cache.store import BlockStore
from edgeinfer.cache.writer import BackgroundWriter
from edgeinfer.types import Backend, Tokens

CLOSE_WAIT_S = 2.0
"""How long a process that has nothing else to do waits for its blocks to be written."""


class DiskPrefixCache:
    """The prefix cache of one model under one set of options. Every failure is a miss; `problem` tells the first.

    One thread calls it.
    """

    def __init__(self, folder: CacheFolder, fingerprint: bytes, model: str) -> None:
        self.problem: str | None = None
        self._store = BlockStore(folder, fingerprint, model)
        self._writer = BackgroundWriter(self._write, self._note)
        self._unwritten: set[bytes] = set()
        self._can_save = True
        self._can_load = True
        try:
            folder.prepare()
            self._can_save = folder.budget_nbytes() > 0
        except OSError as error:
            self._note(error)
            self._can_save = False
            self._can_load = not isinstance(error, PermissionError)  # not what somebody else may have written

    @property
    def folder(self) -> Path | None:
        """What else is kept of this model goes here, and is deleted with the cache; None where that cannot be."""
        return self._store.root if self._can_save and self._can_load else None

    def match(self, tokens: Tokens) -> int:
        """The length of the longest stored beginning of `tokens`: about 10 µs a block, so ask once a request."""
        found = self._store.find(tokens) if self._can_load else []
        return found[-1].p1 if found else 0

    def restore(self, backend: Backend, seq: int, tokens: Tokens, start: int) -> int:
        """Append the stored state of `tokens[start:]` to a sequence that holds `tokens[:start]`; its new length.

        Give it all but the last token of a prompt: that one must be computed, for its logits.
        """
        length, used = start, []
        for found in self._store.find(tokens) if self._can_load else []:
            if found.p1 > length:
                block = self._store.read(found, tokens)
                if block is None:
                    break
                end = found.p0 + len(block.place.tokens)
                length = backend.load_range(seq, found.p0, end, block.payload, found.p1)
                if length < found.p1:
                    break
            used.append(found.path)
        self._store.touch(used, time.time_ns())
        return length

    def remember(self, backend: Backend, seq: int, tokens: Tokens) -> None:
        """Copy the state of `tokens`, which the sequence begins with, out of it where it is not stored; write later."""
        if not self._can_save:
            return
        used, now_ns = [], time.time_ns()
        for place in chain(tokens, self._store.fingerprint):
            if place.key in self._unwritten or self._store.covers(place):
                used.append(self._store.path(place.name))
                continue
            payload = backend.save_range(seq, place.p0, place.p1)
            if payload is None:  # memory that gives no ranges, or a window has left this one behind
                break
            self._unwritten.add(place.key)
            if not self._writer.submit(Block(place, payload, now_ns)):
                self._unwritten.discard(place.key)
                break  # what follows would be worthless without it
        self._store.touch(used, now_ns)

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Wait for the writing to end, but not for long; it is only a cache."""
        self._writer.close(wait_s)

    def _write(self, blocks: Sequence[Block]) -> None:
        try:
            self._store.write(blocks)
        finally:
            self._unwritten.difference_update(block.place.key for block in blocks)

    def _note(self, error: Exception) -> None:
        if self.problem is None:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self.problem = f"the prefix cache is not written: {reason}"
