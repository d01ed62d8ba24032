"""GLM-4.5 and 4.6: experts as DeepSeek V3's, and a layer for the prediction of further tokens, which is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    head_dim,
    n_kv_heads,
    n_layers,
    rotary_dim,
    tensor,
)
from edgeinfer.convert.architectures.experts import (
    GATING,
    dense_tensors,
    n_dense_layers,
    routed_expert_metadata,
    routed_expert_tensors,
)
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config

MAX_NEXTN = 8


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """As many layers for further tokens as there are: finetunes lose them, and the config still counts them."""
    config = checkpoint.config
    layers = {int(m[1]) for name in checkpoint.tensors if (m := re.match(r"model\.layers\.(\d{1,4})\.", name))}
    there = sum(layer >= n_layers(config) for layer in layers)
    return replace(checkpoint, config=config.with_values({"num_nextn_predict_layers": min(there, _n_nextn(config))}))


def _n_nextn(config: Config) -> int:
    return config.integer("num_nextn_predict_layers", at_least=0, at_most=MAX_NEXTN)


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, then those of experts; llama.cpp's layers include those for further tokens."""
    return {
        **decoder_metadata(config, partial=True),
        **routed_expert_metadata(config),
        "block_count": n_layers(config) + _n_nextn(config),
        "nextn_predict_layers": _n_nextn(config),
        "expert_gating_func": GATING["sigmoid"],
        "expert_weights_norm": config.flag("norm_topk_prob"),
        "rope.dimension_count": rotary_dim(config),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers, the first ones without experts; then those for further tokens, built alike."""
    yield from embedding_tensors(config)
    for i in range(n_layers(config) + _n_nextn(config)):
        to, at = f"blk.{i}", f"model.layers.{i}"
        yield from _attention_tensors(config, to, at)
        if i < n_dense_layers(config):
            yield from dense_tensors(config, to, at)
        else:
            yield from routed_expert_tensors(config, to, at, has_bias=True)
        if i >= n_layers(config):
            yield from _nextn_tensors(config, to, at)


def _attention_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, dim = config.integer("hidden_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * dim, n_kv_heads(config) * dim
    yield tensor(f"{to}.attn_norm.weight", f"{at}.input_layernorm.weight", (embd,))
    yield tensor(f"{to}.post_attention_norm.weight", f"{at}.post_attention_layernorm.weight", (embd,))
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        source = f"{at}.self_attn.{name}_proj"
        yield tensor(f"{to}.attn_{name}.weight", f"{source}.weight", (rows, embd))
        yield tensor(f"{to}.attn_{name}.bias", f"{source}.bias", (rows,), optional=not config.flag("attention_bias"))
    yield tensor(f"{to}.attn_output.weight", f"{at}.self_attn.o_proj.weight", (embd, q))
    if config.flag("use_qk_norm"):
        yield tensor(f"{to}.attn_q_norm.weight", f"{at}.self_attn.q_norm.weight", (dim,))
        yield tensor(f"{to}.attn_k_norm.weight", f"{at}.self_attn.k_norm.weight", (dim,))


def _nextn_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, vocab = config.integer("hidden_size"), config.vocab_size
    for name, source, shape, optional in (
        ("eh_proj", "eh_proj", (embd, 2 * embd), False),
        ("enorm", "enorm", (embd,), False),
        ("hnorm", "hnorm", (embd,), False),
        ("embed_tokens", "embed_tokens", (vocab, embd), True),
        ("shared_head_head", "shared_head.head", (vocab, embd), True),
        ("shared_head_norm", "shared_head.norm", (embd,), True),
    ):
        yield tensor(f"{to}.nextn.{name}.weight", f"{at}.{source}.weight", shape, optional=optional)


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
