"""InternLM2 and InternLM2.5: a llama with names of its own, and query, key and value in one matrix by groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    decoder_metadata,
    head_dim,
    n_kv_heads,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import layers
from edgeinfer.convert.architectures.transforms import RowTransform, some_rows
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder. A scaling of the rope beyond the context length changes nothing within it."""
    require(config, "bias", False)
    require(config, "tie_word_embeddings", False)
    require(config, "head_dim", None)
    return decoder_metadata(config, dynamic=True)


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers with a gated feed-forward."""
    embd, ffn, vocab = config.integer("hidden_size"), config.integer("intermediate_size"), config.vocab_size
    yield tensor("token_embd.weight", "model.tok_embeddings.weight", (vocab, embd))
    yield tensor("output_norm.weight", "model.norm.weight", (embd,))
    yield tensor("output.weight", "output.weight", (vocab, embd))
    for to, at in layers(config):
        yield tensor(f"{to}.attn_norm.weight", f"{at}.attention_norm.weight", (embd,))
        yield from _attention(config, to, at)
        yield tensor(f"{to}.ffn_norm.weight", f"{at}.ffn_norm.weight", (embd,))
        yield tensor(f"{to}.ffn_gate.weight", f"{at}.feed_forward.w1.weight", (ffn, embd))
        yield tensor(f"{to}.ffn_up.weight", f"{at}.feed_forward.w3.weight", (ffn, embd))
        yield tensor(f"{to}.ffn_down.weight", f"{at}.feed_forward.w2.weight", (embd, ffn))


def _attention(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    """The checkpoint has, for each key-value head, its query heads, the key and the value."""
    embd, dim, kv_heads = config.integer("hidden_size"), head_dim(config), n_kv_heads(config)
    q_per_kv = config.integer("num_attention_heads") // kv_heads
    source, shape = f"{at}.attention.wqkv.weight", (embd + 2 * kv_heads * dim, embd)
    for name, rows, transform in (
        ("q", embd, _interleaved(q_per_kv + 2, dim, 0, q_per_kv)),
        ("k", kv_heads * dim, _interleaved(q_per_kv + 2, dim, q_per_kv, q_per_kv + 1)),
        ("v", kv_heads * dim, some_rows((q_per_kv + 2) * dim, (q_per_kv + 1) * dim, (q_per_kv + 2) * dim)),
    ):
        yield TensorRule(f"{to}.attn_{name}.weight", (rows, embd), (Part(source, shape, transform=transform),))
    yield tensor(f"{to}.attn_output.weight", f"{at}.attention.wo.weight", (embd, embd))


def _interleaved(n_heads: int, dim: int, first: int, end: int) -> RowTransform:
    """Of every `n_heads` heads those from `first` to before `end`, the halves of each as interleave_halves has them."""
    return RowTransform(
        n_heads * dim,
        lambda rows: rows.reshape(-1, n_heads, 2, dim // 2, rows.shape[1])[:, first:end].swapaxes(2, 3),
        rows_kept=(end - first) * dim,
    )


ARCHITECTURE = Architecture(
    name="internlm2",
    defaults={
        "bias": True,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 103168,
    },
    metadata=metadata,
    tensors=tensors,
)
