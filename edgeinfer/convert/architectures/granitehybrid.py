"""Granite 4: Mamba 2 mixers in most layers, attention in the others; experts beside a shared one, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from edgeinfer.convert.architectures import granite
from edgeinfer.convert.architectures.base import (
    MAX_EXPERTS,
    Architecture,
    TensorRule,
    embedding_tensors,
    head_dim,
    impossible,
    n_kv_heads,
    n_layers,
    require,
)
from edgeinfer.convert.architectures.blocks import attention, layers, norm
from edgeinfer.convert.architectures.granitemoe import expert_tensors, fused_ffn
from edgeinfer.convert.architectures.mamba import RECURRENT_CONTEXT
from edgeinfer.convert.architectures.mamba2 import mixer, mixer_tensors
from edgeinfer.convert.architectures.transforms import interleave_halves
from edgeinfer.convert.config import Config


def architecture(config: Config) -> Architecture:
    """What llama.cpp calls it: models without mixers are plain Granites, with experts or without."""
    config = config.with_defaults(ARCHITECTURE.defaults)
    if not all(_attends(config)):
        return ARCHITECTURE
    return replace(ARCHITECTURE, name="granitemoe" if _n_experts(config) else "granite")


def metadata(config: Config) -> dict[str, Any]:
    """llama.cpp tells a mixer by its having no key-value heads, and whether there is a rope by another one's key."""
    require(config, "mamba_conv_bias", True)
    require(config, "mamba_proj_bias", False)
    require(config, "mamba_expand", 2)
    require(config, "position_embedding_type", None, "rope", "nope")
    has_rope, attends, experts = config.get("position_embedding_type") == "rope", _attends(config), _n_experts(config)
    if not has_rope and experts and all(attends):
        raise impossible(config, "attention without rope in all layers, with experts: llama.cpp has a rope there")
    shared = config.integer("shared_intermediate_size")
    return {
        **granite.metadata(config),
        "context_length": config.integer("max_position_embeddings") if has_rope else RECURRENT_CONTEXT,
        "feed_forward_length": config.integer("intermediate_size") if experts else shared,
        "attention.head_count_kv": np.array([n_kv_heads(config) * attention for attention in attends], np.int32),
        "expert_shared_feed_forward_length": shared,
        **mixer(config, prefix="mamba_").metadata(),
        "rope.scaling.finetuned": has_rope,
    }


def _attends(config: Config) -> list[bool]:
    """For each layer, whether it is attention rather than a mixer."""
    count, kinds = n_layers(config), config.get("layer_types")
    if kinds is None:
        return [False] * count
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("mamba", "attention") for kind in kinds):
        raise impossible(config, f"'layer_types' does not say for {count} layers which are mamba or attention")
    return [kind == "attention" for kind in kinds]


def _n_experts(config: Config) -> int:
    return config.integer("num_local_experts", at_least=0, at_most=MAX_EXPERTS)


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers: a mixer or attention, then experts and the shared one, or that alone."""
    embd, bias = config.integer("hidden_size"), config.flag("attention_bias")
    shared = config.integer("shared_intermediate_size")
    rotary = interleave_halves(head_dim(config))
    yield from embedding_tensors(config)
    for (to, at), attends in zip(layers(config), _attends(config), strict=True):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        if attends:
            yield from attention(config, to, at, rotary, bias=bias, output_bias=bias)
        else:
            yield from mixer_tensors(mixer(config, prefix="mamba_"), to, f"{at}.mamba")
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        if _n_experts(config):
            yield from expert_tensors(config, to, f"{at}.block_sparse_moe")
        yield from fused_ffn(to, f"{at}.shared_mlp", embd, shared, suffix="_shexp" if _n_experts(config) else "")


ARCHITECTURE = Architecture(
    name="granitehybrid",
    defaults={
        **granite.DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_proj_bias": False,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
    },
    metadata=metadata,
    tensors=tensors,
)
