"""InternLM3: a llama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures import llama
from edgeinfer.convert.architectures.base import Architecture, TensorRule, embedding_tensors, head_dim
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, layers, norm
from edgeinfer.convert.architectures.transforms import interleave_halves
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """As llama's. A scaling of the rope beyond the context length changes nothing within it."""
    return llama.metadata(config, rope_factors=False, dynamic=True)


def tensors(config: Config) -> Iterator[TensorRule]:
    """The biases of query, key and value are told apart from all others."""
    embd, ffn, bias = config.integer("hidden_size"), config.integer("intermediate_size"), config.flag("bias")
    rotary = interleave_halves(head_dim(config))
    yield from embedding_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at, rotary, bias=config.flag("qkv_bias"), output_bias=bias)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn, bias=bias)


ARCHITECTURE = Architecture(
    name="llama",
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128512,
    },
    metadata=metadata,
    tensors=tensors,
)
