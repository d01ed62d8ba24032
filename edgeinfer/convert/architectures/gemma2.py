"""Gemma 2: norms before and after attention and feed-forward, soft caps, a window in every second layer."""

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
    n_layers,
    require,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, head_norms, layers, norm
from edgeinfer.convert.architectures.transforms import plus_one
from edgeinfer.convert.config import Config

_LAYERS_27B = 46


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for windows or scales that llama.cpp would compute differently."""
    check_layer_types(config, window_every=2)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.values.get(key, 0) is None:
            raise impossible(config, f"{key!r} is null, llama.cpp runs this architecture with a soft cap only")
    return {
        **gemma_metadata(config, scaled_by_width=n_layers(config) == _LAYERS_27B),
        "attention.sliding_window": config.integer("sliding_window"),
        "attn_logit_softcapping": config.number("attn_logit_softcapping"),
        "final_logit_softcapping": config.number("final_logit_softcapping"),
    }


def gemma_metadata(config: Config, *, scaled_by_width: bool) -> dict[str, Any]:
    """What Gemma 2 and 3 share. llama.cpp takes the attention's scale from the shapes, so that has to be its scale."""
    check_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    require(config, "attention_bias", False)
    width = config.integer("hidden_size") // config.integer("num_attention_heads")
    require(config, "query_pre_attn_scalar", width if scaled_by_width else head_dim(config))
    return {**attention_metadata(config), "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps")}


def check_layer_types(config: Config, *, window_every: int) -> None:
    """Raise UnusableInputError unless all layers but every `window_every`-th have the sliding window."""
    stated = config.get("layer_types")
    expected = ["sliding_attention" if (i + 1) % window_every else "full_attention" for i in range(n_layers(config))]
    if stated is not None and stated != expected:
        raise impossible(config, f"'layer_types' is not the pattern of {window_every} that llama.cpp knows")


def tensors(config: Config) -> Iterator[TensorRule]:
    """Layers with a norm before and after each part; the head is always the embedding."""
    return sandwich_layers(config)


def sandwich_layers(config: Config, *, with_head_norms: bool = False) -> Iterator[TensorRule]:
    """Gemma's layers, whose norms are stored less 1 (transformers: Gemma2RMSNorm); Gemma 3 norms query and key too."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from embedding_tensors(config, norm_change=plus_one)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd, change=plus_one)
        yield from attention(config, to, at)
        if with_head_norms:
            yield from head_norms(config, to, at, change=plus_one)
        yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd, change=plus_one)
        yield from norm(f"{to}.ffn_norm", f"{at}.pre_feedforward_layernorm", embd, change=plus_one)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)
        yield from norm(f"{to}.post_ffw_norm", f"{at}.post_feedforward_layernorm", embd, change=plus_one)


ARCHITECTURE = Architecture(
    name="gemma2",
    defaults={
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 256000,
    },
    metadata=metadata,
    tensors=tensors,
)
