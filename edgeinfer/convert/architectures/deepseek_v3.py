"""DeepSeek V3, R1 and V3.1, Kimi-K2: V2 with sigmoid routing, a bias on the choice of experts, and one layer more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures import deepseek_v2
from edgeinfer.convert.architectures.base import TensorRule, embedding_tensors, n_layers
from edgeinfer.convert.architectures.nextn import adapted, n_nextn, nextn_tensors
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """V2's keys; llama.cpp's layers include those for further tokens."""
    more = n_nextn(config)
    counts = {"block_count": n_layers(config) + more, "nextn_predict_layers": more} if more else {}
    return {**deepseek_v2.metadata(config), **counts}


def tensors(config: Config) -> Iterator[TensorRule]:
    """V2's layers, then those for further tokens, built alike."""
    yield from embedding_tensors(config)
    for i in range(n_layers(config) + n_nextn(config)):
        yield from deepseek_v2.layer_tensors(config, i)
        if i >= n_layers(config):
            yield from nextn_tensors(config, f"blk.{i}", f"model.layers.{i}")


ARCHITECTURE = replace(
    deepseek_v2.ARCHITECTURE,
    defaults={
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 0,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=adapted,
)
