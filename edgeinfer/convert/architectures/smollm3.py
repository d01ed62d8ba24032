"""SmolLM3: a llama whose every fourth layer has no rope."""

from __future__ import annotations

from typing import Any

from edgeinfer.convert.architectures import llama
from edgeinfer.convert.architectures.base import Architecture, n_layers, require
from edgeinfer.convert.config import Config

_ROPE_INTERVAL = 4  # llama.cpp knows no other (src/models/smollm3.cpp)


def metadata(config: Config) -> dict[str, Any]:
    """As llama's. Raises UnusableInputError when other layers than every fourth have no rope."""
    with_rope = [int((i + 1) % _ROPE_INTERVAL != 0) for i in range(n_layers(config))]
    if config.get("no_rope_layers") is None:
        require(config, "no_rope_layer_interval", _ROPE_INTERVAL)
    else:
        require(config, "no_rope_layers", with_rope)
    require(config, "use_sliding_window", False)
    return llama.metadata(config, rope_factors=False)


ARCHITECTURE = Architecture(
    name="smollm3",
    defaults={
        "max_position_embeddings": 32768,
        "no_rope_layer_interval": _ROPE_INTERVAL,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    metadata=metadata,
    tensors=llama.tensors,
)
