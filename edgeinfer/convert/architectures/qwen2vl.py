"""Qwen2-VL and Qwen2.5-VL, the text model: a Qwen2 with positions of three kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures import qwen2
from edgeinfer.convert.architectures.base import decoder_metadata, head_dim, require
from edgeinfer.convert.architectures.mrope import sections_metadata
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, and how the kinds of positions share a head."""
    require(config, "head_dim", None, config.integer("hidden_size") // config.integer("num_attention_heads"))
    return {**decoder_metadata(config), **sections_metadata(config, head_dim(config) // 2)}


ARCHITECTURE = replace(
    qwen2.ARCHITECTURE,
    name="qwen2vl",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    metadata=metadata,
)
