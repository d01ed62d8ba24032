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
    n_layers,
    rotary_dim,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, head_norms, norm
from edgeinfer.convert.architectures.routed_experts import GATING, ffn_tensors, routed_expert_metadata
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
    embd = config.integer("hidden_size")
    yield from embedding_tensors(config)
    for i in range(n_layers(config) + _n_nextn(config)):
        to, at = f"blk.{i}", f"model.layers.{i}"
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at, bias=config.flag("attention_bias"))
        if config.flag("use_qk_norm"):
            yield from head_norms(config, to, at)
        yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd)
        yield from ffn_tensors(config, i, to, at, has_bias=True)
        if i >= n_layers(config):
            yield from _nextn_tensors(config, to, at)


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
