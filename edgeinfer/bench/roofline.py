"""How near decoding comes to the memory's speed: a token cannot be faster than reading the weights it needs."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
from numpy.typing import NDArray

from edgeinfer.gguf_file.describe import computing_tensors
from edgeinfer.gguf_file.header import Header

MAX_BUFFER_NBYTES = 1 << 30  # beyond any cache
PASSES = 5


def weight_nbytes_per_token(header: Header) -> int:
    """Bytes of weights that one token reads: of the experts those that are used, of an untied embedding one row."""
    names = {tensor.name for tensor in header.tensors}
    experts = header.hyperparameter("expert_count", 0)
    used = header.hyperparameter("expert_used_count", 0)
    total = 0
    for tensor in computing_tensors(header, header.tensors):
        nbytes = tensor.nbytes
        if tensor.name == "token_embd.weight" and "output.weight" in names:
            nbytes //= tensor.shape[1]
        elif "_exps." in tensor.name and experts:
            nbytes = nbytes * used // experts
        total += nbytes
    return total


def memory_bandwidth_gbps(threads: int) -> float:
    """Gigabytes per second that `threads` threads read together, the best of a few passes over a large buffer."""
    nbytes = min(MAX_BUFFER_NBYTES, _physical_nbytes() // 8)
    buffer = np.zeros(nbytes // 8, np.int64)
    buffer.fill(1)  # untouched pages all read the same page of zeros
    parts = np.array_split(buffer, threads)
    return max(_read_nbytes_per_s(parts) for _ in range(PASSES)) / 1e9


def _read_nbytes_per_s(parts: list[NDArray[np.int64]]) -> float:
    # `max` is the reduction that numpy computes fast enough to wait for memory; it runs without the interpreter's lock.
    threads = [threading.Thread(target=part.max) for part in parts]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(part.nbytes for part in parts) / (time.perf_counter() - started)


def _physical_nbytes() -> int:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 << 30
