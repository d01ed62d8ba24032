"""Granite: a llama that scales its embedding, attention, residual stream and logits."""

from __future__ import annotations

from typing import Any

from edgeinfer.convert.architectures import llama
from edgeinfer.convert.architectures.base import Architecture
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """As llama's, and the four scales."""
    return {
        **llama.metadata(config),
        "attention.scale": config.number("attention_multiplier"),
        "embedding_scale": config.number("embedding_multiplier"),
        "residual_scale": config.number("residual_multiplier"),
        "logit_scale": config.number("logits_scaling"),
    }


DEFAULTS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

ARCHITECTURE = Architecture(name="granite", defaults=DEFAULTS, metadata=metadata, tensors=llama.tensors)
