"""Mixtral: a llama whose feed-forward network is one of several experts per token."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.convert.architectures import llama
from edgeinfer.convert.architectures.base import Architecture, ConstantRule, TensorRule, tensor
from edgeinfer.convert.architectures.blocks import experts
from edgeinfer.convert.config import Config


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """As llama, with a router and stacked experts."""
    ffn, count = config.integer("intermediate_size"), config.integer("num_local_experts")

    def feed_forward(to: str, at: str, embd: int) -> Iterator[TensorRule]:
        moe = f"{at}.block_sparse_moe"
        yield tensor(f"{to}.ffn_gate_inp.weight", f"{moe}.gate.weight", (count, embd))
        yield from experts(to, moe, count, embd, ffn, ("w1", "w3", "w2"))

    return llama.interleaved_layers(config, feed_forward)


ARCHITECTURE = Architecture(
    name="llama",
    defaults={
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    metadata=llama.metadata,
    tensors=tensors,
)
