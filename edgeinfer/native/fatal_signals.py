"""Signals that a C library's code ends the process with, and the command line's word on them.

Nothing can go on from there, whichever thread it is. A program that leaves last words (`errors.last_words`) gets to say
them and ends with the right code; one that uses the API keeps the handlers that it has.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from edgeinfer.errors import EdgeinferError, last_words
from edgeinfer.native.library import c_runtime

_errors: dict[int, Callable[[], EdgeinferError]] = {}
_speaking = threading.Lock()


def explain(number: int, error: Callable[[], EdgeinferError]) -> None:
    """From now on a signal of this number is that error."""
    if last_words and number not in _errors:
        install: Any = c_runtime().signal  # Python's own would wait for the instruction to be over
        install.argtypes, install.restype = (ctypes.c_int, _Handler), ctypes.c_void_p
        _errors[number] = error
        install(number, _handler)


def _on_signal(number: int) -> None:
    if not _speaking.acquire(blocking=False):
        threading.Event().wait()  # several threads may have it; the first one speaks and ends them all
    last_words[-1](_errors[number]())


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handler = _Handler(_on_signal)  # must outlive every use
