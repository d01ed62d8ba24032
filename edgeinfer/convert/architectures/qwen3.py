"""Qwen3: a Qwen2 without biases whose queries and keys are normed head by head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    require,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, head_norms, layers, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder."""
    require(config, "attention_bias", False)
    return decoder_metadata(config)


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers with norms for query and key."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from embedding_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at)
        yield from head_norms(config, to, at)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)


ARCHITECTURE = Architecture(
    name="qwen3",
    defaults={
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    metadata=metadata,
    tensors=tensors,
)
