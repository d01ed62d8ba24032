"""A small file that is replaced wholly or not at all, and read by its owner only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Make `data` all that a file has; its folder must be there. Raises OSError, and then nothing has changed."""
    # Not made of the file's name, which may be as long as a name can be already.
    partial = path.with_name(f".{os.urandom(8).hex()}.part")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
