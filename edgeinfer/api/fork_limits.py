"""What of a run the fork ik_llama.cpp is known not to do, or not known to do. Loads nothing of it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace

from edgeinfer.api.adapters import LoadedAdapter
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.native import library
from edgeinfer.options import DEFAULT_CACHE_TYPE, RuntimeOptions
from edgeinfer.runtime.footprint import EMBEDDING_NAME, Footprint
from edgeinfer.runtime.memory import Plan

ARCHITECTURES = frozenset(
    (
        *("command-r", "falcon", "gemma", "glm4", "glm4moe", "gptneox", "internlm2", "llama"),
        *("qwen2", "qwen2moe", "qwen3", "qwen3moe", "smollm3", "stablelm"),
    )
)
"""Whose logits are llama.cpp's, with random weights and all that the architecture has (`tests/native/test_ik.py`). Of
others they are far off (Gemma 3, Granite) or cost the process (Gemma 2, StarCoder 2); and of `llama` with what follows.
"""
_LLAMA_EXPERTS, _ROPE_FACTORS = "llama.expert_count", "rope_freqs.weight"
_OTHER_TYPES = frozenset(t for t in GGMLType if t > GGMLType.BF16)
"""Newer ones, that the fork does not know, knows by another number, or was not compared with."""
_YARN_BOUNDS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
_TOKENS = "tokenizer.ggml.tokens"
_BESIDE_NBYTES = 128 << 20
"""What threads, graphs and imports take beside a model."""


def reason_against(
    header: Header, options: RuntimeOptions, plan: Plan, adapters: Sequence[LoadedAdapter], *, is_shared: bool
) -> str | None:
    """Why the fork does not run it, to follow "cannot run it"; None where nothing is known against it."""
    tensors = [tensor for part in read_shards(header) for tensor in part.tensors]
    for reason, applies in (
        (f"as a {header.architecture} model", header.architecture not in ARCHITECTURES),
        ("with experts of this kind", header.metadata.count(_LLAMA_EXPERTS) > 0),
        ("with factors for its positions", any(tensor.name == _ROPE_FACTORS for tensor in tensors)),
        ("with bounds of yarn", any(f"{header.architecture}.{key}" in header.metadata for key in _YARN_BOUNDS)),
        ("with a sliding window", header.hyperparameter("attention.sliding_window", 0) > 0),
        ("with adapters", bool(adapters)),
        ("with a draft of its own layers", options.draft == "layers"),
        ("with layers on a GPU", plan.placement.gpu_layers > 0),
        ("with flash attention for several sequences", options.flash_attn == "on" and is_shared),
        ("with a KV cache that is not f16", {options.type_k, options.type_v} != {DEFAULT_CACHE_TYPE}),
        ("with these types of tensors", any(tensor.type in _OTHER_TYPES for tensor in tensors)),
        ("without a vocabulary", not n_vocab(header)),
    ):
        if applies:
            return reason
    return None


def n_vocab(header: Header) -> int:
    """How many tokens the file has."""
    return header.metadata.value_type(_TOKENS)[1] or 0 if _TOKENS in header.metadata else 0


def fits(header: Header, plan: Plan, *, is_shared: bool) -> bool:
    """Whether there is room for what the fork takes more than llama.cpp.

    It copies all weights, an embedding that is the output matrix too once more; several sequences have all scores of
    their attention at a time.
    """
    if plan.available_nbytes is None:
        return True
    footprint = Footprint(read_shards(header), library.features())
    settings = replace(plan.settings, repack=False, mmap=False, flash_attn=plan.settings.flash_attn and not is_shared)
    twice = sum(tensor.nbytes for tensor in footprint.tensors if tensor.name == EMBEDDING_NAME and footprint.is_tied)
    more = footprint.needs(settings).total + twice - footprint.needs(plan.settings).total
    total = plan.needs.total + more
    return total <= plan.available_nbytes and _is_granted(total + _BESIDE_NBYTES)


def _is_granted(nbytes: int) -> bool:
    """Whether the system would hand out this much, which limits of a process and of a system can forbid.

    llama.cpp says so where it gets no memory. The fork ends the process.
    """
    try:
        mmap.mmap(-1, nbytes).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
