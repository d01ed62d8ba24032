"""StarCoder2: rope and grouped heads, but layer norms, biases everywhere and a plain feed-forward network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    attention_metadata,
    check_activation,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, layers, linear, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every rotary decoder, and the epsilon of the layer norms."""
    check_activation(config, "hidden_act", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")
    require(config, "use_bias", True)
    return {**attention_metadata(config), "attention.layer_norm_epsilon": config.number("norm_epsilon")}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers."""
    embd, ffn, vocab = config.integer("hidden_size"), config.integer("intermediate_size"), config.vocab_size
    yield tensor("token_embd.weight", "model.embed_tokens.weight", (vocab, embd))
    yield from norm("output_norm", "model.norm", embd, bias=True)
    yield tensor("output.weight", "lm_head.weight", (vocab, embd), optional=config.flag("tie_word_embeddings"))
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd, bias=True)
        yield from attention(config, to, at, bias=True, output_bias=True)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd, bias=True)
        yield from linear(f"{to}.ffn_up", f"{at}.mlp.c_fc", (ffn, embd), bias=True)
        yield from linear(f"{to}.ffn_down", f"{at}.mlp.c_proj", (embd, ffn), bias=True)


ARCHITECTURE = Architecture(
    name="starcoder2",
    defaults={
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_bias": True,
        "vocab_size": 49152,
    },
    metadata=metadata,
    tensors=tensors,
)
