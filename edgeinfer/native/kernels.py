"""A compiled library that runs models: what `NativeModel` and `NativeBackend` need of it, as a value.

There are two: the pinned llama.cpp, here, and its fork ik_llama.cpp (`native.ik`). Most of what they do they do alike:
`lib` has those functions under llama.cpp's names. What they do each in its own way is the rest of the table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgeinfer.ggml_types import GGMLType
from edgeinfer.native import library
from edgeinfer.native.library import llama
from edgeinfer.native.state import StateCheck, state_check
from edgeinfer.native.yarn import yarn_bounds
from edgeinfer.options import RuntimeOptions

_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}  # enum llama_flash_attn_type


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """What a context is made with."""

    n_ctx: int
    n_sequences: int
    is_shared: bool
    """Whether more than one of the sequences is computed; one more only holds cells on their way to and from bytes."""
    threads: int
    options: RuntimeOptions
    abort_flag: int
    """The address of a text, "0" or "1"."""
    eval_callback: Any = None
    """Sees every operation of a pass."""

    def fill(self, params: Any, lib: Any) -> None:
        """Set what both libraries' structures of parameters have, under the same names."""
        params.n_ctx = max(self.n_ctx, self.n_sequences)
        # The library ends the process where each sequence could not have a token of the pass.
        params.n_batch = max(self.options.batch_size, self.n_sequences)
        params.n_ubatch = min(self.options.ubatch_size, self.options.batch_size)
        params.n_seq_max = self.n_sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = GGMLType[self.options.type_k.upper()]
        params.type_v = GGMLType[self.options.type_v.upper()]
        params.abort_callback = abort_callback(lib.ggml_abort_callback)
        params.abort_callback_data = self.abort_flag


@dataclass(frozen=True, slots=True)
class Kernels:
    """One library; its functions take and give what llama.cpp's of the same name do."""

    name: str
    """What `--kernels` and the envelopes call it."""
    lib: Any
    build: Callable[[], str]
    """Which compiled library this is, and what it makes of this machine."""
    open_context: Callable[[int, ContextSettings], int | None]
    """A context over a model's handle; None with a reason in the log."""
    state_check: Callable[[int], StateCheck]
    """Of a context: tells whether a saved state is whole, in the layout that the library writes."""
    close_gaps: Callable[[int, ContextSettings, bool], None] | None = None
    """Moves a context's cells together: where gaps between them make it compute something else, or if told wherever
    there are any, because the tokens of a batch need cells side by side."""


def _open_context(model: int, settings: ContextSettings) -> int | None:
    params = llama.llama_context_default_params()
    settings.fill(params, llama)
    params.flash_attn_type = _FLASH_ATTN[settings.options.flash_attn]
    for name, bound in yarn_bounds(model).items():
        setattr(params, name, bound)
    params.kv_unified = True
    params.no_perf = True
    if settings.eval_callback is not None:
        params.cb_eval = settings.eval_callback
    handle: int | None = llama.llama_init_from_model(model, params)
    return handle


def abort_callback(kind: Any) -> Any:
    """A callback that reads the flag without Python.

    The library asks between any two operations of the graph, hundreds of times a token, and a Python function would
    take the interpreter's lock each time. C's `atoi` has the right shape: given a pointer to "0" or "1", it returns
    that number.
    """
    return ctypes.cast(library.c_runtime().atoi, kind)


LLAMA_CPP = Kernels("llama.cpp", llama, library.build, _open_context, state_check)
