"""DeepSeek V3, R1 and V3.1: V2 with sigmoid routing and a bias on the choice of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgeinfer.convert.architectures import deepseek_v2
from edgeinfer.convert.architectures.base import n_layers
from edgeinfer.convert.config import Config


def unused(config: Config) -> Mapping[str, str]:
    """The layers after the last one, which predict further tokens; llama.cpp knows none in this architecture."""
    if not config.get("num_nextn_predict_layers"):
        return {}
    first = n_layers(config)
    numbers = range(first, first + config.integer("num_nextn_predict_layers", at_most=8))
    return {rf"model\.layers\.({'|'.join(map(str, numbers))})\.": "for the prediction of several tokens at a time"}


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
    unused=unused,
)
