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


_PACKAGES = {"llama.cpp": "llama-cpp-python", "ik": "ik-llama-cpp-python"}


def library_build(kernels: str = "llama.cpp") -> str:
    """The compiled library, by the version of the package that carries it."""
    package = _PACKAGES[kernels]
    return f"{package} {metadata.version(package)}"


def reset_peak_rss() -> None:
    """Begin a new peak where the system can (Linux); elsewhere the peak is the whole process's."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)
