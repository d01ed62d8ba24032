"""Gemma 3: a Gemma 2 with norms for query and key, no soft caps, and another rope in the layers with a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import Architecture, TensorRule, n_layers, require
from edgeinfer.convert.architectures.gemma2 import check_layer_types, gemma_metadata, sandwich_layers
from edgeinfer.convert.config import Config

_LAYERS_27B = 62
WINDOW_PATTERN = 6


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for windows or scales that llama.cpp would compute differently."""
    require(config, "use_bidirectional_attention", False)
    return windowed_metadata(config)


def windowed_metadata(config: Config) -> dict[str, Any]:
    """What it shares with EmbeddingGemma."""
    if config.get("layer_types") is None:
        require(config, "sliding_window_pattern", WINDOW_PATTERN)
    check_layer_types(config, window_every=WINDOW_PATTERN)
    require(config, "attn_logit_softcapping", None)
    soft_cap = config.get("final_logit_softcapping")
    return {
        **gemma_metadata(config, scaled_by_width=n_layers(config) == _LAYERS_27B),
        "rope.freq_base_swa": config.window_rope.number("rope_theta"),
        "attention.sliding_window": config.integer("sliding_window"),
        **({} if soft_cap is None else {"final_logit_softcapping": config.number("final_logit_softcapping")}),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """As gemma2, with norms for query and key."""
    return sandwich_layers(config, with_head_norms=True)


ARCHITECTURE = Architecture(
    name="gemma3",
    defaults={
        "attention_bias": False,
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "sliding_window_pattern": WINDOW_PATTERN,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
        "vocab_size": 262208,
    },
    metadata=metadata,
    tensors=tensors,
)
