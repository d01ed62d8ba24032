"""Layers that keep a state for each sequence in place of a cache that grows: which they are, and how large it is.

After src/llama-hparams.cpp (n_embd_r, n_embd_s), src/llama-memory-recurrent.cpp, and src/models for the layers.
"""

from __future__ import annotations

import numpy as np

from edgeinfer.gguf_file.header import Header

_NBYTES = 4
"""Of an element: states are in F32, whatever the type of the cache."""
_ALL = ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
_BESIDE_ATTENTION = "falcon-h1"
_WITH_LONE_FFNS = ("nemotron_h", "nemotron_h_moe")
"""Where a layer is a mixer, attention or a feed-forward network."""
_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
"""Where every so many layers one is attention; what holds where the file doesn't say."""


def state_nbytes(header: Header, n_blocks: int) -> int:
    """Bytes of state that each sequence has in all `n_blocks` layers; 0 for a model that has no such layers."""
    layers = sum(is_recurrent(header, layer) for layer in range(n_blocks))
    return _NBYTES * layers * (_shifted_elements(header) + _state_elements(header)) if layers else 0


def is_recurrent(header: Header, layer: int) -> bool:
    """Whether a layer keeps a state."""
    if header.architecture in _WITH_LONE_FFNS and _of_layer(header, "feed_forward_length", layer):
        return False
    return header.architecture == _BESIDE_ATTENTION or not attends(header, layer)


def attends(header: Header, layer: int) -> bool:
    """Whether a layer has a cache of keys and values."""
    architecture = header.architecture
    if architecture in _ALL:
        return False
    if architecture in _INTERVALS:
        stated = header.metadata.get(f"{architecture}.attention.recurrent_layers")
        if isinstance(stated, np.ndarray):
            return not (layer < stated.size and stated[layer])
        interval = _count(header, "full_attention_interval", _INTERVALS[architecture])
        return not interval or (layer + 1) % interval == 0
    return bool(_of_layer(header, "attention.head_count_kv", layer, 1))


def activation_elements(header: Header) -> tuple[int, int]:
    """What a pass over such layers holds at a time: elements for each token, and for each sequence.

    Measured on Mamba, Mamba 2, Falcon-H1, Granite 4 and RWKV-7, and on delta nets, which take less.
    """
    if _count(header, "wkv.head_size"):  # six mixtures of each token with its predecessor, and what they are made of
        return 18 * _count(header, "embedding_length"), _state_elements(header)
    inner, channels = _count(header, "ssm.inner_size"), _channels(header)
    if header.architecture in _INTERVALS:
        return _count(header, "embedding_length") + 2 * channels + 2 * inner, 0
    projected = inner + channels + _count(header, "ssm.time_step_rank")
    return projected + 3 * channels + inner, _state_elements(header)


def _channels(header: Header) -> int:
    """What the convolution of a Mamba sees of a token."""
    groups = _count(header, "ssm.group_count") * _count(header, "ssm.state_size")
    return _count(header, "ssm.inner_size") + 2 * groups


def _shifted_elements(header: Header) -> int:
    """The last inputs, which a convolution or a token shift goes back to."""
    embedding = _count(header, "embedding_length")
    if _count(header, "wkv.head_size"):
        return _count(header, "token_shift_count", 2) * embedding
    if width := _count(header, "shortconv.l_cache"):
        return embedding * (width - 1)
    width = _count(header, "ssm.conv_kernel")
    if head := _count(header, "kda.head_dim"):
        return 3 * (width - 1 if width else 3) * _n_heads(header) * head
    return max(0, width - 1) * _channels(header)


def _state_elements(header: Header) -> int:
    if head := _count(header, "wkv.head_size"):
        return _count(header, "embedding_length") * head
    if head := _count(header, "kda.head_dim"):
        return head * head * _n_heads(header)
    return _count(header, "ssm.state_size") * _count(header, "ssm.inner_size")


def _of_layer(header: Header, name: str, layer: int, default: int = 0) -> int:
    """A layer's entry of an array; `default` where there is no array."""
    values = header.metadata.get(f"{header.architecture}.{name}")
    if isinstance(values, np.ndarray) and values.dtype.kind in "iub" and layer < values.size:
        return int(values[layer])
    return default


def _n_heads(header: Header) -> int:
    return _count(header, "attention.head_count")


def _count(header: Header, name: str, default: int = 0) -> int:
    return header.metadata.count(f"{header.architecture}.{name}", default)
