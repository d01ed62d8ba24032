"""Qwen3-VL with experts (30B-A3B, 235B-A22B), the text model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures import qwen3moe
from edgeinfer.convert.architectures.base import TensorRule, embedding_tensors, head_dim, tensor
from edgeinfer.convert.architectures.blocks import attention, head_norms, layers, norm
from edgeinfer.convert.architectures.fused_experts import fused_transposed_experts
from edgeinfer.convert.architectures.qwen3vl import image_metadata
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """Qwen3-MoE's keys and those of images; the length of heads is stated always."""
    length = dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim(config))
    return {**qwen3moe.metadata(config), **length, **image_metadata(config)}


def tensors(config: Config) -> Iterator[TensorRule]:
    """As qwen3moe, but the checkpoint has the experts stacked already."""
    embd, count = config.integer("hidden_size"), config.integer("num_experts")
    ffn = config.integer("moe_intermediate_size")
    yield from embedding_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at)
        yield from head_norms(config, to, at)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield tensor(f"{to}.ffn_gate_inp.weight", f"{at}.mlp.gate.weight", (count, embd))
        yield from fused_transposed_experts(config, to, f"{at}.mlp", count, ffn)


ARCHITECTURE = replace(
    qwen3moe.ARCHITECTURE,
    name="qwen3vlmoe",
    defaults={
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "intermediate_size": 5632,
        "max_position_embeddings": 128000,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    metadata=metadata,
    tensors=tensors,
)
