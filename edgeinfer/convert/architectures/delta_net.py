"""What Qwen3-Next and Qwen3.5 share: gated delta nets in most layers, gated attention in the others, one more layer.

A gated delta net (https://arxiv.org/abs/2412.06464) keeps a matrix for each value head, to which every token adds a
product of key and value; several value heads share a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from edgeinfer.convert.architectures.base import (
    Part,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    head_dim,
    impossible,
    n_kv_heads,
    n_layers,
    require,
    rotary_dim,
    tensor,
)
from edgeinfer.convert.architectures.blocks import head_norms, norm
from edgeinfer.convert.architectures.transforms import negative_exponential, plus_one
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config

MAX_HEADS = 4096
MAX_KERNEL = 256
DEFAULTS = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "mtp_num_hidden_layers": 0,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
Rules = Callable[[Config, str, str], Iterator[TensorRule]]


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """The layer for the prediction of one more token counts if it is there; llama.cpp knows no second one.

    Finetunes lose it, or parts of it, and their config still counts it.
    """
    tensors = {name.removeprefix("model.") if name.startswith("model.mtp.") else name: spec
               for name, spec in checkpoint.tensors.items()}  # fmt: skip
    checkpoint = replace(checkpoint, tensors=tensors)
    there = "mtp.fc.weight" in tensors and any(name.startswith("mtp.layers.0.") for name in tensors)
    left_out = r"mtp\.layers\.[1-9]" if there else r"mtp\."
    values = {"mtp_num_hidden_layers": int(there)}
    return replace(
        checkpoint.without(left_out, "for the prediction of several tokens at a time"),
        config=checkpoint.config.with_values(values),
    )


def _n_nextn(config: Config) -> int:
    return config.integer("mtp_num_hidden_layers", at_least=0, at_most=1)


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, then those of the delta nets, under the names that llama.cpp has for other states."""
    require(config, "attention_bias", False)
    key, _, n_value = heads(config)
    require(config, "linear_value_head_dim", key)
    count, more = n_layers(config), _n_nextn(config)
    recurrent = [kind == "linear_attention" for kind in _kinds(config)] + [False] * more
    return {
        **decoder_metadata(config, partial=True),
        "block_count": count + more,
        **({"nextn_predict_layers": more} if more else {}),
        "ssm.conv_kernel": kernel_length(config),
        "ssm.state_size": key,
        "ssm.group_count": config.integer("linear_num_key_heads"),
        "ssm.time_step_rank": n_value,
        "ssm.inner_size": key * n_value,
        "attention.recurrent_layers": np.array(recurrent, np.bool_),
        "full_attention_interval": config.integer("full_attention_interval"),
        "rope.dimension_count": rotary_dim(config),
    }


def kernel_length(config: Config) -> int:
    """Tokens that the convolution before a delta net sees."""
    return config.integer("linear_conv_kernel_dim", at_least=2, at_most=MAX_KERNEL)


def heads(config: Config) -> tuple[int, int, int]:
    """Elements of a head (keys and values alike), key heads, value heads."""
    dim = config.integer("linear_key_head_dim", at_most=MAX_HEADS)
    n_key = config.integer("linear_num_key_heads", at_most=MAX_HEADS)
    n_value = config.integer("linear_num_value_heads", at_most=MAX_HEADS)
    if n_value % n_key:
        raise impossible(config, f"linear_num_value_heads {n_value} is not a multiple of linear_num_key_heads {n_key}")
    return dim, n_key, n_value


def _kinds(config: Config) -> list[str]:
    """What each layer is: stated, or attention in every few layers."""
    count, every = n_layers(config), config.integer("full_attention_interval")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [("linear_attention", "full_attention")[(i + 1) % every == 0] for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise impossible(config, f"'layer_types' is not a list of {count} layers")
    if {str(kind) for kind in kinds} != {"linear_attention", "full_attention"}:
        raise impossible(config, "'layer_types' does not have both linear_attention and full_attention, and only those")
    return kinds


def tensors(config: Config, linear_attention: Rules, feed_forward: Rules) -> Iterator[TensorRule]:
    """All layers; norms are stored less 1, but those of the delta nets."""
    yield from embedding_tensors(config, norm_change=plus_one)
    for i, kind in enumerate(_kinds(config)):
        attention = linear_attention if kind == "linear_attention" else _attention_tensors
        yield from _layer_tensors(config, f"blk.{i}", f"model.layers.{i}", attention, feed_forward)
    if _n_nextn(config):
        embd, to = config.integer("hidden_size"), f"blk.{n_layers(config)}"
        yield from _layer_tensors(config, to, "mtp.layers.0", _attention_tensors, feed_forward)
        yield tensor(f"{to}.nextn.eh_proj.weight", "mtp.fc.weight", (embd, 2 * embd))
        yield from norm(f"{to}.nextn.enorm", "mtp.pre_fc_norm_embedding", embd, change=plus_one)
        yield from norm(f"{to}.nextn.hnorm", "mtp.pre_fc_norm_hidden", embd, change=plus_one)
        yield from norm(f"{to}.nextn.shared_head_norm", "mtp.norm", embd, change=plus_one)


def _layer_tensors(config: Config, to: str, at: str, attention: Rules, feed_forward: Rules) -> Iterator[TensorRule]:
    embd = config.integer("hidden_size")
    yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd, change=plus_one)
    yield from attention(config, to, at)
    yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd, change=plus_one)
    yield from feed_forward(config, to, at)


def _attention_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    """Grouped-query attention; each head's queries are followed by a gate for what it found."""
    embd, dim = config.integer("hidden_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * dim, n_kv_heads(config) * dim
    yield tensor(f"{to}.attn_q.weight", f"{at}.self_attn.q_proj.weight", (2 * q, embd))
    yield tensor(f"{to}.attn_k.weight", f"{at}.self_attn.k_proj.weight", (kv, embd))
    yield tensor(f"{to}.attn_v.weight", f"{at}.self_attn.v_proj.weight", (kv, embd))
    yield tensor(f"{to}.attn_output.weight", f"{at}.self_attn.o_proj.weight", (embd, q))
    yield from head_norms(config, to, at, change=plus_one)


def state_tensors(
    config: Config, to: str, at: str, values: Callable[[str, tuple[int, ...], int, int], tuple[Part, ...]]
) -> Iterator[TensorRule]:
    """What every delta net has but its projections; `values(source, shape, rows of a head, first row)` orders heads."""
    dim, n_key, n_value = heads(config)
    kernel, first = kernel_length(config), 2 * n_key * dim
    channels = first + n_value * dim
    source, shape = f"{at}.conv1d.weight", (channels, 1, kernel)
    parts = (Part(source, shape, n_rows=first), *values(source, shape, dim, first))
    yield TensorRule(f"{to}.ssm_conv1d.weight", (channels, kernel), parts)
    yield TensorRule(f"{to}.ssm_dt.bias", (n_value,), values(f"{at}.dt_bias", (n_value,), 1, 0))
    decays = (replace(part, change=negative_exponential) for part in values(f"{at}.A_log", (n_value,), 1, 0))
    yield TensorRule(f"{to}.ssm_a", (n_value,), tuple(decays))
    yield from norm(f"{to}.ssm_norm", f"{at}.norm", dim)
