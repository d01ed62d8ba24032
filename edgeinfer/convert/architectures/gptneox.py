"""GPT-NeoX and Pythia: layer norms, biases, a rope over a part of each head, attention beside feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    attention_metadata,
    check_activation,
    head_dim,
    require,
    rotary_dim,
    tensor,
)
from edgeinfer.convert.architectures.blocks import fused_qkv, layers, linear, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every rotary decoder, and whether attention and feed-forward have the same input."""
    check_activation(config, "hidden_act", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh")
    require(config, "attention_bias", True)
    require(config, "tie_word_embeddings", False)
    require(config, "head_dim", None)
    require(config, "num_key_value_heads", None)
    decoder = attention_metadata(config, partial=True)
    del decoder["attention.head_count_kv"]  # as many as query heads, always
    return {
        **decoder,
        "rope.dimension_count": rotary_dim(config),
        "use_parallel_residual": config.flag("use_parallel_residual"),
        "attention.layer_norm_epsilon": config.number("layer_norm_eps"),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """Two norms in each layer, query, key and value in one matrix, a plain feed-forward network."""
    embd, ffn, vocab = config.integer("hidden_size"), config.integer("intermediate_size"), config.vocab_size
    yield tensor("token_embd.weight", "gpt_neox.embed_in.weight", (vocab, embd))
    yield from norm("output_norm", "gpt_neox.final_layer_norm", embd, bias=True)
    yield tensor("output.weight", "embed_out.weight", (vocab, embd))
    for to, at in layers(config, "gpt_neox.layers"):
        qkv = f"{at}.attention.query_key_value"
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd, bias=True)
        yield fused_qkv(f"{to}.attn_qkv.weight", f"{qkv}.weight", (3 * embd, embd), head_dim(config))
        yield fused_qkv(f"{to}.attn_qkv.bias", f"{qkv}.bias", (3 * embd,), head_dim(config))
        yield from linear(f"{to}.attn_output", f"{at}.attention.dense", (embd, embd), bias=True)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd, bias=True)
        yield from linear(f"{to}.ffn_up", f"{at}.mlp.dense_h_to_4h", (ffn, embd), bias=True)
        yield from linear(f"{to}.ffn_down", f"{at}.mlp.dense_4h_to_h", (embd, ffn), bias=True)


ARCHITECTURE = Architecture(
    name="gptneox",
    defaults={
        "attention_bias": True,
        "hidden_act": "gelu",
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50432,
    },
    metadata=metadata,
    tensors=tensors,
    synonyms={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
)
