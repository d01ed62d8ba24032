"""What the scripts share: the cache folder, sizes as people write them, one-line errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from edgeinfer.cli import console
from edgeinfer.errors import EdgeinferError, UsageError

REPOSITORY = Path(__file__).resolve().parent.parent


def cache_dir(kind: str) -> Path:
    """`$EDGEINFER_CACHE/kind` or `~/.cache/edgeinfer/kind`: outside the repository, safe to delete at any time."""
    root = os.environ.get("EDGEINFER_CACHE") or Path.home() / ".cache" / "edgeinfer"
    return Path(root).expanduser().resolve() / kind


def parse_nbytes(text: str) -> int:
    """Bytes from `200M`, `4G` and the like (decimal units)."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip().upper())
    if match is None:
        raise UsageError(f"{text!r} is not a size", "write it like 200M or 4G")
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]]


def run(main: Callable[[], None]) -> None:
    """Run a script's `main`; an error of ours is one line on stderr and its exit code."""
    try:
        main()
    except EdgeinferError as error:
        console.fail(error)
