"""Work that a signal ends soon, but not in the middle of anything: what is finished is still written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgeinfer.cli import console
from edgeinfer.cli.interrupt import interrupted_by, on_interrupt
from edgeinfer.errors import InterruptedByUser

_WRITE_WAIT_S = 0.5
"""How long a signal waits for one write."""
_WAIT_S = 20.0
"""How long it waits for all of it: what is finished may be much, and to write it slow."""


class Stopping:
    """What the first signal does, and the second: that one ends the process at once."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.signal = 0
        """The number of the first signal, if there was one."""
        self.over = threading.Event()
        self._stop = stop
        self._writing_since_s: float | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a write: to a pipe that nobody reads it takes for ever, and knows no signals."""
        self._writing_since_s = time.monotonic()
        yield
        self._writing_since_s = None

    def receive(self, number: int) -> None:
        """Called with a signal's number, from a thread other than that of the work."""
        if self.signal:
            self._leave("")
        self.signal = number
        self._stop()
        threading.Thread(target=self._watch, name="edgeinfer-stopping", daemon=True).start()

    def _watch(self) -> None:
        started_s = time.monotonic()
        while not self.over.wait(0.05):
            now_s, since_s = time.monotonic(), self._writing_since_s
            if since_s is not None and now_s - max(since_s, started_s) > _WRITE_WAIT_S:
                self._leave(", and nobody reads the output")
            if now_s - started_s > _WAIT_S:
                self._leave("")

    def _leave(self, how: str) -> None:
        error = InterruptedByUser(interrupted_by(self.signal) + how)
        console.fail_at_once(error, as_json=False, code=128 + self.signal)


@contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[Stopping]:
    """Within the block, a signal calls `stop` and raises nothing: the block is to end by that.

    A signal's exception could come anywhere, also between two changes that belong together.
    """
    state = Stopping(stop)
    with on_interrupt(state.receive, terminates=False):
        try:
            yield state
        finally:
            state.over.set()
