"""Llama and what is built exactly like it: Llama 1 to 3, SmolLM2, Mistral, TinyLlama, Yi, R1-Distill-Llama."""

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
    decoder_metadata,
    embedding_tensors,
    head_dim,
    interleave_halves,
    n_kv_heads,
    n_layers,
    tensor,
)
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, then what llama.cpp's loader wants of a llama."""
    return {
        **decoder_metadata(config),
        "vocab_size": config.vocab_size,
        "rope.dimension_count": head_dim(config),
    }


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """Pre-norm decoder layers: grouped-query attention with interleaved rope, gated feed-forward."""
    embd, ffn, dim = config.integer("hidden_size"), config.integer("intermediate_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * dim, n_kv_heads(config) * dim
    rotary = interleave_halves(dim)
    attention_bias, mlp_bias = not config.flag("attention_bias"), not config.flag("mlp_bias")

    yield from embedding_tensors(config)
    if config.rope.get("rope_type") == "llama3":
        yield ConstantRule("rope_freqs.weight", llama3_rope_factors(config))
    for i in range(n_layers(config)):
        to, at = f"blk.{i}", f"model.layers.{i}"
        yield tensor(f"{to}.attn_norm.weight", f"{at}.input_layernorm.weight", (embd,))
        for name, part, rows, row_length, transform in (
            ("attn_q", "q_proj", q, embd, rotary),
            ("attn_k", "k_proj", kv, embd, rotary),
            ("attn_v", "v_proj", kv, embd, None),
            ("attn_output", "o_proj", embd, q, None),
        ):
            source = f"{at}.self_attn.{part}"
            yield tensor(f"{to}.{name}.weight", f"{source}.weight", (rows, row_length), transform)
            yield tensor(f"{to}.{name}.bias", f"{source}.bias", (rows,), transform, optional=attention_bias)
        yield tensor(f"{to}.ffn_norm.weight", f"{at}.post_attention_layernorm.weight", (embd,))
        for name, part, rows, row_length in (
            ("ffn_gate", "gate_proj", ffn, embd),
            ("ffn_up", "up_proj", ffn, embd),
            ("ffn_down", "down_proj", embd, ffn),
        ):
            yield tensor(f"{to}.{name}.weight", f"{at}.mlp.{part}.weight", (rows, row_length))
            yield tensor(f"{to}.{name}.bias", f"{at}.mlp.{part}.bias", (rows,), optional=mlp_bias)


def llama3_rope_factors(config: Config) -> NDArray[np.float32]:
    """Llama 3.1's per-frequency rope divisors, shape `(head_dim / 2,)`.

    Long wavelengths are slowed by `factor`, short ones kept, those between blended
    (transformers: modeling_rope_utils.py, _compute_llama3_parameters).
    """
    # In float32 and in the order of the reference, for the result is stored: torch divides a number by a tensor
    # as the number times the reciprocal, and its powers are correctly rounded.
    rope, dim, f32 = config.rope, head_dim(config), np.float32
    factor = f32(rope.number("factor"))
    low, high = f32(rope.number("low_freq_factor")), f32(rope.number("high_freq_factor"))
    if low >= high:
        raise UnusableInputError(
            f"{config.path}: low_freq_factor {low:g} is not below high_freq_factor {high:g}", "is this file complete?"
        )
    context, one = f32(rope.integer("original_max_position_embeddings")), f32(1)
    exponents = np.arange(0, dim, 2, dtype=f32) / f32(dim)
    frequencies = one / (rope.number("rope_theta") ** exponents.astype(np.float64)).astype(f32)
    wavelengths = one / frequencies * f32(2 * math.pi)
    with np.errstate(all="ignore"):  # absurd settings give infinity or NaN, caught below
        smooth = (one / wavelengths * context - low) / (high - low)
        slowed = np.where(wavelengths > context / low, factor, one / ((one - smooth) / factor + smooth))
        factors = np.where(wavelengths < context / high, one, slowed)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise UnusableInputError(f"{config.path}: the rope scaling gives no finite factors", "is this file complete?")
    return factors


ARCHITECTURE = Architecture(
    name="llama",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    metadata=metadata,
    tensors=tensors,
)
