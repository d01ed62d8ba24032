"""Mamba and Falcon-Mamba: a selective state space in place of attention, and no feed-forward network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    check_activation,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import layers, linear, norm
from edgeinfer.convert.architectures.transforms import negative_exponential
from edgeinfer.convert.config import Config

RECURRENT_CONTEXT = 1 << 20
"""What a file states that has no limit, as llama.cpp's script does."""
_FALCON_CLASS = "FalconMambaForCausalLM"


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for variants that llama.cpp lacks."""
    check_activation(config, "hidden_act", "silu", "swish")
    require(config, "use_bias", False)
    require(config, "use_conv_bias", True)
    require(config, "expand", 2)
    require(config, "intermediate_size", None, 2 * config.integer("hidden_size"))
    return {
        "context_length": RECURRENT_CONTEXT,
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": n_layers(config),
        "ssm.conv_kernel": config.integer("conv_kernel", at_least=2),
        "ssm.inner_size": 2 * config.integer("hidden_size"),
        "ssm.state_size": config.integer("state_size"),
        "ssm.time_step_rank": _time_step_rank(config),
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon"),
        "ssm.dt_b_c_rms": config.hf_class == _FALCON_CLASS,
    }


def _time_step_rank(config: Config) -> int:
    if config.get("time_step_rank") == "auto":
        return -(-config.integer("hidden_size") // 16)
    return config.integer("time_step_rank")


def tensors(config: Config) -> Iterator[TensorRule]:
    """A norm and a mixer in each layer."""
    embd = config.integer("hidden_size")
    yield from backbone_tensors(config)
    inner, state, rank = 2 * embd, config.integer("state_size"), _time_step_rank(config)
    for to, at in layers(config, "backbone.layers"):
        mixer = f"{at}.mixer"
        yield from norm(f"{to}.attn_norm", f"{at}.norm", embd)
        yield from linear(f"{to}.ssm_in", f"{mixer}.in_proj", (2 * inner, embd))
        yield from convolution(to, mixer, inner, config.integer("conv_kernel"))
        yield from linear(f"{to}.ssm_x", f"{mixer}.x_proj", (rank + 2 * state, inner))
        yield from linear(f"{to}.ssm_dt", f"{mixer}.dt_proj", (inner, rank), bias=True)
        yield tensor(f"{to}.ssm_a", f"{mixer}.A_log", (inner, state), change=negative_exponential)
        yield tensor(f"{to}.ssm_d", f"{mixer}.D", (inner,))
        yield from linear(f"{to}.ssm_out", f"{mixer}.out_proj", (embd, inner))


def backbone_tensors(config: Config) -> Iterator[TensorRule]:
    """What is outside of the layers: embedding, final norm and head."""
    embd, vocab = config.integer("hidden_size"), config.vocab_size
    yield tensor("token_embd.weight", "backbone.embeddings.weight", (vocab, embd))
    yield tensor("output_norm.weight", "backbone.norm_f.weight", (embd,))
    yield tensor("output.weight", "lm_head.weight", (vocab, embd), optional=config.flag("tie_word_embeddings"))


def convolution(to: str, mixer: str, channels: int, width: int) -> Iterator[TensorRule]:
    """A kernel for each channel, and its bias."""
    kernel = Part(f"{mixer}.conv1d.weight", (channels, 1, width))
    yield TensorRule(f"{to}.ssm_conv1d.weight", (channels, width), (kernel,))
    yield tensor(f"{to}.ssm_conv1d.bias", f"{mixer}.conv1d.bias", (channels,))


ARCHITECTURE = Architecture(
    name="mamba",
    defaults={
        "conv_kernel": 4,
        "expand": 2,
        "hidden_size": 768,
        "layer_norm_epsilon": 1e-5,
        "num_hidden_layers": 32,
        "state_size": 16,
        "tie_word_embeddings": True,
        "time_step_rank": "auto",
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 50280,
    },
    metadata=metadata,
    tensors=tensors,
)
