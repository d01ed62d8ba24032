"""Model files that are mapped into memory, and what happens when one becomes shorter or its disk fails meanwhile.

To read what is no longer there is a SIGBUS, in the middle of a kernel.
"""

from __future__ import annotations

import signal
from pathlib import Path

from edgeinfer.errors import EdgeinferError, UnusableInputError
from edgeinfer.native import fatal_signals

_mapped: list[str] = []


def expect_loss(path: Path) -> None:
    """From now on the file is mapped."""
    if hasattr(signal, "SIGBUS"):
        if str(path) not in _mapped:
            _mapped.append(str(path))
        fatal_signals.explain(signal.SIGBUS, _loss)


def _loss() -> EdgeinferError:
    what = f"{' or '.join(_mapped)}: became shorter while it was in use, or its disk fails"
    return UnusableInputError(what, "replace a model's file by renaming, never in place")
