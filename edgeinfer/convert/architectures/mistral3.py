"""Ministral 3, and the text model of Mistral Small 3.1 and 3.2: a llama, with another attention far into a text."""

from __future__ import annotations

from typing import Any

from edgeinfer.convert.architectures import llama
from edgeinfer.convert.architectures.base import Architecture, head_dim, impossible, require
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """As llama's. Ministral's yarn and the temperature of its attention come with it."""
    require(config, "model_type", "ministral3", "mistral")
    dim, is_ministral = head_dim(config), config.get("model_type") == "ministral3"
    return {
        **llama.metadata(config),
        "attention.key_length": dim,
        "attention.value_length": dim,
        **(_long_context_metadata(config) if is_ministral else {}),
    }


def _long_context_metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for another yarn than llama.cpp's, which takes the `mscale` for 1."""
    rope = config.rope
    require(rope, "rope_type", "yarn")
    require(rope, "mscale", 1)
    if rope.get("attention_factor") is not None:
        raise impossible(config, "the yarn states an 'attention_factor', llama.cpp computes it from 'mscale_all_dim'")
    return {
        "rope.scaling.yarn_log_multiplier": rope.number("mscale_all_dim"),
        "attention.temperature_scale": rope.number("llama_4_scaling_beta"),
    }


ARCHITECTURE = Architecture(
    name="mistral3",
    defaults={
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": 131072,
    },
    metadata=metadata,
    tensors=llama.tensors,
)
