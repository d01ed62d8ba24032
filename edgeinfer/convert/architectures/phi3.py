"""Phi-3, Phi-3.5 and Phi-4-mini: fused matrices, and rope factors for short and long contexts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.architectures.base import (
    Architecture,
    ConstantRule,
    TensorRule,
    check_activation,
    embedding_tensors,
    head_dim,
    impossible,
    n_kv_heads,
    n_layers,
)
from edgeinfer.convert.architectures.blocks import layers, linear, norm
from edgeinfer.convert.config import Config

_LONG_ROPES = ("longrope", "su", "yarn")
"""The names that transformers takes for the same thing in this architecture."""


def metadata(config: Config) -> dict[str, Any]:
    """The keys that llama.cpp's loader wants; a window of 0 stands for none."""
    check_activation(config, "hidden_act", "silu", "swish")
    window = config.get("sliding_window")
    return {
        "block_count": n_layers(config),
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": config.integer("intermediate_size"),
        "attention.head_count": config.integer("num_attention_heads"),
        "attention.head_count_kv": n_kv_heads(config),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
        "attention.sliding_window": 0 if window is None else config.integer("sliding_window"),
        "rope.dimension_count": _rope_dims(config),
        "rope.freq_base": config.rope.number("rope_theta"),
        "rope.scaling.original_context_length": config.rope.integer("original_max_position_embeddings"),
        **_attention_factor(config),
    }


def _rope_dims(config: Config) -> int:
    """How many elements of a head the rope turns."""
    factor, dim = config.rope.number("partial_rotary_factor"), head_dim(config)
    turned = int(dim * factor)
    if not 2 <= turned <= dim or turned % 2:
        raise impossible(config, f"'partial_rotary_factor' {factor:g} of heads of {dim} elements")
    return turned


def _is_scaled(config: Config) -> bool:
    kind = config.rope.get("rope_type")
    if kind not in ("default", *_LONG_ROPES):
        raise impossible(config, f"unknown rope scaling {kind!r}, this architecture is known with longrope")
    return bool(kind != "default")


def _attention_factor(config: Config) -> dict[str, Any]:
    """By how much longer contexts sharpen attention (transformers: _compute_longrope_parameters)."""
    if not _is_scaled(config):
        return {}
    if config.rope.get("attention_factor") is not None:
        return {"rope.scaling.attn_factor": config.rope.number("attention_factor")}
    trained = config.rope.integer("original_max_position_embeddings")
    scale = config.integer("max_position_embeddings") / trained
    factor = math.sqrt(1 + math.log(scale) / math.log(trained)) if scale > 1 and trained > 1 else 1.0
    return {"rope.scaling.attn_factor": factor}


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """Pre-norm layers; query, key and value are one matrix, gate and up another."""
    embd, ffn, dim = config.integer("hidden_size"), config.integer("intermediate_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * dim, n_kv_heads(config) * dim
    yield from embedding_tensors(config)
    if _is_scaled(config):
        yield ConstantRule("rope_factors_long.weight", _factors(config, "long_factor"))
        yield ConstantRule("rope_factors_short.weight", _factors(config, "short_factor"))
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from linear(f"{to}.attn_qkv", f"{at}.self_attn.qkv_proj", (q + 2 * kv, embd))
        yield from linear(f"{to}.attn_output", f"{at}.self_attn.o_proj", (embd, q))
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield from linear(f"{to}.ffn_up", f"{at}.mlp.gate_up_proj", (2 * ffn, embd))
        yield from linear(f"{to}.ffn_down", f"{at}.mlp.down_proj", (embd, ffn))


def _factors(config: Config, key: str) -> NDArray[np.float32]:
    """The divisors of the rope's frequencies, shape `(turned elements / 2,)`."""
    values, count = config.rope.get(key), _rope_dims(config) // 2
    if not isinstance(values, list) or len(values) != count:
        raise impossible(config, f"{key!r} of the rope scaling is not a list of {count} numbers")
    if not all(type(value) in (int, float) and 0 < value < 1e30 for value in values):
        raise impossible(config, f"{key!r} of the rope scaling has something else than positive numbers")
    return np.array(values, np.float32)


ARCHITECTURE = Architecture(
    name="phi3",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    metadata=metadata,
    tensors=tensors,
)
