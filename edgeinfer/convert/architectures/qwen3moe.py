"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): a Qwen3 with many small experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    expert_counts,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, experts, head_norms, layers, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for what llama.cpp computes in one way only: experts in every layer, weights normed."""
    require(config, "attention_bias", False)
    require(config, "decoder_sparse_step", 1)
    require(config, "mlp_only_layers", [])
    require(config, "norm_topk_prob", True)
    return {
        **decoder_metadata(config),
        **expert_counts(config),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """As qwen3, with a router and experts."""
    embd, count = config.integer("hidden_size"), config.integer("num_experts")
    ffn = config.integer("moe_intermediate_size")
    yield from embedding_tensors(config)
    for to, at in layers(config):
        mlp = f"{at}.mlp"
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at)
        yield from head_norms(config, to, at)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield tensor(f"{to}.ffn_gate_inp.weight", f"{mlp}.gate.weight", (count, embd))
        yield from experts(to, mlp, count, embd, ffn)


ARCHITECTURE = Architecture(
    name="qwen3moe",
    defaults={
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    metadata=metadata,
    tensors=tensors,
)
