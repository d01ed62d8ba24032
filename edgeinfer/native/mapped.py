"""Model files that are mapped into memory, and what happens when one becomes shorter or its disk fails meanwhile.

To read what is no longer there is a SIGBUS, whichever thread it is, in the middle of a kernel: nothing can go on from
there. The command line, which leaves last words (`errors.last_words`), gets to say it and ends with the right code;
a program that uses the API keeps the handlers that it has.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from pathlib import Path
from typing import Any

from edgeinfer.errors import UnusableInputError, last_words
from edgeinfer.native.library import c_runtime

_mapped: list[str] = []
_speaking = threading.Lock()


def expect_loss(path: Path) -> None:
    """From now on the file is mapped."""
    if last_words and hasattr(signal, "SIGBUS") and str(path) not in _mapped:
        if not _mapped:
            install: Any = c_runtime().signal  # Python's own would wait for the instruction to be over
            install.argtypes, install.restype = (ctypes.c_int, _Handler), ctypes.c_void_p
            install(signal.SIGBUS, _handler)
        _mapped.append(str(path))


def _on_loss(number: int) -> None:
    if not _speaking.acquire(blocking=False):
        threading.Event().wait()  # several threads read the same; the first one speaks and ends them all
    what = f"{' or '.join(_mapped)}: became shorter while it was in use, or its disk fails"
    last_words[-1](UnusableInputError(what, "replace a model's file by renaming, never in place"))


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handler = _Handler(_on_loss)  # must outlive every use
