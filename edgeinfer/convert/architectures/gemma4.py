"""Gemma 4: layers with a window and without, whose heads differ in length and number; keys that are values too;
experts beside an ordinary feed-forward; an embedding of the token for every layer. Each is there in some models only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgeinfer.convert.architectures.base import (
    MAX_EXPERTS,
    Architecture,
    ConstantRule,
    TensorRule,
    check_activation,
    embedding_tensors,
    head_dim,
    impossible,
    n_kv_heads,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import gated_ffn, norm
from edgeinfer.convert.architectures.gemma3n import embedding_per_layer
from edgeinfer.convert.architectures.windows import has_window, window_metadata
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config

_FULL_EVERY = 6
_MAX_WIDTH = 2**30 - 1
"""Of a feed-forward, of which some layers have twice as much."""
_NEVER_TURNED = 1e30
"""A divisor of a frequency: what is turned by so little stays as it is."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """What differs between layers."""

    is_windowed: bool
    has_cache: bool
    """Otherwise it looks into that of an earlier layer, and has no keys and values."""
    head_dim: int
    n_kv_heads: int
    n_ffn: int


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """What the config says of the layers without a window, which transformers now lists for each of them."""
    config = checkpoint.config
    listed = config.get("per_layer_config")
    if listed is None:
        kv_heads = config.get("num_global_key_value_heads") if config.flag("attention_k_eq_v") else None
        return replace(checkpoint, config=config.with_values({"num_global_key_value_heads": kv_heads}))
    full = {str(i) for i, windowed in enumerate(_windows(config)) if not windowed}
    same = next(iter(listed.values()), None) if isinstance(listed, dict) else None
    if not isinstance(same, dict) or set(listed) != full or any(value != same for value in listed.values()):
        raise impossible(config, "'per_layer_config' is not one for all layers without a window, and for no others")
    values = {"global_head_dim": same.get("head_dim"), "num_global_key_value_heads": same.get("num_key_value_heads")}
    return replace(checkpoint, config=config.with_values(values))


def _windows(config: Config) -> list[bool]:
    windowed = has_window(config, full_every=_FULL_EVERY)
    if windowed[-1]:
        raise impossible(config, "the last layer has a window, which no Gemma 4 has")
    return windowed


def _layers(config: Config) -> list[_Layer]:
    """Raises UnusableInputError for caches that llama.cpp would share differently."""
    windowed, shared = _windows(config), config.integer("num_kv_shared_layers", at_least=0)
    with_cache = n_layers(config) - shared
    if shared and windowed[max(0, with_cache - 2) : max(0, with_cache)] != [True, False]:
        raise impossible(config, f"{shared} layers share the caches of the two before, which are not of either kind")
    of_full = {"head_dim": config.get("global_head_dim")}
    if config.get("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = config.get("num_global_key_value_heads")
    full, ffn = config.with_values(of_full), config.integer("intermediate_size", at_most=_MAX_WIDTH)
    shapes = {True: (head_dim(config), n_kv_heads(config)), False: (head_dim(full), n_kv_heads(full))}
    is_wider = config.flag("use_double_wide_mlp")
    return [
        _Layer(kind, i < with_cache, *shapes[kind], ffn * (2 if is_wider and i >= with_cache else 1))
        for i, kind in enumerate(windowed)
    ]


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for what llama.cpp computes in one way only."""
    check_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    require(config, "attention_bias", False)
    require(config, "use_bidirectional_attention", None, "vision")  # which concerns images only
    layers = _layers(config)
    full, windowed = layers[-1], next((layer for layer in layers if layer.is_windowed), layers[-1])
    soft_cap = config.get("final_logit_softcapping")
    ffn, kv_heads = ([getattr(layer, name) for layer in layers] for name in ("n_ffn", "n_kv_heads"))
    has_kinds = config.get("num_global_key_value_heads") is not None
    return {
        "block_count": len(layers),
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": np.array(ffn, np.int32) if config.flag("use_double_wide_mlp") else ffn[0],
        "attention.head_count": config.integer("num_attention_heads"),
        "attention.head_count_kv": np.array(kv_heads, np.int32) if has_kinds else kv_heads[0],
        **_rope_metadata(config),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": windowed.head_dim,
        "attention.value_length_swa": windowed.head_dim,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": windowed.head_dim,
        # Left out, the library caps at 30.
        "final_logit_softcapping": 0.0 if soft_cap is None else config.number("final_logit_softcapping"),
        **window_metadata(config, full_every=_FULL_EVERY),
        "attention.shared_kv_layers": sum(not layer.has_cache for layer in layers),
        "embedding_length_per_layer_input": _n_per_layer(config),
        **(_expert_metadata(config) if config.flag("enable_moe_block") else {}),
    }


def _rope_metadata(config: Config) -> dict[str, Any]:
    full, windowed = config.rope, config.window_rope
    if full.get("rope_type") != "proportional" or full.get("factor") not in (None, 1):
        raise impossible(config, "the rope of layers without a window is not the proportional one, unscaled")
    if windowed.get("rope_type") not in (None, "default") or windowed.get("partial_rotary_factor") not in (None, 1):
        raise impossible(config, "the rope of layers with a window is not the plain one")
    return {"rope.freq_base": full.number("rope_theta"), "rope.freq_base_swa": windowed.number("rope_theta")}


