"""Qwen3-VL, the text model: a Qwen3 with positions of three kinds, whose first layers take in what images show."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures import qwen3
from edgeinfer.convert.architectures.base import head_dim, impossible, n_layers
from edgeinfer.convert.architectures.mrope import sections_metadata
from edgeinfer.convert.config import Config

DEFAULT_SECTIONS = [24, 20, 20]
DEFAULT_TAPS = [8, 16, 24]


def metadata(config: Config) -> dict[str, Any]:
    """Qwen3's keys and those of images."""
    return {**qwen3.metadata(config), **image_metadata(config)}


def image_metadata(config: Config) -> dict[str, Any]:
    """How the kinds of positions share a head, and how many layers the image encoder's own layers speak to."""
    vision = config.get("vision_config")
    taps = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    taps = DEFAULT_TAPS if taps is None else taps
    if not isinstance(taps, list) or len(taps) > n_layers(config):
        raise impossible(config, f"'deepstack_visual_indexes' is {reprlib.repr(taps)}, expected a list of layers")
    sections = sections_metadata(config, head_dim(config) // 2, DEFAULT_SECTIONS, interleaved=True)
    return {**sections, "n_deepstack_layers": len(taps)}


ARCHITECTURE = replace(
    qwen3.ARCHITECTURE,
    name="qwen3vl",
    defaults={
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    metadata=metadata,
)
