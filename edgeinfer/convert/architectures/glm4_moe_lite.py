"""GLM-4.7-Flash: a small DeepSeek V3, with a layer for one more token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures import deepseek_v3
from edgeinfer.convert.architectures.base import impossible, n_layers
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """DeepSeek V3's keys. Raises UnusableInputError for experts in other layers than in all after the first ones."""
    dense = config.integer("first_k_dense_replace", at_least=0)
    kinds = config.get("mlp_layer_types")
    if kinds not in (None, [("dense", "sparse")[layer >= dense] for layer in range(n_layers(config))]):
        raise impossible(config, f"'mlp_layer_types' is not {dense} times dense and then sparse")
    return deepseek_v3.metadata(config)


ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    defaults={
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.8,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    metadata=metadata,
)
