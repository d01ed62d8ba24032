"""Llama 4 (Scout, Maverick): experts beside a shared one, attention in chunks, every fourth layer without rope.

llama.cpp has the chunks, the layers without rope and the temperature of their attention built in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures import llama
from edgeinfer.convert.architectures.base import (
    Architecture,
    ConstantRule,
    TensorRule,
    embedding_tensors,
    expert_counts,
    head_dim,
    impossible,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, layers, norm
from edgeinfer.convert.architectures.fused_experts import fused_transposed_experts
from edgeinfer.convert.config import Config

_FULL_EVERY = 4
_MAVERICK_EXPERTS = 128
"""With as many experts, llama.cpp does not norm query and key."""


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for what llama.cpp computes in one way only."""
    require(config, "attention_chunk_size", 8192)
    require(config, "floor_scale", 8192)
    require(config, "attn_scale", 0.1)
    require(config, "attn_temperature_tuning", True, 4)
    require(config, "attention_bias", False)
    _check_layers(config)
    experts = expert_counts(config)
    require(config, "use_qk_norm", experts["expert_count"] != _MAVERICK_EXPERTS)
    dim = head_dim(config)
    return {
        **llama.metadata(config.with_values({"intermediate_size": config.integer("intermediate_size_mlp")})),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "interleave_moe_layer_step": config.integer("interleave_moe_layer_step"),
        "expert_feed_forward_length": config.integer("intermediate_size"),
    }


def _check_layers(config: Config) -> None:
    """Raise UnusableInputError for other layers in chunks, with rope or with experts than llama.cpp's."""
    count, step = n_layers(config), config.integer("interleave_moe_layer_step")
    in_chunks = [(i + 1) % _FULL_EVERY != 0 for i in range(count)]
    expected = {
        "no_rope_layers": [int(has_rope) for has_rope in in_chunks],
        "layer_types": ["chunked_attention" if is_part else "full_attention" for is_part in in_chunks],
        "moe_layers": list(range(step - 1, count, step)),
    }
    for key, known in expected.items():
        if config.get(key) not in (None, [], known):
            raise impossible(config, f"{key!r} are other layers than llama.cpp has in this architecture")
    if not config.get("no_rope_layers"):
        require(config, "no_rope_layer_interval", _FULL_EVERY)


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """Query and key stay as they are: transformers rotates neighbours here, as ggml does."""
    embd, step = config.integer("hidden_size"), config.integer("interleave_moe_layer_step")
    yield from embedding_tensors(config)
    yield from llama.rope_factors(config)
    for i, (to, at) in enumerate(layers(config)):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        if (i + 1) % step:
            yield from gated_ffn(to, f"{at}.feed_forward", embd, config.integer("intermediate_size_mlp"))
        else:
            yield from _experts(config, to, f"{at}.feed_forward")


def _experts(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    """A router, all experts in two tensors, and one that all tokens share."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    count = expert_counts(config)["expert_count"]
    yield tensor(f"{to}.ffn_gate_inp.weight", f"{at}.router.weight", (count, embd))
    yield from fused_transposed_experts(config, to, at, count, ffn)
    yield from gated_ffn(to, f"{at}.shared_expert", embd, ffn, suffix="_shexp")


ARCHITECTURE = Architecture(
    name="llama4",
    defaults={
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 131072,
        "no_rope_layer_interval": _FULL_EVERY,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    metadata=metadata,
    tensors=tensors,
)
