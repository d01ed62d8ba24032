"""What a header may say without the C library ending the process: its assertions, checked before it sees the file.

The assertions are those that src/llama-model.cpp makes about hyper-parameters, and what src/llama-vocab.cpp and the
kernels take for granted without asserting it. Most else that can be wrong with a model the library reports as an error.
Not checked: a token that stands twice in the vocabulary, which takes 100 ms to find among 150k.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from edgeinfer.errors import UnusableInputError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.vocabulary import fault_in_vocabulary

MAX_BLOCKS = 512
MAX_EXPERTS = 1024
TENSOR_ALIGNMENT = 32
"""Of mapped tensors, in bytes."""
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Numbers that are no weights, and the two types that activations have.
_NO_KERNELS = {GGMLType[name] for name in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")}
_GEMMA3N_CACHES = 20
_WINDOW_PERIODS = {"gemma-embedding": 6, "modern-bert": 3}
"""Every how many layers one has no window, where the file does not say."""
_DENSE = ("dense_2", "dense_3")
_MIXERS = ("mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe", "plamo2")
_UNGROUPED_MIXERS = ("mamba", "jamba", "plamo2")
_TWICE_AS_WIDE = ("jamba", "granitehybrid")
_DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
_WITH_SECTIONS = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
_MAX_SECTION = 1 << 16
_TOKEN_TABLE = "ffn_gate_tid2eid"  # the one tensor whose integers are no weights


def check_limits(header: Header) -> None:
    """Raise UnusableInputError when the C library would end the process over these hyper-parameters."""
    if header.metadata.text("general.type") == "imatrix":
        raise UnusableInputError(
            f"{header.path}: an importance matrix, not a model", "give it to `edgeinfer convert --imatrix`"
        )
    if header.metadata.text("general.type") == "adapter":
        raise UnusableInputError(
            f"{header.path}: an adapter, not a model", "give it to its model: `edgeinfer run MODEL --lora ADAPTER`"
        )
    if not header.architecture:
        _fail(header, "general.architecture is missing: this is not a model")
    blocks = header.hyperparameter("block_count")
    if blocks is not None and not 1 <= blocks <= MAX_BLOCKS:
        _fail(header, f"has {blocks} layers, not 1 to {MAX_BLOCKS}")
    if blocks is not None and _count(header, "nextn_predict_layers") > blocks:
        _fail(header, "has more prediction layers than layers")
    _check_experts(header)
    if header.architecture == "gemma-embedding":
        _check_matrices_after_pooling(header)
    if header.architecture in _WINDOW_PERIODS:
        _check_windows_both_ways(header, blocks or 0)
    if header.architecture in ("gemma3n", "gemma4"):
        _check_shared_caches(header, blocks or 0)
    if header.metadata.text("modern-bert.hidden_activation") == "relu":
        _fail(header, "has the hidden_activation 'relu', which is none of a gated feed-forward")
    scaling = header.metadata.text(f"{header.architecture}.rope.scaling.type", "none")
    if scaling not in ROPE_SCALINGS:
        _fail(header, f"has the unknown rope scaling {scaling!r}")
    for name in ("rope.dimension_count", "rope.dimension_count_swa"):
        rotated = header.hyperparameter(name, 2)  # none at all keeps the library busy for ever
        if rotated < 1 or rotated % 2:
            _fail(header, f"has the {name} {rotated}")
    _check_states(header)
    _check_mixers(header)
    _check_time_mixes(header)
    _check_sections(header)
    for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        epsilon = header.hyperparameter(f"attention.{name}", 0)
        if not 0 <= epsilon < 1:
            _fail(header, f"has the {name} {epsilon}")
    if header.alignment % TENSOR_ALIGNMENT:
        _fail(header, f"has tensors at multiples of {header.alignment} bytes, not {TENSOR_ALIGNMENT}")
    _check_types(header)
    if fault := fault_in_vocabulary(header.metadata):
        _fail(header, fault)


def _check_states(header: Header) -> None:
    """Of delta nets, whose heads the library divides by each other, and whose layers it counts off."""
    if header.architecture not in _DELTA_NETS:
        return
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    kernel, length, n_key, n_value, inner = (_count(header, f"ssm.{name}") for name in names)
    if kernel < 2 or not length or not n_key or not n_value or n_value % n_key or inner != length * n_value:
        _fail(header, f"has impossible states: {n_value} of {length} for {n_key} keys, {inner} in all, kernel {kernel}")
    if header.hyperparameter("full_attention_interval", 4) < 1:
        _fail(header, "has a full_attention_interval of 0")


def _check_mixers(header: Header) -> None:
    """Of Mambas, whose sizes the library divides by each other, and whose convolution has a bias in any case."""
    architecture = header.architecture
    if architecture not in _MIXERS:
        return
    names = ("conv_kernel", "state_size", "time_step_rank", "inner_size")
    kernel, length, heads, inner = (_count(header, f"ssm.{name}") for name in names)
    groups = 1 if architecture in _UNGROUPED_MIXERS else _count(header, "ssm.group_count")
    sound = kernel > 1 and length and heads and inner and groups
    if sound and architecture not in _UNGROUPED_MIXERS:
        sound = not (inner % heads or inner % groups or heads % groups)
    if not sound or (architecture in _TWICE_AS_WIDE and inner != 2 * _count(header, "embedding_length")):
        _fail(header, f"has impossible mixers: {inner} in {heads} heads and {groups} groups, states of {length}")
    there = {tensor.name for tensor in header.tensors}
    convolutions = (name.removesuffix(".weight") for name in there if name.endswith("ssm_conv1d.weight"))
    if lacking := next((name for name in convolutions if f"{name}.bias" not in there), None):
        _fail(header, f"lacks {lacking}.bias")


def _check_time_mixes(header: Header) -> None:
    """Of RWKVs, whose heads the library counts by division."""
    if header.architecture.startswith(("rwkv", "arwkv")):
        head = _count(header, "wkv.head_size")
        if not head or _count(header, "embedding_length") % head:
            _fail(header, f"has impossible heads of {head} elements")


def _check_sections(header: Header) -> None:
    """Of rope, which the library counts modulo their sum; one number stands for all four."""
    if header.architecture not in _WITH_SECTIONS:
        return
    stated = header.metadata.get(f"{header.architecture}.rope.dimension_sections")
    is_integers = isinstance(stated, int) or (isinstance(stated, np.ndarray) and stated.dtype.kind in "iu")
    sections = [int(length) for length in np.atleast_1d(np.asarray(stated, object))[:4]] if is_integers else []
    if not any(sections) or not all(0 <= length <= _MAX_SECTION for length in sections):
        _fail(header, f"has the impossible rope.dimension_sections {sections}")


def _check_types(header: Header) -> None:
    wrong = [
        f"{tensor.name} ({tensor.type.name})"
        for tensor in header.tensors
        if tensor.type in _NO_KERNELS and _TOKEN_TABLE not in tensor.name
    ]
    if wrong:
        _fail(header, f"has weights of a type that nothing computes with: {', '.join(wrong[:8])}")


def _check_experts(header: Header) -> None:
    experts = _count(header, "expert_count")
    used = header.metadata.get(f"{header.architecture}.expert_used_count", 0)
    is_integers = isinstance(used, int) or (isinstance(used, np.ndarray) and used.dtype.kind in "iub")
    # Object arrays, for 64 bits of either sign; the library reads them all as unsigned ones.
    each = np.atleast_1d(np.asarray(used, object)) if is_integers else np.zeros(1, object)
    most_used = int(each.max(initial=0))
    groups = _count(header, "expert_group_count")
    groups_used = _count(header, "expert_group_used_count")
    sound = int(each.min(initial=0)) >= 0 and most_used <= experts <= MAX_EXPERTS and (most_used > 0) == (experts > 0)
    sound = sound and (groups < experts if experts else groups == 0)
    if groups > 1 and sound:
        sound = experts % groups == 0 and 0 < groups_used < groups
    if not sound:
        _fail(header, f"has impossible experts: {most_used} of {experts}, {groups_used} of {groups} groups")


def _check_matrices_after_pooling(header: Header) -> None:
    """Those of EmbeddingGemma must end with vectors as long as the library reads."""
    embedding = length = _count(header, "embedding_length")
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    sides = {name: tuple(_count(header, f"{name}_feat_{side}") for side in ("in", "out")) for name in _DENSE}
    for name, (n_in, n_out) in sides.items():
        if (weight := tensors.get(f"{name}.weight")) is not None:
            if weight != (n_in, n_out) or n_in != length:
                _fail(header, f"has the impossible matrix {name} of {n_in} by {n_out}")
            length = n_out
    ends = {length, sides["dense_2"][0], sides["dense_3"][1]}
    if ends - {0, embedding}:
        _fail(header, f"makes vectors of another length than {embedding}")


def _check_windows_both_ways(header: Header, blocks: int) -> None:
    """An encoder with windows has layers with and without; the library fills the masks of both."""
    if header.architecture == "modern-bert" and not _count(header, "attention.sliding_window"):
        return
    pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        windowed = [i < pattern.size and bool(pattern[i]) for i in range(blocks)]
    else:
        period = _count(header, "attention.sliding_window_pattern", _WINDOW_PERIODS[header.architecture])
        full = 0 if header.architecture == "modern-bert" else period - 1
        windowed = [not period or i % period != full for i in range(blocks)]
    if all(windowed) or not any(windowed):
        _fail(header, "has a window in all of its layers or in none, and so no use for one of the library's masks")


def _check_shared_caches(header: Header, blocks: int) -> None:
    """The last layers of Gemma 3n and 4 look into the cache of the last one before them with a window, or without."""
    pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    windowed = [bool(kind) for kind in pattern] if isinstance(pattern, np.ndarray) else []
    if header.architecture == "gemma3n":
        with_cache = _GEMMA3N_CACHES
        windowed = windowed or [(i + 1) % 5 > 0 for i in range(blocks)]
    else:
        with_cache = blocks - _count(header, "attention.shared_kv_layers")
    if with_cache >= blocks:
        return
    sharing = set(windowed[with_cache:blocks])
    sound = with_cache >= 2 and len(windowed) >= blocks
    sound = sound and not (True in sharing and not windowed[with_cache - 2])
    if not sound or (False in sharing and windowed[with_cache - 1]):
        _fail(header, "has layers that share the cache of one that is unlike them")


def _count(header: Header, name: str, default: int = 0) -> int:
    return header.metadata.count(f"{header.architecture}.{name}", default)


def _fail(header: Header, what: str) -> NoReturn:
    raise UnusableInputError(f"{header.path}: {what}", "the file is damaged or was converted wrongly: get another one")
