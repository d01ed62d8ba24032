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
import importlib
import importlib.util
import os
import signal
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from edgeinfer.errors import EdgeinferError, ResourceError, UnusableInputError
from edgeinfer.native import fatal_signals, library
from edgeinfer.native.kernels import FORK_PACKAGE, ContextSettings, Kernels, abort_callback, fork_folder
from edgeinfer.native.model import NativeModel, NativeVocabularyFile
from edgeinfer.native.state import end_of_columns, end_of_rows

NAME = "ik"
VERSION = "0.1.5"
DISTRIBUTION = "ik-llama-cpp-python"
_LIBRARY_VARIABLE = "IK_LLAMA_CPP_LIB_PATH"
"""Names another file than the package's own, if it is set; what that one needs is taken to lie beside it."""
REQUIREMENT = f"{DISTRIBUTION}=={VERSION}"
"""What pip installs it by."""
_MODEL_NBYTES, _CONTEXT_NBYTES, _BATCH_NBYTES = 168, 216, 72
"""Of the structures that are passed by value."""
_INT, _TEXT = 0, 3  # enum llama_model_kv_override_type

_LOOKED_AT = 32  # GGML_KQ_MASK_PAD: llama_kv_cache_get_padding

_CELL = np.dtype([("position", np.int32), ("n_sequences", np.uint32)])
_COUNT = struct.Struct("=I")
_LAYERS = struct.Struct("=II")  # whether V is transposed, layers


def version() -> str:
    """The package's own version, "" for one that does not tell."""
    try:
        # Of metadata that is damaged it is None, against its declaration.
        return metadata.version(DISTRIBUTION) or ""
    except (metadata.PackageNotFoundError, UnicodeDecodeError):
        return ""


def problem() -> str:
    """Why the package is not used, as far as that can be told without loading it; "" for the version known here."""
    found = version()
    return "" if found == VERSION else f"{DISTRIBUTION} is version {found or 'unknown'}, not {VERSION}"


def library_folders() -> tuple[Path, ...]:
    """Where the compiled files are: the library's own first, then those that it needs; none without the package."""
    folder = fork_folder()
    if folder is None:
        return ()
    if chosen := os.environ.get(_LIBRARY_VARIABLE):
        return (Path(chosen).absolute().parent,)
    return folder / "lib", folder.with_name(f"{FORK_PACKAGE}_python.libs")


def identity() -> str:
    """Which files the library is made of, by name, size and time. Loads nothing."""
    folder = fork_folder()
    if folder is None:
        return ""
    files = [file for place in (folder, *library_folders()) for file in sorted(place.glob("*"))]
    try:
        found = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:  # replaced at this moment
        return ""
    return f"{version()} {[(name, status.st_size, status.st_mtime_ns) for name, status in found]}"


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
    lib = _library()
    prove_layout(lib)
    lib.llama_log_set(ctypes.cast(library.log_callback, ctypes.c_void_p), None)
    lib.llama_backend_init()
    fatal_signals.explain(signal.SIGABRT, _gave_up)
    features = lib.llama_print_system_info().decode("utf-8", "replace")
    return Kernels(
        NAME, lib, lambda: f"ik_llama.cpp {identity()} {features}", _open_context, lambda context: is_whole, _close_gaps
    )


def _gave_up() -> EdgeinferError:
    # Which assertion it was the library has written on stderr.
    return UnusableInputError("ik_llama.cpp gave up", "use --kernels llama.cpp")


def _open_context(model: int, settings: ContextSettings) -> int | None:
    lib = _library()
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
    lib = _library()
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
    lib = _library()
    cells = _Cells(n_seq_max=1)
    lib.llama_kv_cache_view_update(context, ctypes.byref(cells))
    try:
        used = np.ctypeslib.as_array(cells.positions, (cells.n_cells,)) >= 0
        length = cells.n_cells - int(used[::-1].argmax()) if used.any() else 0
        return not used[step - 1 : length : step].all()
    finally:
        lib.llama_kv_cache_view_free(ctypes.byref(cells))


def prove_layout(lib: Any) -> None:
    """Hold the structures against what the library fills them with; ResourceError where they differ.

    A field at the wrong place would show here: each default but a zero is another one, or has its neighbours' place.
    """
    model, context = lib.llama_model_default_params(), lib.llama_context_default_params()
    sizes = ctypes.sizeof(model), ctypes.sizeof(context), ctypes.sizeof(lib.llama_batch)
    found = (
        sizes,
        (model.split_mode, model.n_seq_max, model.n_ubatch, model.type_k, model.n_k_first, model.n_v_last),
        (model.use_mmap, model.use_mlock, model.repack_tensors, model.vocab_only, model.flash_attn),
        (context.seed, context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.n_threads_batch),
        (context.max_extra_alloc, context.rope_scaling_type, context.yarn_ext_factor, context.defrag_thold),
        (context.type_k, context.type_v, context.n_k_first, context.n_v_last, context.logits_all, context.embeddings),
        (context.offload_kqv, context.flash_attn, context.mla_attn, context.min_experts, context.graph_reuse),
        (bool(model.kv_overrides), context.abort_callback_data, bool(context.cb_eval), context.cuda_params),
    )
    if found != _EXPECTED:
        raise ResourceError(f"the library of {DISTRIBUTION} is laid out in another way", f"install {REQUIREMENT}")


