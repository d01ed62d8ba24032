"""EXAONE 4: norms after attention and feed-forward, and of each head; in the 32B windows, and rope only with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    ConstantRule,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    head_dim,
    impossible,
    n_layers,
    require,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, head_norms, layers, norm
from edgeinfer.convert.architectures.llama import rope_factors
from edgeinfer.convert.architectures.windows import window_metadata
from edgeinfer.convert.config import Config

_LAYERS_32B = 64
"""With as many layers, llama.cpp has windows, otherwise none."""

_FULL_EVERY = 4


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for windows where llama.cpp has none."""
    has_windows = config.values.get("sliding_window", 0) is not None
    if has_windows != (n_layers(config) == _LAYERS_32B):
        state = "states a" if has_windows else "has no"
        raise impossible(config, f"{state} 'sliding_window', llama.cpp has windows with {_LAYERS_32B} layers only")
    if config.get("layer_types") is None:
        require(config, "sliding_window_pattern", _FULL_EVERY, "LLLG", *(() if has_windows else (None, 0)))
    embd, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if embd != heads * head_dim(config):
        raise impossible(config, f"'head_dim' is {head_dim(config)}, not a share of hidden_size {embd}")
    return {
        **decoder_metadata(config, rope_factors=True),
        "vocab_size": config.vocab_size,
        **(window_metadata(config, full_every=_FULL_EVERY) if has_windows else {}),
    }


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """Post-norm layers."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from embedding_tensors(config)
    yield from rope_factors(config)
    for to, at in layers(config):
        yield from attention(config, to, at)
        yield from head_norms(config, to, at)
        yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)
        yield from norm(f"{to}.post_ffw_norm", f"{at}.post_feedforward_layernorm", embd)


ARCHITECTURE = Architecture(
    name="exaone4",
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": False,
        "vocab_size": 102400,
    },
    metadata=metadata,
    tensors=tensors,
)
