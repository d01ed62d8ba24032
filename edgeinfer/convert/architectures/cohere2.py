"""Command-R7B and Command-A: a Command-R with windows, and rope only in layers that have one."""

from __future__ import annotations

from typing import Any

from edgeinfer.convert.architectures.base import Architecture, head_dim, require
from edgeinfer.convert.architectures.command_r import DEFAULTS, cohere_metadata, parallel_layers
from edgeinfer.convert.architectures.gemma2 import check_layer_types
from edgeinfer.convert.config import Config

_FULL_EVERY = 4


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for other layers with a window than llama.cpp's."""
    if config.get("layer_types") is None:
        require(config, "sliding_window_pattern", _FULL_EVERY)
    check_layer_types(config, window_every=_FULL_EVERY)
    require(config, "rotary_pct", 1)
    dim = head_dim(config)
    return {
        **cohere_metadata(config),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.sliding_window": config.integer("sliding_window"),
        "vocab_size": config.vocab_size,
        "rope.dimension_count": dim,
    }


ARCHITECTURE = Architecture(
    name="cohere2",
    defaults={**DEFAULTS, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": _FULL_EVERY},
    metadata=metadata,
    tensors=parallel_layers,
)
