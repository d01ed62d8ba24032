"""What a figure was measured on, and how much memory the process held."""

from __future__ import annotations

import contextlib
import platform
import sys
from importlib import metadata
from pathlib import Path

_STATUS = Path("/proc/self/status")
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


def peak_rss_bytes() -> int | None:
    """The most resident memory since the last reset; None where the system does not tell."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
