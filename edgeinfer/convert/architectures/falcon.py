"""Falcon 7B, 40B, 180B and Falcon 2: attention beside feed-forward, query, key and value in one matrix by groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    check_activation,
    head_dim,
    impossible,
    n_layers,
    require,
    rope_metadata,
    tensor,
)
from edgeinfer.convert.architectures.blocks import fused_qkv, layers, linear, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for Falcon-RW, whose attention has no rope and whose layers are biased."""
    check_activation(config, "activation", "gelu")
    require(config, "alibi", False)
    require(config, "bias", False)
    require(config, "parallel_attn", True)
    require(config, "head_dim", None)
    return {
        "block_count": n_layers(config),
        "context_length": config.integer("max_position_embeddings"),
        "tensor_data_layout": "jploski",  # llama.cpp's name for the order that fused_qkv makes
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": _n_ffn(config),
        "attention.head_count": config.integer("num_attention_heads"),
        "attention.head_count_kv": _n_kv_heads(config),
        **rope_metadata(config),
        "attention.layer_norm_epsilon": config.number("layer_norm_epsilon"),
    }


def _n_ffn(config: Config) -> int:
    embd = config.integer("hidden_size")
    return 4 * embd if config.get("ffn_hidden_size") is None else config.integer("ffn_hidden_size")


def _n_kv_heads(config: Config) -> int:
    """One in the first models with `multi_query`, whatever else is stated; the later ones state how many."""
    heads, is_new = config.integer("num_attention_heads"), config.flag("new_decoder_architecture")
    if not is_new:
        return 1 if config.flag("multi_query") else heads
    kv_heads = heads if config.get("num_kv_heads") is None else config.integer("num_kv_heads")
    if heads % kv_heads:
        raise impossible(config, f"num_attention_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
    return kv_heads


def tensors(config: Config) -> Iterator[TensorRule]:
    """The norm before the feed-forward is the one that llama.cpp calls `attn_norm`, of two or alone."""
    embd, ffn, vocab, dim = config.integer("hidden_size"), _n_ffn(config), config.vocab_size, head_dim(config)
    kv_heads = _n_kv_heads(config)
    q_per_kv = config.integer("num_attention_heads") // kv_heads
    yield tensor("token_embd.weight", "transformer.word_embeddings.weight", (vocab, embd))
    yield from norm("output_norm", "transformer.ln_f", embd, bias=True)
    yield tensor("output.weight", "lm_head.weight", (vocab, embd), optional=config.flag("tie_word_embeddings"))
    for to, at in layers(config, "transformer.h"):
        if _has_two_norms(config):
            yield from norm(f"{to}.attn_norm", f"{at}.ln_mlp", embd, bias=True)
            yield from norm(f"{to}.attn_norm_2", f"{at}.ln_attn", embd, bias=True)
        else:
            yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd, bias=True)
        qkv, rows = f"{at}.self_attention.query_key_value.weight", embd + 2 * kv_heads * dim
        yield fused_qkv(f"{to}.attn_qkv.weight", qkv, (rows, embd), dim, q_per_kv)
        yield from linear(f"{to}.attn_output", f"{at}.self_attention.dense", (embd, embd))
        yield from linear(f"{to}.ffn_up", f"{at}.mlp.dense_h_to_4h", (ffn, embd))
        yield from linear(f"{to}.ffn_down", f"{at}.mlp.dense_4h_to_h", (embd, ffn))


def _has_two_norms(config: Config) -> bool:
    if not config.flag("new_decoder_architecture"):
        return False
    stated = config.get("num_ln_in_parallel_attn")
    return stated is None or config.integer("num_ln_in_parallel_attn", at_most=2) == 2


ARCHITECTURE = Architecture(
    name="falcon",
    defaults={
        "alibi": False,
        "bias": False,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 65024,
    },
    metadata=metadata,
    tensors=tensors,
)
