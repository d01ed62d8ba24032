"""OLMo 2: norms after attention and feed-forward instead of before, and over the whole query and key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    head_dim,
    n_kv_heads,
    require,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, layers, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder."""
    require(config, "attention_bias", False)
    require(config, "tie_word_embeddings", False)
    return decoder_metadata(config)


def tensors(config: Config) -> Iterator[TensorRule]:
    """Post-norm layers."""
    embd, ffn, dim = config.integer("hidden_size"), config.integer("intermediate_size"), head_dim(config)
    yield from embedding_tensors(config)
    for to, at in layers(config):
        yield from attention(config, to, at)
        yield from norm(f"{to}.attn_q_norm", f"{at}.self_attn.q_norm", config.integer("num_attention_heads") * dim)
        yield from norm(f"{to}.attn_k_norm", f"{at}.self_attn.k_norm", n_kv_heads(config) * dim)
        yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)
        yield from norm(f"{to}.post_ffw_norm", f"{at}.post_feedforward_layernorm", embd)


ARCHITECTURE = Architecture(
    name="olmo2",
    defaults={
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    metadata=metadata,
    tensors=tensors,
)
