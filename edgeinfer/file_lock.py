"""A lock on an open file, which the system takes back when its process ends."""

from __future__ import annotations

import os
import sys
import time

_ASK_AGAIN_S = 0.005


def lock(file: int, wait_s: float) -> bool:
    """Lock a file descriptor against other processes; False when another one held it for `wait_s`. Raises OSError."""
    deadline_s = time.monotonic() + wait_s
    while not _try(file):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_ASK_AGAIN_S)
    return True


if sys.platform == "win32":
    import msvcrt

    def _try(file: int) -> bool:
        try:
            os.lseek(file, 0, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def unlock(file: int) -> None:
        """Let others have it. Not left to closing it: a child forked meanwhile would go on holding it."""
        os.lseek(file, 0, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try(file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(file: int) -> None:
        """Let others have it. Not left to closing it: a child forked meanwhile would go on holding it."""
        fcntl.flock(file, fcntl.LOCK_UN)
