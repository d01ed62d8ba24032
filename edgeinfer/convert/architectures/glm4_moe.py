"""GLM-4.5 and 4.6: experts as DeepSeek V3's, and a layer for the prediction of further tokens, which is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    n_layers,
    rotary_dim,
)
from edgeinfer.convert.architectures.blocks import attention, head_norms, norm
from edgeinfer.convert.architectures.nextn import adapted, n_nextn, nextn_tensors
from edgeinfer.convert.architectures.routed_experts import GATING, ffn_tensors, routed_expert_metadata
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, then those of experts; llama.cpp's layers include those for further tokens."""
    return {
        **decoder_metadata(config, partial=True),
        **routed_expert_metadata(config),
        "block_count": n_layers(config) + n_nextn(config),
        "nextn_predict_layers": n_nextn(config),
        "expert_gating_func": GATING["sigmoid"],
        "expert_weights_norm": config.flag("norm_topk_prob"),
        "rope.dimension_count": rotary_dim(config),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers, the first ones without experts; then those for further tokens, built alike."""
    embd = config.integer("hidden_size")
    yield from embedding_tensors(config)
    for i in range(n_layers(config) + n_nextn(config)):
        to, at = f"blk.{i}", f"model.layers.{i}"
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at, bias=config.flag("attention_bias"))
        if config.flag("use_qk_norm"):
            yield from head_norms(config, to, at)
        yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd)
        yield from ffn_tensors(config, i, to, at, has_bias=True)
        if i >= n_layers(config):
            yield from nextn_tensors(config, to, at)


ARCHITECTURE = Architecture(
    name="glm4moe",
    defaults={
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=adapted,
)
