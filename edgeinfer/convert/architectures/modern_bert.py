"""ModernBERT and the encoders built on it: rotary positions, gated feed-forward, windows around most layers' tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    check_activation,
    head_dim,
    impossible,
    n_layers,
    require,
    rope_metadata,
    tensor,
)
from edgeinfer.convert.architectures.blocks import layers, norm
from edgeinfer.convert.architectures.pooling import pooling_metadata
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """Without heads and the prefix that they bring, and with the names of ropes that other models have."""
    renamed = {name.removeprefix("model."): spec for name, spec in checkpoint.tensors.items()}
    if len(renamed) < len(checkpoint.tensors):
        raise impossible(checkpoint.config, "the weights have some tensors twice, with and without a prefix")
    config = checkpoint.config
    base = config.get("global_rope_theta")
    is_one_for_all = config.values.get("local_rope_theta", 0) is None
    ropes = {"rope_theta": base, "rope_local_base_freq": base if is_one_for_all else config.get("local_rope_theta")}
    return replace(checkpoint, tensors=renamed, config=config.with_values(ropes)).without(
        r"(head|decoder|classifier)\.", "a head that embeddings do without"
    )


def metadata(config: Config) -> dict[str, Any]:
    """Attention in both directions. Raises UnusableInputError for what llama.cpp computes in one way only."""
    check_activation(config, "hidden_activation", "gelu", "gelu_pytorch_tanh", "silu", "swish")
    for key in ("norm_bias", "attention_bias", "mlp_bias"):
        require(config, key, False)
    if config.rope.get("rope_type") != "default":
        raise impossible(config, "a scaled rope, llama.cpp runs this architecture without")
    head_dim(config)  # refuses heads that don't share out the hidden size
    return {
        "block_count": n_layers(config),
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": config.integer("intermediate_size"),
        "attention.head_count": config.integer("num_attention_heads"),
        **rope_metadata(config),
        "rope.scaling.type": "none",
        "rope.freq_base_swa": config.window_rope.number("rope_theta"),
        "attention.layer_norm_epsilon": config.number("norm_eps"),
        "attention.causal": False,
        **pooling_metadata(config),
        **_window_metadata(config),
        "vocab_size": config.vocab_size,
        "hidden_activation": config.get("hidden_activation"),
    }


def _window_metadata(config: Config) -> dict[str, Any]:
    """The window, and every how many layers one, the first of them, has none; nothing where that is all of them.

    Raises UnusableInputError for another pattern.
    """
    period, window = config.integer("global_attn_every_n_layers"), config.integer("local_attention")
    stated = config.get("layer_types")
    expected = ["sliding_attention" if i % period else "full_attention" for i in range(n_layers(config))]
    if stated is not None and stated != expected:
        raise impossible(config, f"'layer_types' is not the pattern of {period} that llama.cpp knows")
    if "sliding_attention" not in expected:  # stated all the same, the library ends the process
        return {}
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": period}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers without biases; the first one's input is normed already."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield tensor("token_embd.weight", "embeddings.tok_embeddings.weight", (config.vocab_size, embd))
    yield from norm("token_embd_norm", "embeddings.norm", embd)
    yield from norm("output_norm", "final_norm", embd)
    for to, at in layers(config, "layers"):
        if to != "blk.0":
            yield from norm(f"{to}.attn_norm", f"{at}.attn_norm", embd)
        yield tensor(f"{to}.attn_qkv.weight", f"{at}.attn.Wqkv.weight", (3 * embd, embd))
        yield tensor(f"{to}.attn_output.weight", f"{at}.attn.Wo.weight", (embd, embd))
        yield from norm(f"{to}.ffn_norm", f"{at}.mlp_norm", embd)
        yield tensor(f"{to}.ffn_up.weight", f"{at}.mlp.Wi.weight", (2 * ffn, embd))
        yield tensor(f"{to}.ffn_down.weight", f"{at}.mlp.Wo.weight", (embd, ffn))


ARCHITECTURE = Architecture(
    name="modern-bert",
    defaults={
        "attention_bias": False,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "hidden_activation": "gelu",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "norm_bias": False,
        "norm_eps": 1e-5,
        "num_attention_heads": 12,
        "num_hidden_layers": 22,
        "vocab_size": 50368,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=adapted,
)
