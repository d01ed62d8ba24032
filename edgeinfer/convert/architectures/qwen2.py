"""Qwen2 and Qwen2.5, their Coder and Math models, R1-Distill-Qwen."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    head_dim,
    n_kv_heads,
    n_layers,
    tensor,
)
from edgeinfer.convert.config import Config


def tensors(config: Config) -> Iterator[TensorRule]:
    """As llama, but query, key and value have biases, and rope rotates halves, so that nothing is reordered."""
    embd, ffn, dim = config.integer("hidden_size"), config.integer("intermediate_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * dim, n_kv_heads(config) * dim

    yield from embedding_tensors(config)
    for i in range(n_layers(config)):
        to, at = f"blk.{i}", f"model.layers.{i}"
        yield tensor(f"{to}.attn_norm.weight", f"{at}.input_layernorm.weight", (embd,))
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield tensor(f"{to}.attn_{name}.weight", f"{at}.self_attn.{name}_proj.weight", (rows, embd))
            yield tensor(f"{to}.attn_{name}.bias", f"{at}.self_attn.{name}_proj.bias", (rows,))
        yield tensor(f"{to}.attn_output.weight", f"{at}.self_attn.o_proj.weight", (embd, q))
        yield tensor(f"{to}.ffn_norm.weight", f"{at}.post_attention_layernorm.weight", (embd,))
        yield tensor(f"{to}.ffn_gate.weight", f"{at}.mlp.gate_proj.weight", (ffn, embd))
        yield tensor(f"{to}.ffn_up.weight", f"{at}.mlp.up_proj.weight", (ffn, embd))
        yield tensor(f"{to}.ffn_down.weight", f"{at}.mlp.down_proj.weight", (embd, ffn))


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
