"""Whether a context fits into memory, asked before anything is allocated: too much of it ends by the system's hand."""

from __future__ import annotations

import os
from pathlib import Path

from edgeinfer.errors import ResourceError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.describe import KV_ELEMENT_NBYTES, kv_nbytes_per_token
from edgeinfer.gguf_file.header import Header
from edgeinfer.options import DEFAULT_CTX_SIZE, RuntimeOptions

CELL_NBYTES = 64
"""What the library notes about each token's place in the cache, at least."""
MOST_OF_IT = 0.9
"""Of the available memory: working buffers come on top of the cache."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_context(header: Header, options: RuntimeOptions, draft: Header | None = None) -> None:
    """Raise ResourceError when the KV cache alone would take (nearly) all memory that is available.

    A draft model has one too, of as many tokens.

    Weights do not count: they are mapped, and read anew when there is no room. Asks nothing where the system does not
    tell (anything but Linux).
    """
    available = available_nbytes()
    trained = header.hyperparameter("context_length") or DEFAULT_CTX_SIZE
    n_ctx = options.ctx_size or min(DEFAULT_CTX_SIZE, trained)
    bits = sum(8 * t.block_nbytes / t.block_length for t in map(_type, (options.cache_type_k, options.cache_type_v)))
    per_token = 0
    for model in (header, draft) if draft else (header,):
        per_token += int((kv_nbytes_per_token(model) or 0) * bits / (16 * KV_ELEMENT_NBYTES)) + CELL_NBYTES
    if available is not None and n_ctx * per_token > MOST_OF_IT * available:
        raise ResourceError(
            f"{header.path}: a context of {n_ctx} tokens needs {n_ctx * per_token} bytes, {available} are available",
            "lower the context size (-c) or quantize the cache (--cache-type-k/v q8_0)",
        )


def available_nbytes() -> int | None:
    """Bytes that this process could take without pushing others out; None where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no limit, or another kind of system
        return free
    cache = sum(
        int(line.split()[1])
        for line in (_CGROUP / "memory.stat").read_text().splitlines()
        if line.startswith("inactive_file ")
    )
    return min(free, max(0, limit - used + cache))


def expected_nbytes() -> int | None:
    """The same, and where the system does not tell that, half of what is built in."""
    available = available_nbytes()
    if available is not None:
        return available
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None


def _type(name: str) -> GGMLType:
    return GGMLType[name.upper()]
