"""LFM2: short convolutions in most layers, grouped-query attention in the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    head_dim,
    impossible,
    n_kv_heads,
    n_layers,
    rope_metadata,
    tensor,
)
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """llama.cpp tells a convolution by its having no key-value heads."""
    kv_heads = n_kv_heads(config)
    return {
        "block_count": n_layers(config),
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": _n_ffn(config),
        "attention.head_count": config.integer("num_attention_heads"),
        "attention.head_count_kv": np.array([kv_heads * attends for attends in _attends(config)], np.int32),
        **rope_metadata(config),
        "attention.layer_norm_rms_epsilon": config.number("norm_eps"),
        "vocab_size": config.vocab_size,
        "shortconv.l_cache": config.integer("conv_L_cache"),
    }


def _n_ffn(config: Config) -> int:
    """The feed-forward's width: two thirds of the stated one, times a factor, rounded up."""
    stated = config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return stated
    multiple = config.integer("block_multiple_of")
    width = int(config.number("block_ffn_dim_multiplier") * int(2 * stated / 3))
    return -(-width // multiple) * multiple


def _attends(config: Config) -> list[bool]:
    """For each layer, whether it is attention; old configs list these layers' numbers."""
    layers, kinds = n_layers(config), config.get("layer_types")
    if kinds is None:
        numbers = config.get("full_attn_idxs")
        if numbers is not None and not isinstance(numbers, list):
            raise impossible(config, "'full_attn_idxs' is not a list of layers")
        return [numbers is None or i in numbers for i in range(layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in ("conv", "full_attention") for kind in kinds)
    ):
        raise impossible(config, f"'layer_types' does not say for {layers} layers which are conv or full_attention")
    return [kind == "full_attention" for kind in kinds]


def tensors(config: Config) -> Iterator[TensorRule]:
    """Gated feed-forward in every layer; the norm after the last one is named after the embedding."""
    embd, ffn, vocab = config.integer("hidden_size"), _n_ffn(config), config.vocab_size
    yield tensor("token_embd.weight", "model.embed_tokens.weight", (vocab, embd))
    yield tensor("token_embd_norm.weight", "model.embedding_norm.weight", (embd,))
    yield tensor("output.weight", "lm_head.weight", (vocab, embd), optional=config.flag("tie_word_embeddings"))
    for i, attends in enumerate(_attends(config)):
        to, at = f"blk.{i}", f"model.layers.{i}"
        yield tensor(f"{to}.attn_norm.weight", f"{at}.operator_norm.weight", (embd,))
        yield from _attention_tensors(config, to, at) if attends else _convolution_tensors(config, to, at)
        yield tensor(f"{to}.ffn_norm.weight", f"{at}.ffn_norm.weight", (embd,))
        yield tensor(f"{to}.ffn_gate.weight", f"{at}.feed_forward.w1.weight", (ffn, embd))
        yield tensor(f"{to}.ffn_up.weight", f"{at}.feed_forward.w3.weight", (ffn, embd))
        yield tensor(f"{to}.ffn_down.weight", f"{at}.feed_forward.w2.weight", (embd, ffn))


def _attention_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, dim = config.integer("hidden_size"), head_dim(config)
    kv = n_kv_heads(config) * dim
    for name, rows in (("q", embd), ("k", kv), ("v", kv)):
        yield tensor(f"{to}.attn_{name}.weight", f"{at}.self_attn.{name}_proj.weight", (rows, embd))
    yield tensor(f"{to}.attn_q_norm.weight", f"{at}.self_attn.q_layernorm.weight", (dim,))
    yield tensor(f"{to}.attn_k_norm.weight", f"{at}.self_attn.k_layernorm.weight", (dim,))
    yield tensor(f"{to}.attn_output.weight", f"{at}.self_attn.out_proj.weight", (embd, embd))


def _convolution_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, width = config.integer("hidden_size"), config.integer("conv_L_cache")
    kernel = Part(f"{at}.conv.conv.weight", (embd, 1, width))
    yield TensorRule(f"{to}.shortconv.conv.weight", (embd, width), (kernel,))
    yield tensor(f"{to}.shortconv.in_proj.weight", f"{at}.conv.in_proj.weight", (3 * embd, embd))
    yield tensor(f"{to}.shortconv.out_proj.weight", f"{at}.conv.out_proj.weight", (embd, embd))


ARCHITECTURE = Architecture(
    name="lfm2",
    defaults={
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 65536,
    },
    metadata=metadata,
    tensors=tensors,
    synonyms={"theta": "rope_theta", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
)
