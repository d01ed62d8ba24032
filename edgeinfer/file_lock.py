"""Locks that several processes respect, on open files; a process that ends lets go of them."""

from __future__ import annotations

import os
import sys
import time

if sys.platform == "win32":
    import msvcrt

    def acquire(lock: int, deadline_s: float) -> None:
        """Lock a file's descriptor. Raises OSError when others still hold it at the deadline (`time.monotonic`)."""
        mode = msvcrt.LK_LOCK if time.monotonic() < deadline_s else msvcrt.LK_NBLCK  # the first tries for ten seconds
        msvcrt.locking(lock, mode, 1)

    def release(lock: int) -> None:
        """Let others have the lock."""
        os.lseek(lock, 0, os.SEEK_SET)
        msvcrt.locking(lock, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def acquire(lock: int, deadline_s: float) -> None:
        """Lock a file's descriptor. Raises OSError when others still hold it at the deadline (`time.monotonic`)."""
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(None, "another process holds its lock") from None
                time.sleep(0.005)
            else:
                return

    def release(lock: int) -> None:
        """Let others have the lock."""
        fcntl.flock(lock, fcntl.LOCK_UN)
