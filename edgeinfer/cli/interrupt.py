"""Signals that are to end something: Ctrl-C, and what a system sends to end a process.

Python runs its handlers between two of its own operations. Two places are out of their reach: a long call of the C
library, and the functions that the library calls back, where an exception is printed and lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from edgeinfer.cli import console
from edgeinfer.errors import InterruptedByUser

_ASK_AGAIN_S = 0.02
_WATCHER_ENDS_S = 1.0
_TWICE_S = 0.3
"""A second signal that comes sooner is the same one: wrappers send it to the process and to its group."""
_UNREAD_S = 0.5
"""A write that takes this long after a signal waits for somebody who does not read."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP: its code is what a shell would report."""


def prepare_signals() -> None:
    """Let a termination take the way of an exception, so that nothing half-written stays behind."""

    def stop(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    sys.unraisablehook = _ask_again


def _ask_again(lost: Any) -> None:
    """Send a signal once more whose exception was lost in a function that C code had called."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        number: int = signal.SIGINT
    elif isinstance(lost.exc_value, Terminated):
        number = int(lost.exc_value.code or 0) - 128
    else:
        sys.__unraisablehook__(lost)
        return
    timer = threading.Timer(_ASK_AGAIN_S, os.kill, [os.getpid(), number])  # which also ends a wait of the main thread
    timer.daemon = True
    timer.start()


@contextmanager
def on_interrupt(stop: Callable[[int], None], *, goes_on: bool = False, raises: bool = True) -> Iterator[list[int]]:
    """Within the block, Ctrl-C and a termination call `stop` with the signal's number, from another thread, at once.

    Ctrl-C raises nothing then; a termination still does where it `raises`, as soon as Python is back in the main
    thread: anywhere, also between two changes that belong together. The interpreter's C handler writes the signal's
    number to a pipe without waiting for the main thread; a thread that sleeps on the pipe does the rest. Gives the list
    of the signals' numbers, which grows. Unless the program `goes_on` afterwards, a second signal ends it at once, and
    what the block still writes must be read: a write to a pipe that is full knows no Ctrl-C, so the program ends where
    one takes long.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    received: list[int] = []
    left = threading.Event()
    ending = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}

    def watch() -> None:
        first_s = 0.0
        while number := os.read(reader, 1):
            if number[0] not in ending:
                continue
            received.append(number[0])
            if not goes_on and len(received) == 1:
                first_s = time.monotonic()
                threading.Thread(target=_end_unread, args=(number[0], left), daemon=True).start()
            elif not goes_on and time.monotonic() - first_s > _TWICE_S:
                _end(number[0], "")
            stop(number[0])

    watcher = threading.Thread(target=watch, name="edgeinfer-interrupt", daemon=True)
    quiet = {signal.SIGINT} if raises else ending
    # A shell's background job is not meant, nor one of nohup.
    previous = {s: handler for s in quiet if (handler := signal.getsignal(s)) not in (signal.SIG_IGN, None)}
    for number in previous:
        # A handler of ours is needed, though an empty one: without it the signal's default action would come first.
        signal.signal(number, lambda *_: None)
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield received
    finally:
        left.set()
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(writer)
        watcher.join(_WATCHER_ENDS_S)  # a child process that was forked meanwhile may have the pipe open as well
        if not watcher.is_alive():
            os.close(reader)


def _end_unread(number: int, left: threading.Event) -> None:
    """End the program when one write takes too long before the block is left."""
    seen = 0
    while not left.wait(_UNREAD_S):
        begun, done = console.writes.begun, console.writes.done
        if done < begun == seen:
            _end(number, ", and nobody reads the output")
        seen = begun


def _end(number: int, how: str) -> NoReturn:
    threading.Timer(_UNREAD_S, os._exit, [128 + number]).start()  # stderr may be the pipe that is full
    error = InterruptedByUser(interrupted_by(number) + how)
    console.fail_at_once(error, as_json=False, code=128 + number)


def interrupted_by(number: int) -> str:
    """What an error says of the signal that ended the work."""
    return "interrupted" if number == signal.SIGINT else "terminated"


@contextmanager
def ending_at_once(*, as_json: bool = False) -> Iterator[None]:
    """Within the block, a signal ends the program at once: there is no answer yet, and nothing to clean up."""

    def leave(number: int) -> None:
        error = InterruptedByUser(f"{interrupted_by(number)} before the answer began")
        console.fail_at_once(error, as_json=as_json, code=128 + number)

    with on_interrupt(leave):
        yield
