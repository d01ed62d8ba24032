"""GLM-4-0414 and GLM-Z1: norms before and after attention and feed-forward, half of a head rotated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    rotary_dim,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, layers, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, and how much of a head is rotated (neighbours, as in the checkpoint)."""
    return {**decoder_metadata(config, partial=True), "rope.dimension_count": rotary_dim(config)}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Gate and up of the feed-forward are one matrix, in the file too."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from embedding_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at, bias=config.flag("attention_bias"))
        yield from norm(f"{to}.post_attention_norm", f"{at}.post_self_attn_layernorm", embd)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield tensor(f"{to}.ffn_up.weight", f"{at}.mlp.gate_up_proj.weight", (2 * ffn, embd))
        yield tensor(f"{to}.ffn_down.weight", f"{at}.mlp.down_proj.weight", (embd, ffn))
        yield from norm(f"{to}.post_ffw_norm", f"{at}.post_mlp_layernorm", embd)


ARCHITECTURE = Architecture(
    name="glm4",
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151552,
    },
    metadata=metadata,
    tensors=tensors,
)
