"""What decoding one token by one costs above the C library: ours and a bare `llama_decode`, in turns, in one process.

Runs of whole programs differ by more than a few per cent from minute to minute, so a small difference between two
programs cannot be seen in them. Here both sides take turns every 16 tokens on the same model: `forward` as the engine
calls it, the same context without anything of ours around it, and a context with llama-bench's settings (one sequence,
no unified KV cache, no abort callback).
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np

from edgeinfer.api.load import load
from edgeinfer.options import RuntimeOptions
from edgeinfer.types import Row

N_CTX = 256
BLOCK = 16
SETTLING = 2
"""Tokens after a change of sides that are not counted: the other one's data is in the caches."""


def bare(context: int) -> Callable[[int, int], None]:
    """Decode one token as llama-bench does."""
    token = (ctypes.c_int32 * 1)()

    def decode(value: int, pos: int) -> None:
        token[0] = value
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1)):
            raise SystemExit("llama_decode failed")
        llama_cpp.llama_synchronize(context)

    return decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    options = RuntimeOptions(ctx_size=N_CTX, threads=arguments.threads, prefix_cache=False)
    with load(arguments.model, options) as model:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = N_CTX
        params.n_threads = params.n_threads_batch = arguments.threads
        theirs = llama_cpp.llama_init_from_model(model.native.handle, params)
        ours = model.backend._open_handle

        def forward(value: int, pos: int) -> None:
            model.backend.forward((Row(0, np.array([value], np.int32), pos, 0),))

        sides = {
            "edgeinfer's forward": (ours, forward),
            "the same context, bare": (ours, bare(ours)),
            "llama-bench's context": (theirs, bare(theirs)),
        }
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for context in (ours, theirs):
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            positions = {ours: 0, theirs: 0}
            for name in random.sample(sorted(sides) * 4, 4 * len(sides)):
                context, decode = sides[name]
                for i in range(BLOCK):
                    token = random.randrange(model.backend.n_vocab)
                    started = time.perf_counter()
                    decode(token, positions[context])
                    if i >= SETTLING:
                        taken[name].append(time.perf_counter() - started)
                    positions[context] += 1
        llama_cpp.llama_free(theirs)
    least = {name: np.percentile(values, [50, 25, 75]) * 1e3 for name, values in taken.items()}
    base = least["llama-bench's context"][0]
    for name, (median, low, high) in least.items():
        print(f"{name:24} {median:6.2f} ms a token ({low:.2f} to {high:.2f}, half of them)  {median / base:.3f}")


if __name__ == "__main__":
    main()
