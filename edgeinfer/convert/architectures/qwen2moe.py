"""Qwen1.5-MoE and Qwen2-MoE: a Qwen2 with many small experts and one that every token shares, behind a gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    expert_counts,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, experts, gated_ffn, layers, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for what llama.cpp computes in one way only: experts in every layer, weights as is."""
    require(config, "decoder_sparse_step", 1)
    require(config, "mlp_only_layers", [])
    require(config, "norm_topk_prob", False)
    require(config, "qkv_bias", True)
    require(config, "tie_word_embeddings", False)
    return {
        **decoder_metadata(config),
        **expert_counts(config),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """As qwen2, with a router, experts, and the shared expert with its gate."""
    embd, count = config.integer("hidden_size"), config.integer("num_experts")
    ffn, shared = config.integer("moe_intermediate_size"), config.integer("shared_expert_intermediate_size")
    yield from embedding_tensors(config)
    for to, at in layers(config):
        mlp = f"{at}.mlp"
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at, bias=True)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield tensor(f"{to}.ffn_gate_inp.weight", f"{mlp}.gate.weight", (count, embd))
        yield from experts(to, mlp, count, embd, ffn)
        shared_gate = Part(f"{mlp}.shared_expert_gate.weight", (1, embd))
        yield TensorRule(f"{to}.ffn_gate_inp_shexp.weight", (embd,), (shared_gate,))
        yield from gated_ffn(to, f"{mlp}.shared_expert", embd, shared, suffix="_shexp")


ARCHITECTURE = Architecture(
    name="qwen2moe",
    defaults={
        "decoder_sparse_step": 1,
        "intermediate_size": 5632,
        "max_position_embeddings": 32768,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "shared_expert_intermediate_size": 5632,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    metadata=metadata,
    tensors=tensors,
)
