"""ik_llama.cpp, the fork with the fastest kernels on x86 CPUs, from the package ik-llama-cpp-python.

Tried with 0.1.5, whose library goes by an older version of llama.cpp's interface. What was found wrong in it:

- Flash attention (iqk_fa_templates.h, `compute_helper`) takes it that of some rows the last one sees every cell that
  the others see, and the first cell of the last block that it sees. That holds for one sequence whose cells lie in
  order. With another's among them logits are wrong, or the process ends (`S > 0`): so several have to do without.
- How far the cells reach that a pass sees, it finds out by looking at every 32nd (every 256th with flash attention):
  what lies behind one of these that is free, it can overlook (llama.cpp, `llama_kv_cache_cell_max`).
- From 32 rows on, Q4_1 and Q5_1 multiply wrongly where a row's length is no multiple of 128.
- A pass that was interrupted returns 0, and one that found no room has put its first part into the cache.
- A failed assertion ends the process without asking anybody, by a signal.

So nothing here is to be called in this process before the model has run in another one: see `api.trials`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import EdgeinferError, ResourceError, UnusableInputError
from edgeinfer.native import fatal_signals, library
from edgeinfer.native.ik_library import load, prove_layout
from edgeinfer.native.ik_package import NAME, identity
from edgeinfer.native.kernels import ContextSettings, Kernels, abort_callback
from edgeinfer.native.model import NativeModel, NativeVocabularyFile
from edgeinfer.native.state import end_of_columns, end_of_rows

_INT, _TEXT = 0, 3  # enum llama_model_kv_override_type

_LOOKED_AT = 32  # GGML_KQ_MASK_PAD: llama_kv_cache_get_padding

_CELL = np.dtype([("position", np.int32), ("n_sequences", np.uint32)])
_COUNT = struct.Struct("=I")
_LAYERS = struct.Struct("=II")  # whether V is transposed, layers


class IkModel(NativeModel):
    """Weights in this library; the vocabulary is llama.cpp's, of the same file, read at the same time.

    `n_vocab` is how many tokens the file has. Raises what `NativeModel` raises, ResourceError where the library isn't
    what is known here, or memory is short.
    """

    def __init__(self, path: Path, architecture: str, n_vocab: int, *, mlock: bool = False) -> None:
        self.kernels = kernels()
        lib = self.kernels.lib
        params = lib.llama_model_default_params()
        # Copies in the layout of the kernels; the library maps no file that it copies.
        params.use_mmap, params.repack_tensors, params.use_mlock = False, True, mlock
        params.kv_overrides = _without_vocabulary(lib, architecture, n_vocab)
        with ThreadPoolExecutor(1, thread_name_prefix="vocabulary") as pool:
            reading = pool.submit(NativeVocabularyFile, path)
            library.forget_errors()
            self._handle = lib.llama_model_load_from_file(os.fsencode(path), params)
            reason = library.last_error() or "the library gives no reason"
        try:
            self._file = reading.result()
        except UnusableInputError:
            if self._handle:
                lib.llama_model_free(self._handle)
            raise
        self.vocabulary = self._file.vocabulary
        if not self._handle:
            self.close()
            if "alloc" in reason:
                raise ResourceError(f"{path}: no memory for copies of the weights: {reason}", "use --kernels llama.cpp")
            raise UnusableInputError(f"{path}: ik_llama.cpp does not load it: {reason}", "use --kernels llama.cpp")

    def close(self) -> None:
        """Free weights and vocabulary; contexts over them must be closed before."""
        super().close()
        self._file.close()


def _without_vocabulary(lib: Any, architecture: str, n_vocab: int) -> Any:
    """Changes to the file's metadata, to the end: reading a vocabulary twice would cost its time and memory twice."""
    changes = (lib.llama_model_kv_override * 3)()
    changes[0].tag, changes[0].key, changes[0].value.val_str = _TEXT, b"tokenizer.ggml.model", b"no_vocab"
    changes[1].tag, changes[1].key, changes[1].value.val_i64 = _INT, f"{architecture}.vocab_size".encode(), n_vocab
    return changes


