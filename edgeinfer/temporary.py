"""Folders for unfinished files, which go away however the process ends; only being killed leaves them behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folders: set[Path] = set()


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, for its owner only, until the block ends. Raises OSError when it cannot be made."""
    folder = parent / f".edgeinfer-{os.urandom(8).hex()}.partial"
    _folders.add(folder)
    try:
        folder.mkdir(0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)


def remove_all() -> None:
    """Remove what there is at the moment: for an end that unwinds no block, as an assertion of the C library's."""
    for folder in tuple(_folders):
        shutil.rmtree(folder, ignore_errors=True)
