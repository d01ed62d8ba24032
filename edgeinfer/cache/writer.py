"""Writing in the background: a thread with a bounded queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from edgeinfer.cache.block import Block

MAX_QUEUED_NBYTES = 256 << 20
BATCH_BLOCKS = 16
"""Blocks that are written under one hold of the lock: other processes wait for it."""


class BackgroundWriter:
    """Gives blocks to `write` in order, in a thread that starts with the first. After a failure it takes no more."""

    def __init__(self, write: Callable[[Sequence[Block]], None], on_failure: Callable[[Exception], None]) -> None:
        self._write = write
        self._on_failure = on_failure
        self._queue: deque[Block] = deque()
        self._changed = threading.Condition()
        self._queued_nbytes = 0
        self._is_busy = False
        self._accepts = True
        self._thread: threading.Thread | None = None

    def submit(self, block: Block) -> bool:
        """Queue a block; False when the queue is full, or nothing can be written."""
        with self._changed:
            if not self._accepts or (self._queue and self._queued_nbytes + block.nbytes > MAX_QUEUED_NBYTES):
                return False
            self._queue.append(block)
            self._queued_nbytes += block.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edgeinfer-prefix-cache", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def close(self, wait_s: float) -> None:
        """Take no more, and wait until everything is written, but no longer than `wait_s`: the rest is dropped."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            self._accepts = False
            self._changed.notify_all()
            while (self._queue or self._is_busy) and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._queue.clear()

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._write(batch)
            except Exception as error:  # a cache that cannot be written is no reason to end anything
                self._give_up()
                self._on_failure(error)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _next_batch(self) -> list[Block]:
        """Waits for blocks; an empty list when none will come any more."""
        with self._changed:
            while self._accepts and not self._queue:
                self._changed.wait()
            batch = [self._queue.popleft() for _ in range(min(BATCH_BLOCKS, len(self._queue)))]
            self._queued_nbytes -= sum(block.nbytes for block in batch)
            self._is_busy = bool(batch)
            return batch

    def _give_up(self) -> None:
        with self._changed:
            self._accepts = False
            self._queue.clear()
