"""Command-R, Command-R+ and Aya 23: layer norms without biases, attention beside feed-forward, scaled logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    attention_metadata,
    check_activation,
    embedding_tensors,
    head_dim,
    impossible,
    n_kv_heads,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, layers, norm
from edgeinfer.convert.config import Config

_LAYERS_PLUS = 64
"""From as many layers on, llama.cpp norms the heads of query and key."""


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for norms of heads where llama.cpp has none, and none where it has some."""
    has_norms = config.flag("use_qk_norm")
    if has_norms != (n_layers(config) >= _LAYERS_PLUS):
        raise impossible(config, f"'use_qk_norm' is {has_norms}, llama.cpp norms query and key from 64 layers on")
    return cohere_metadata(config)


def cohere_metadata(config: Config) -> dict[str, Any]:
    """What Command-R and Command-R7B share. The context is the one that the model was trained with."""
    check_activation(config, "hidden_act", "silu", "swish")
    require(config, "attention_bias", False)
    require(config, "tie_word_embeddings", True)
    require(config.rope, "rope_type", "default")
    embd, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if embd != heads * head_dim(config):
        raise impossible(config, f"'head_dim' is {head_dim(config)}, not a share of hidden_size {embd}")
    trained = "max_position_embeddings" if config.get("model_max_length") is None else "model_max_length"
    return {
        **attention_metadata(config),
        "context_length": config.integer(trained),
        "attention.layer_norm_epsilon": config.number("layer_norm_eps"),
        "logit_scale": config.number("logit_scale"),
        "rope.scaling.type": "none",
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """One norm in each layer; in Command-R+ further ones, of each head's own."""
    yield from parallel_layers(config)
    if not config.flag("use_qk_norm"):
        return
    for to, at in layers(config):
        for name, heads in (("q_norm", config.integer("num_attention_heads")), ("k_norm", n_kv_heads(config))):
            yield tensor(f"{to}.attn_{name}.weight", f"{at}.self_attn.{name}.weight", (heads, head_dim(config)))


def parallel_layers(config: Config) -> Iterator[TensorRule]:
    """Layers in which attention and feed-forward have the same input."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from embedding_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)


DEFAULTS = {
    "attention_bias": False,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_qk_norm": False,
    "vocab_size": 256000,
}
ARCHITECTURE = Architecture(name="command-r", defaults=DEFAULTS, metadata=metadata, tensors=tensors)
