"""Ctrl-C while the C library computes: Python's own handler would have to wait until the call returns."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from edgeinfer.cli import console
from edgeinfer.errors import InterruptedByUser


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block, Ctrl-C calls `stop` from another thread, at once, and raises nothing.

    The interpreter's C handler writes the signal's number to a pipe without waiting for the main thread; a thread
    that sleeps on the pipe does the rest.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT:
                stop()

    watcher = threading.Thread(target=watch, name="edgeinfer-interrupt", daemon=True)
    # A handler of ours is needed, though an empty one: without it the signal's default action would come first.
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGINT, previous)
        os.close(writer)
        watcher.join()
        os.close(reader)


def while_loading(*, as_json: bool = False) -> AbstractContextManager[None]:
    """Within the block, in which a model is loaded, Ctrl-C ends the process at once."""

    def leave() -> None:
        # Python code that the C library calls back would swallow an exception; there is nothing to clean up yet.
        try:
            console.fail(InterruptedByUser("interrupted while the model was loading"), as_json=as_json)
        finally:
            os._exit(InterruptedByUser.exit_code)

    return on_interrupt(leave)
