"""Many requests through one engine: as they come in, as they are answered, in the order they came.

Only a bounded number is in memory: those the engine works on or has waiting, and answers that wait for an earlier one.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgeinfer.errors import EdgeinferError
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.engine import Engine
from edgeinfer.types import FinishReason, Usage

T = TypeVar("T")

MAX_UNWRITTEN = 4096
"""Answers that may wait for an earlier one before new requests have to wait too."""
_END = object()


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One request: being answered (`reply`), answered (`finish_reason`, `usage`), or wrong (`error`).

    Of an answer that waits for an earlier one only the text is kept.
    """

    row: T
    reply: Reply | None = None
    error: EdgeinferError | None = None
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to come."""
        return self.reply is None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.pieces)

    def read(self) -> None:
        """Take what the reply has; with its last piece, or an error, the reply itself is no longer needed."""
        assert self.reply is not None
        try:
            self.pieces.extend(self.reply.read())
        except EdgeinferError as error:
            self.error, self.reply = error.bare(), None
            return
        if self.reply.finish_reason is not None:
            self.finish_reason, self.usage = self.reply.finish_reason, self.reply.generation.usage
            self.reply = None


class ReadAhead(Generic[T]):
    """An iterator that runs in a thread, at most `size` items ahead: waiting for input does not stop the engine."""

    def __init__(self, items: Iterable[T], size: int) -> None:
        self._queue: queue.Queue[object] = queue.Queue(size)
        self.ended = False
        threading.Thread(target=self._read, args=(items,), name="edgeinfer-input", daemon=True).start()

    def get(self, *, wait: bool) -> T | None:
        """The next item; None when there is none now, or none any more (`ended`). Raises what the iterator raises."""
        if self.ended:
            return None
        try:
            item = self._queue.get(block=wait, timeout=0.1 if wait else None)
        except queue.Empty:
            return None
        if item is _END or isinstance(item, BaseException):
            self.ended = True
            if isinstance(item, BaseException):
                raise item
            return None
        return item  # type: ignore[return-value]  # what was put in

    def _read(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                self._queue.put(item)
            self._queue.put(_END)
        except BaseException as error:
            self._queue.put(error)


class Batch(Generic[T]):
    """Iterate for the finished entries, in the order of the rows. One thread iterates; `stop` may come from any.

    `start` makes a row's reply; an EdgeinferError that it raises becomes the row's.
    """

    def __init__(self, engine: Engine, rows: ReadAhead[T], start: Callable[[T], Reply]) -> None:
        self._engine = engine
        self._rows = rows
        self._start = start
        # As many wait as run, so that a place is taken at once and shared beginnings are seen.
        self._most_at_once = 2 * engine.limits.max_running
        self._entries: deque[Entry[T]] = deque()
        self._working: dict[int, Entry[T]] = {}
        self.stopped = False
        self.completion_tokens = 0
        """Tokens of all answers so far."""
        self.on_step: Callable[[], None] = lambda: None
        """Called after every step, and ten times a second while there is nothing to do."""

    def stop(self) -> None:
        """End soon: entries that are finished still come, the others do not."""
        self.stopped = True
        self._engine.interrupt()

    def __iter__(self) -> Iterator[Entry[T]]:
        """Read, compute and give back until the rows end."""
        try:
            while not self.stopped:
                self._fill()
                while self._entries and self._entries[0].is_done:
                    yield self._entries.popleft()
                if self.stopped:
                    return
                if self._engine.has_work:
                    self._step()
                elif self._rows.ended and not self._entries:
                    return
                self.on_step()
        finally:
            for entry in self._working.values():
                assert entry.reply is not None
                entry.reply.cancel()

    def _fill(self) -> None:
        """Take rows as long as there are some and there is a place; wait for them only with nothing else to do.

        What is wrong with the first one can be told before the next is looked at.
        """
        while len(self._working) < self._most_at_once and len(self._entries) < MAX_UNWRITTEN:
            if self.stopped or (self._entries and self._entries[0].is_done):
                return
            row = self._rows.get(wait=not self._entries)
            if row is None:
                return
            entry = Entry(row)
            self._entries.append(entry)
            try:
                entry.reply = self._start(row)
                self._working[entry.reply.generation.request.id] = entry
            except EdgeinferError as error:
                entry.error = error.bare()

    def _step(self) -> None:
        for event in self._engine.step():
            self.completion_tokens += len(event.tokens)
            entry = self._working.get(event.request_id)
            if entry is None or self.stopped:
                continue
            entry.read()
            if entry.is_done:
                del self._working[event.request_id]
