"""Where edgeinfer keeps what it owns: models, prefix cache, sessions, calibration data."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def home() -> Path:
    """`$EDGEINFER_HOME`, or a directory of the platform's own for a program's data; it need not exist."""
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
