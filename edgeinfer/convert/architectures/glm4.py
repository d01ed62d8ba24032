"""GLM-4-0414 and GLM-Z1: norms before and after attention and feed-forward, half of a head rotated."""

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
    n_layers,
    rotary_dim,
    tensor,
)
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, and how much of a head is rotated (neighbours, as in the checkpoint)."""
    return {**decoder_metadata(config, partial=True), "rope.dimension_count": rotary_dim(config)}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Gate and up of the feed-forward are one matrix, in the file too."""
    embd, ffn, dim = config.integer("hidden_size"), config.integer("intermediate_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * dim, n_kv_heads(config) * dim
    no_bias = not config.flag("attention_bias")

    yield from embedding_tensors(config)
    for i in range(n_layers(config)):
        to, at = f"blk.{i}", f"model.layers.{i}"
        for name, source in (
            ("attn_norm", "input_layernorm"),
            ("post_attention_norm", "post_self_attn_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
        ):
            yield tensor(f"{to}.{name}.weight", f"{at}.{source}.weight", (embd,))
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield tensor(f"{to}.attn_{name}.weight", f"{at}.self_attn.{name}_proj.weight", (rows, embd))
            yield tensor(f"{to}.attn_{name}.bias", f"{at}.self_attn.{name}_proj.bias", (rows,), optional=no_bias)
        yield tensor(f"{to}.attn_output.weight", f"{at}.self_attn.o_proj.weight", (embd, q))
        yield tensor(f"{to}.ffn_up.weight", f"{at}.mlp.gate_up_proj.weight", (2 * ffn, embd))
        yield tensor(f"{to}.ffn_down.weight", f"{at}.mlp.down_proj.weight", (embd, ffn))


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