@cache
def kernels() -> Kernels:
    """The library, loaded and looked at. Raises ResourceError where it is not what is known here."""
    lib = load()
    prove_layout(lib)
    lib.llama_log_set(ctypes.cast(library.log_callback, ctypes.c_void_p), None)
    lib.llama_backend_init()
    fatal_signals.explain(signal.SIGABRT, _gave_up)
    features = library.system_info(lib)
    return Kernels(
        NAME, lib, lambda: f"ik_llama.cpp {identity()} {features}", _open_context, lambda context: is_whole, _close_gaps
    )


def _gave_up() -> EdgeinferError:
    # Which assertion it was the library has written on stderr.
    return UnusableInputError("ik_llama.cpp gave up", "use --kernels llama.cpp")


def _open_context(model: int, settings: ContextSettings) -> int | None:
    lib = load()
    params = lib.llama_context_default_params()
    settings.fill(params, lib)
    params.flash_attn = settings.options.flash_attn != "off" and not settings.is_shared
    handle: int | None = lib.llama_init_from_model(model, params)
    return handle


class _Cells(ctypes.Structure):
    """`llama_kv_cache_view`."""

    _NUMBERS = ("n_cells", "n_seq_max", "n_tokens", "n_used", "longest_gap", "longest_gap_at")
    _fields_ = (
        *((name, ctypes.c_int32) for name in _NUMBERS),
        *((name, ctypes.POINTER(ctypes.c_int32)) for name in ("positions", "sequences")),
    )


def _close_gaps(context: int, settings: ContextSettings, is_any_wrong: bool) -> None:
    lib = load()
    # One sequence's cells are to be in order, for flash attention; of several only those that are looked at count.
    step = 1 if is_any_wrong or not settings.is_shared else _LOOKED_AT
    lib.llama_memory_seq_cp(context, 0, 0, 0, 0)  # copies nothing, and lets the search for free cells begin at 0
    if not _has_gaps(context, step):
        return
    # It would end halfway, and say nothing of it.
    lib.llama_set_abort_callback(context, None, None)
    try:
        while _has_gaps(context, step):
            lib.llama_kv_cache_defrag(context)
            lib.llama_kv_cache_update(context)
    finally:
        callback = ctypes.cast(abort_callback(lib.ggml_abort_callback), ctypes.c_void_p)
        lib.llama_set_abort_callback(context, callback, settings.abort_flag)


def _has_gaps(context: int, step: int) -> bool:
    """Whether a `step`th cell is free that is followed by one that is not."""
    lib = load()
    cells = _Cells(n_seq_max=1)
    lib.llama_kv_cache_view_update(context, ctypes.byref(cells))
    try:
        used = np.ctypeslib.as_array(cells.positions, (cells.n_cells,)) >= 0
        length = cells.n_cells - int(used[::-1].argmax()) if used.any() else 0
        return not used[step - 1 : length : step].all()
    finally:
        lib.llama_kv_cache_view_free(ctypes.byref(cells))


def is_whole(piece: memoryview, p0: int, p1: int) -> bool:
    """Whether what the library saved has every cell of `[p0, p1)`, once, and nothing else follows."""
    try:
        return _end_of_state(piece, p0, p1) == len(piece)
    except (ValueError, OverflowError, struct.error):
        return False


def _end_of_state(piece: memoryview, p0: int, p1: int) -> int:
    (n_cells,) = _COUNT.unpack_from(piece, 0)
    if n_cells != p1 - p0:
        raise ValueError("not the cells of this range")
    cells = np.frombuffer(piece, _CELL, n_cells, _COUNT.size)
    if cells["n_sequences"].any() or (np.sort(cells["position"]) != np.arange(p0, p1)).any():
        raise ValueError("not the positions of this range")
    offset = _COUNT.size + cells.nbytes
    is_transposed, n_layers = _LAYERS.unpack_from(piece, offset)
    offset += _LAYERS.size
    for ends in (end_of_rows, end_of_columns if is_transposed else end_of_rows):
        for _ in range(n_layers):
            offset = ends(piece, offset, n_cells)
    (has_states,) = _COUNT.unpack_from(piece, offset)  # of recurrent layers
    if has_states:
        raise ValueError("a state of another kind")
    return offset + _COUNT.size
