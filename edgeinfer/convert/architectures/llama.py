"""Llama and what is built exactly like it: Llama 1 to 3, SmolLM2, Mistral, TinyLlama, Yi, R1-Distill-Llama."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.architectures.base import (
    Architecture,
    ConstantRule,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    expert_counts,
    head_dim,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, layers, norm
from edgeinfer.convert.architectures.transforms import interleave_halves
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError


def metadata(config: Config, *, rope_factors: bool = True, dynamic: bool = False) -> dict[str, Any]:
    """The keys of every decoder, then what llama.cpp's loader wants of a llama and its relatives."""
    return {
        **decoder_metadata(config, rope_factors=rope_factors, dynamic=dynamic),
        **expert_counts(config),
        "vocab_size": config.vocab_size,
        "rope.dimension_count": head_dim(config),
    }


def _metadata_with_head_dim(config: Config) -> dict[str, Any]:
    """The same with the size of a head, which transformers states for a llama in any case."""
    size = head_dim(config)
    return {**metadata(config), "attention.key_length": size, "attention.value_length": size}


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """Pre-norm decoder layers: grouped-query attention with interleaved rope, gated feed-forward."""
    ffn = config.integer("intermediate_size")
    mlp_bias = config.flag("mlp_bias")

    def feed_forward(to: str, at: str, embd: int) -> Iterator[TensorRule]:
        return gated_ffn(to, f"{at}.mlp", embd, ffn, bias=mlp_bias)

    return interleaved_layers(config, feed_forward)


def interleaved_layers(
    config: Config, feed_forward: Callable[[str, str, int], Iterator[TensorRule]]
) -> Iterator[TensorRule | ConstantRule]:
    """A llama with another feed-forward network: `feed_forward(to, at, hidden size)`."""
    embd, bias = config.integer("hidden_size"), config.flag("attention_bias")
    rotary = interleave_halves(head_dim(config))
    yield from embedding_tensors(config)
    yield from rope_factors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at, rotary, bias=bias, output_bias=bias)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield from feed_forward(to, at, embd)


def rope_factors(config: Config) -> Iterator[ConstantRule]:
    """Llama 3.1's divisors for each frequency, where the rope is scaled so."""
    if config.rope.get("rope_type") == "llama3":
        yield ConstantRule("rope_freqs.weight", _llama3_factors(config))


def _llama3_factors(config: Config) -> NDArray[np.float32]:
    """Shape `(head_dim / 2,)`.

    Long wavelengths are slowed by `factor`, short ones kept, those between blended
    (transformers: modeling_rope_utils.py, _compute_llama3_parameters).
    """
    # In float32 and in the order of the reference, for the result is stored: torch divides a number by a tensor
    # as the number times the reciprocal, and its powers are correctly rounded.
    rope, dim, f32 = config.rope, head_dim(config), np.float32
    factor = f32(rope.number("factor"))
    low, high = f32(rope.number("low_freq_factor")), f32(rope.number("high_freq_factor"))
    if low > high:
        raise UnusableInputError(
            f"{config.path}: low_freq_factor {low:g} is above high_freq_factor {high:g}", "is this file complete?"
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
    metadata=_metadata_with_head_dim,
    tensors=tensors,
)
