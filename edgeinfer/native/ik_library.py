"""The functions of ik_llama.cpp's library, declared and held against what is known of it."""

from __future__ import annotations

import ctypes
from functools import cache
from types import SimpleNamespace
from typing import Any

from edgeinfer.errors import ResourceError
from edgeinfer.native.ik_package import DISTRIBUTION, PACKAGE, REQUIREMENT
from edgeinfer.native.library import import_declarations

_MODEL_NBYTES, _CONTEXT_NBYTES, _BATCH_NBYTES = 168, 216, 72
"""Of the structures that are passed by value."""


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
def load() -> Any:
    """The functions under llama.cpp's names. Raises ResourceError for a package that is broken."""
    try:
        return _declared(_import_bindings())
    except (OSError, AttributeError, ImportError) as error:
        raise ResourceError(f"{DISTRIBUTION} is broken: {error}", f"install it again: {REQUIREMENT}") from None


def _import_bindings() -> Any:
    bindings = import_declarations(PACKAGE, "_ctypes_api")
    if bindings is None:
        raise ResourceError(f"{DISTRIBUTION} is not installed", "pip install 'edgeinfer[fast]'")
    return bindings


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
