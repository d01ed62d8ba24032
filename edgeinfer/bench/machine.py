"""What a figure was measured on, and where the count of its memory begins."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from pathlib import Path

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def cpu_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def library_build() -> str:
    """The compiled library, by the version of the package that carries it."""
    return f"llama-cpp-python {metadata.version('llama-cpp-python')}"


def reset_peak_rss() -> None:
    """Begin a new peak where the system can (Linux); elsewhere the peak is the whole process's."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)