def _expert_metadata(config: Config) -> dict[str, Any]:
    count = config.integer("num_experts", at_most=MAX_EXPERTS)
    return {
        "expert_count": count,
        "expert_used_count": config.integer("top_k_experts", at_most=count),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
    }


def _n_per_layer(config: Config) -> int:
    """How long the embedding for one layer is; 0 where there is none."""
    return config.integer("hidden_size_per_layer_input", at_least=0)


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """Norms multiply by their weights here, unlike in Gemma 1 to 3."""
    embd, per_layer, layers = config.integer("hidden_size"), _n_per_layer(config), _layers(config)
    yield from embedding_tensors(config)
    yield ConstantRule("rope_freqs.weight", _rope_divisors(config, layers[-1].head_dim))
    if per_layer:
        side = per_layer * len(layers)
        yield embedding_per_layer(config, side)
        yield tensor("per_layer_model_proj.weight", "model.per_layer_model_projection.weight", (side, embd))
        yield from norm("per_layer_proj_norm", "model.per_layer_projection_norm", per_layer)
    for i, layer in enumerate(layers):
        to, at = f"blk.{i}", f"model.layers.{i}"
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from _attention(config, layer, to, at)
        yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd)
        yield from norm(f"{to}.ffn_norm", f"{at}.pre_feedforward_layernorm", embd)
        yield from gated_ffn(to, f"{at}.mlp", embd, layer.n_ffn)
        yield from norm(f"{to}.post_ffw_norm", f"{at}.post_feedforward_layernorm", embd)
        if config.flag("enable_moe_block"):
            yield from _experts(config, to, at)
        if per_layer:
            yield tensor(f"{to}.inp_gate.weight", f"{at}.per_layer_input_gate.weight", (per_layer, embd))
            yield tensor(f"{to}.proj.weight", f"{at}.per_layer_projection.weight", (embd, per_layer))
            yield from norm(f"{to}.post_norm", f"{at}.post_per_layer_input_norm", embd)
        yield tensor(f"{to}.layer_output_scale.weight", f"{at}.layer_scalar", (1,))


def _rope_divisors(config: Config, dim: int) -> Any:
    """Of the pairs of a head, some of the fastest turn; llama.cpp turns the others too, but by next to nothing."""
    part = config.rope.get("partial_rotary_factor")
    turned = dim // 2 if part is None else int(dim * config.rope.number("partial_rotary_factor") / 2)
    if turned > dim // 2:
        raise impossible(config, f"'partial_rotary_factor' {part} turns more than there is")
    return np.array([1.0] * turned + [_NEVER_TURNED] * (dim // 2 - turned), np.float32)


def _attention(config: Config, layer: _Layer, to: str, at: str) -> Iterator[TensorRule]:
    embd, dim = config.integer("hidden_size"), layer.head_dim
    q, kv, own = config.integer("num_attention_heads") * dim, layer.n_kv_heads * dim, layer.has_cache
    yield tensor(f"{to}.attn_q.weight", f"{at}.self_attn.q_proj.weight", (q, embd))
    yield from norm(f"{to}.attn_q_norm", f"{at}.self_attn.q_norm", dim)
    # Some checkpoints have them for layers that share another's, too.
    yield tensor(f"{to}.attn_k.weight", f"{at}.self_attn.k_proj.weight", (kv, embd), optional=not own)
    yield tensor(f"{to}.attn_k_norm.weight", f"{at}.self_attn.k_norm.weight", (dim,), optional=not own)
    if layer.is_windowed or not config.flag("attention_k_eq_v"):
        yield tensor(f"{to}.attn_v.weight", f"{at}.self_attn.v_proj.weight", (kv, embd), optional=not own)
    yield tensor(f"{to}.attn_output.weight", f"{at}.self_attn.o_proj.weight", (embd, q))


def _experts(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, count = config.integer("hidden_size"), config.integer("num_experts")
    ffn = config.integer("moe_intermediate_size")
    yield tensor(f"{to}.ffn_gate_inp.weight", f"{at}.router.proj.weight", (count, embd))
    yield tensor(f"{to}.ffn_gate_inp.scale", f"{at}.router.scale", (embd,))
    yield tensor(f"{to}.ffn_gate_up_exps.weight", f"{at}.experts.gate_up_proj", (count, 2 * ffn, embd))
    yield tensor(f"{to}.ffn_down_exps.weight", f"{at}.experts.down_proj", (count, embd, ffn))
    yield tensor(f"{to}.ffn_down_exps.scale", f"{at}.router.per_expert_scale", (count,))
    yield from norm(f"{to}.post_ffw_norm_1", f"{at}.post_feedforward_layernorm_1", embd)
    yield from norm(f"{to}.pre_ffw_norm_2", f"{at}.pre_feedforward_layernorm_2", embd)
    yield from norm(f"{to}.post_ffw_norm_2", f"{at}.post_feedforward_layernorm_2", embd)


ARCHITECTURE = Architecture(
    name="gemma4",
    defaults={
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 2304,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=adapted,
)