_EXPECTED = (
    (_MODEL_NBYTES, _CONTEXT_NBYTES, _BATCH_NBYTES),
    (1, 1, 512, 1, -1, -1),
    (True, False, False, False, True),
    (2**32 - 1, 512, 2048, 512, 1, 4),
    (256, -1, -1.0, -1.0),
    (1, 1, -1, -1, False, False),
    (True, True, 3, -1, True),
    (False, None, False, None),
)


@cache
def _library() -> Any:
    """The functions under llama.cpp's names. Raises ResourceError for a package that is broken."""
    try:
        return _declared(_import_bindings())
    except (OSError, AttributeError, ImportError) as error:
        raise ResourceError(f"{DISTRIBUTION} is broken: {error}", f"install it again: {REQUIREMENT}") from None


def _import_bindings() -> Any:
    """The package's ctypes declarations without its high-level classes, as `library` does for llama.cpp."""
    with _importing:
        folder = fork_folder()
        if folder is None:
            raise ResourceError(f"{DISTRIBUTION} is not installed", "pip install 'edgeinfer[fast]'")
        if FORK_PACKAGE in sys.modules:
            return importlib.import_module(f"{FORK_PACKAGE}._ctypes_api")
        package = ModuleType(FORK_PACKAGE)
        package.__path__ = [str(folder)]
        # Who looks meanwhile whether it is installed asks for it.
        package.__spec__ = importlib.util.find_spec(FORK_PACKAGE)
        sys.modules[FORK_PACKAGE] = package
        try:
            return importlib.import_module(f"{FORK_PACKAGE}._ctypes_api")
        finally:
            del sys.modules[FORK_PACKAGE]


_importing = threading.Lock()


def _declared(bindings: Any) -> Any:
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
    in_buffer = [pointer, pointer, size, number, ctypes.c_uint32]
    functions: dict[str, Any] = {}
    for name, own_name, result, arguments in (
        ("llama_log_set", "", None, [pointer, pointer]),
        ("llama_print_system_info", "", ctypes.c_char_p, []),
        ("llama_model_free", "llama_free_model", None, [pointer]),
        ("llama_model_n_ctx_train", "llama_n_ctx_train", number, [pointer]),
        ("llama_model_n_params", "", ctypes.c_uint64, [pointer]),
        ("llama_model_size", "", ctypes.c_uint64, [pointer]),
        ("llama_model_is_recurrent", "", ctypes.c_bool, [pointer]),
        ("llama_model_is_hybrid", "", ctypes.c_bool, [pointer]),
        ("llama_n_batch", "", ctypes.c_uint32, [pointer]),
        ("llama_synchronize", "", None, [pointer]),
        ("llama_set_abort_callback", "", None, [pointer, pointer, pointer]),
        ("llama_kv_cache_view_update", "", None, [pointer, pointer]),
        ("llama_kv_cache_view_free", "", None, [pointer]),
        ("llama_kv_cache_defrag", "", None, [pointer]),
        ("llama_kv_cache_update", "", number, [pointer]),
        ("llama_memory_seq_rm", "llama_kv_cache_seq_rm", ctypes.c_bool, [pointer, number, number, number]),
        ("llama_memory_seq_cp", "llama_kv_cache_seq_cp", None, [pointer, number, number, number, number]),
        ("llama_memory_seq_pos_min", "llama_kv_cache_seq_pos_min", number, [pointer, number]),
        ("_last_position", "llama_kv_cache_seq_pos_max", number, [pointer, number]),
        ("llama_state_seq_get_size_ext", "llama_state_seq_get_size", size, [pointer, number, ctypes.c_uint32]),
        ("llama_state_seq_get_data_ext", "llama_state_seq_get_data", size, in_buffer),
        ("llama_state_seq_set_data_ext", "llama_state_seq_set_data", size, in_buffer),
    ):
        function = ctypes.CFUNCTYPE(result, *arguments)((own_name or name, bindings._lib))
        functions[name] = function
    for name in _AS_DECLARED:
        functions[name] = getattr(bindings, name)
    last, first = functions.pop("_last_position"), functions["llama_memory_seq_pos_min"]
    return SimpleNamespace(
        **functions,
        _lib=bindings._lib,
        llama_get_memory=lambda context: context,
        # The library says 0 of an empty sequence.
        llama_memory_seq_pos_max=lambda memory, seq: last(memory, seq) if first(memory, seq) >= 0 else -1,
        llama_model_n_swa=lambda model: 0,  # every cell is kept: a window is only masked
    )


_AS_DECLARED = (
    *("llama_batch", "llama_model_kv_override", "ggml_abort_callback", "llama_backend_init"),
    *("llama_model_default_params", "llama_context_default_params", "llama_model_load_from_file", "llama_model_desc"),
    *("llama_init_from_model", "llama_free", "llama_decode"),
)


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
