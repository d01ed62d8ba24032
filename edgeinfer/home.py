"""Where edgeinfer keeps what it owns: models, prefix cache, sessions, calibration data."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from edgeinfer.errors import UsageError


def home() -> Path:
    """`$EDGEINFER_HOME`, or a directory of the platform's own for a program's data; it need not exist.

    Raises UsageError where nobody says whose home it would be in.
    """
    try:
        return _home()
    except (RuntimeError, FileNotFoundError):  # no such user; a relative name in a directory that is gone
        raise UsageError("there is no home directory to keep data in", "set EDGEINFER_HOME to a directory") from None


def _home() -> Path:
    chosen = os.environ.get("EDGEINFER_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "edgeinfer"
