"""Qwen2 and Qwen2.5, their Coder and Math models, R1-Distill-Qwen."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.convert.architectures.base import Architecture, TensorRule, decoder_metadata, embedding_tensors
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, layers, norm
from edgeinfer.convert.config import Config


def tensors(config: Config) -> Iterator[TensorRule]:
    """As llama, but query, key and value have biases, and rope rotates halves, so that nothing is reordered."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from embedding_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at, bias=True)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)


ARCHITECTURE = Architecture(
    name="qwen2",
    defaults={
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    metadata=decoder_metadata,
    tensors=tensors,
)
