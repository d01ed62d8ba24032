"""DeepSeek V3, R1 and V3.1: V2 with sigmoid routing and a bias on the choice of experts."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.convert.architectures import deepseek_v2
from edgeinfer.convert.architectures.base import n_layers
from edgeinfer.convert.checkpoint import Checkpoint

MAX_NEXTN = 8


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """Without the layers after the last one, for further tokens, which llama.cpp does not know in this architecture."""
    config = checkpoint.config
    first = n_layers(config)
    count = config.integer("num_nextn_predict_layers", at_least=0, at_most=MAX_NEXTN)
    numbers = "|".join(map(str, range(first, first + count)))
    return checkpoint.without(rf"model\.layers\.({numbers})\.", "for the prediction of several tokens at a time")


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
    adapted=adapted,
)
