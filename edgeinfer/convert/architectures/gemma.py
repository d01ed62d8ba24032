"""Gemma 1 (CodeGemma too): a llama with GELU, whose norms multiply by one more than their weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    attention_metadata,
    check_activation,
    embedding_tensors,
    require,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, layers, norm
from edgeinfer.convert.architectures.transforms import plus_one
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder. The first configs say "gelu" of what has always been its approximation by tanh."""
    for key in ("hidden_act", "hidden_activation"):
        check_activation(config, key, "gelu_pytorch_tanh", "gelu")
    require(config, "attention_bias", False)
    require(config, "tie_word_embeddings", True)
    return {**attention_metadata(config), "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps")}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers; the head is always the embedding."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from embedding_tensors(config, norm_change=plus_one)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd, change=plus_one)
        yield from attention(config, to, at)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd, change=plus_one)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)


ARCHITECTURE = Architecture(
    name="gemma",
    defaults={
        "attention_bias": False,
        "head_dim": 256,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "max_position_embeddings": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 256000,
    },
    metadata=metadata,
    tensors=tensors,
)
