"""DeepSeek V2, V2-Lite and V2.5: latent attention, routed and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    impossible,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import norm
from edgeinfer.convert.architectures.routed_experts import GATING, ffn_tensors, routed_expert_metadata
from edgeinfer.convert.architectures.transforms import RowTransform, some_rows
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """Attention as llama.cpp computes it: one key-value head, the compressed vector, shared by all query heads."""
    require(config, "rope_interleave", True)
    require(config, "moe_layer_freq", 1, None)
    rank, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    optional: dict[str, Any] = {}
    if _is_lite(config) != (config.get("q_lora_rank") is None):
        form = "without" if _is_lite(config) else "with"
        raise impossible(config, f"llama.cpp runs {n_layers(config)} layers only {form} a 'q_lora_rank'")
    if not _is_lite(config):
        optional["attention.q_lora_rank"] = config.integer("q_lora_rank")
    if config.flag("norm_topk_prob"):
        optional["expert_weights_norm"] = True
    require(config, "scoring_func", *GATING)
    return {
        **decoder_metadata(config),
        **routed_expert_metadata(config),
        **_yarn_metadata(config),
        **optional,
        "expert_gating_func": GATING[config.get("scoring_func")],
        "vocab_size": config.vocab_size,
        "rope.dimension_count": rope,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config.integer("qk_nope_head_dim") + rope,
        "attention.value_length_mla": config.integer("v_head_dim"),
    }


def _is_lite(config: Config) -> bool:
    """Whether llama.cpp (src/models/deepseek2.cpp) takes it for a model without a narrow vector for queries."""
    layers = n_layers(config)
    return layers in (26, 27) or (layers == 48 and config.vocab_size == 128256)


def _yarn_metadata(config: Config) -> dict[str, Any]:
    rope = config.rope
    if rope.get("mscale_all_dim") is None:
        return {}
    require(rope, "mscale", rope.get("mscale_all_dim"))
    # llama.cpp divides by 0.1 again: conversion/deepseek.py, TAG_DEEPSEEK2_YARN_LOG_MUL_FIX.
    return {"rope.scaling.yarn_log_multiplier": 0.1 * rope.number("mscale_all_dim")}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Queries and key-values through a narrow vector each; the widening of keys is applied to the queries instead."""
    yield from embedding_tensors(config)
    for i in range(n_layers(config)):
        yield from layer_tensors(config, i)


def layer_tensors(config: Config, i: int) -> Iterator[TensorRule]:
    """Those of layer `i`, from 0."""
    to, at, embd = f"blk.{i}", f"model.layers.{i}", config.integer("hidden_size")
    yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
    yield from _attention_tensors(config, to, f"{at}.self_attn")
    yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
    yield from ffn_tensors(config, i, to, at, has_bias=config.get("topk_method") == "noaux_tc")


def _attention_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    rank, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    key, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    q = heads * (key + rope)
    if config.get("q_lora_rank") is None:
        yield tensor(f"{to}.attn_q.weight", f"{at}.q_proj.weight", (q, embd))
    else:
        q_rank = config.integer("q_lora_rank")
        yield tensor(f"{to}.attn_q_a.weight", f"{at}.q_a_proj.weight", (q_rank, embd))
        yield from norm(f"{to}.attn_q_a_norm", f"{at}.q_a_layernorm", q_rank)
        yield tensor(f"{to}.attn_q_b.weight", f"{at}.q_b_proj.weight", (q, q_rank))
    yield tensor(f"{to}.attn_kv_a_mqa.weight", f"{at}.kv_a_proj_with_mqa.weight", (rank + rope, embd))
    yield from norm(f"{to}.attn_kv_a_norm", f"{at}.kv_a_layernorm", rank)
    # A head's rows are first those of its keys, then those of its values.
    kv_b, shape = f"{at}.kv_b_proj.weight", (heads * (key + value), rank)
    keys = RowTransform(
        key + value, lambda rows: rows.reshape(-1, key + value, rank)[:, :key].swapaxes(1, 2), rows_kept=key
    )
    values = some_rows(key + value, key, key + value)
    yield TensorRule(f"{to}.attn_k_b.weight", (heads, rank, key), (Part(kv_b, shape, transform=keys),))
    yield TensorRule(f"{to}.attn_v_b.weight", (heads, value, rank), (Part(kv_b, shape, transform=values),))
    yield tensor(f"{to}.attn_output.weight", f"{at}.o_proj.weight", (embd, heads * value))


ARCHITECTURE = Architecture(
    name="deepseek2",
    defaults={
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "v_head_dim": 128,
        "vocab_size": 32000,
    },
    metadata=metadata,
    tensors=tensors,
)
