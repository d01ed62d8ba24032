"""Falcon-H1: attention and a Mamba 2 mixer side by side in every layer, and multipliers, which go into the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    decoder_metadata,
    head_dim,
    impossible,
    n_kv_heads,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import layers, norm
from edgeinfer.convert.architectures.mamba2 import Mixer, mixer, mixer_tensors
from edgeinfer.convert.architectures.transforms import scaled
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for variants that llama.cpp lacks."""
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        require(config, key, None, False)
    require(config, "mamba_conv_bias", True)
    if config.flag("mamba_rms_norm"):
        require(config, "mamba_norm_before_gate", False)
    if config.rope.get("rope_type") != "default":
        raise impossible(config, "has a rope scaling, this architecture is known without")
    return {
        **decoder_metadata(config),
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
        "vocab_size": config.vocab_size,
        **_mixer(config).metadata(),
    }


def _mixer(config: Config) -> Mixer:
    inner = None if config.get("mamba_d_ssm") is None else config.integer("mamba_d_ssm")
    return mixer(config, prefix="mamba_", inner=inner)


def tensors(config: Config) -> Iterator[TensorRule]:
    """Both see the same normed input, and what they make of it is added."""
    embd, into = config.integer("hidden_size"), config.number("ssm_in_multiplier")
    sections = tuple(scaled(into, factor) for factor in _numbers(config, "ssm_multipliers", 5))
    out = scaled(config.number("ssm_out_multiplier"))
    yield from _outer_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from _attention(config, to, f"{at}.self_attn")
        yield from mixer_tensors(
            _mixer(config), to, f"{at}.mamba", has_norm=config.flag("mamba_rms_norm"), into=sections, out=out
        )
        yield tensor(f"{to}.ffn_norm", f"{at}.pre_ff_layernorm.weight", (embd,))  # without `.weight`, says the loader
        yield from _feed_forward(config, to, f"{at}.feed_forward")


def _outer_tensors(config: Config) -> Iterator[TensorRule]:
    embd, vocab = config.integer("hidden_size"), config.vocab_size
    embedding, head = config.number("embedding_multiplier"), config.number("lm_head_multiplier")
    table, matrix = "model.embed_tokens.weight", (vocab, embd)
    yield tensor("token_embd.weight", table, matrix, change=scaled(embedding))
    yield from norm("output_norm", "model.final_layernorm", embd)
    if not config.flag("tie_word_embeddings"):
        yield tensor("output.weight", "lm_head.weight", matrix, change=scaled(head))
    elif head != embedding:  # one table cannot have both
        yield TensorRule("output.weight", matrix, (Part(table, matrix, change=scaled(head)),))


def _attention(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, dim = config.integer("hidden_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * dim, n_kv_heads(config) * dim
    into = config.number("attention_in_multiplier")
    key = scaled(config.number("key_multiplier"), into)
    out = scaled(config.number("attention_out_multiplier"))
    yield tensor(f"{to}.attn_q.weight", f"{at}.q_proj.weight", (q, embd), change=scaled(into))
    yield tensor(f"{to}.attn_k.weight", f"{at}.k_proj.weight", (kv, embd), change=key)
    yield tensor(f"{to}.attn_v.weight", f"{at}.v_proj.weight", (kv, embd), change=scaled(into))
    yield tensor(f"{to}.attn_output.weight", f"{at}.o_proj.weight", (embd, q), change=out)


def _feed_forward(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    gate, down = _numbers(config, "mlp_multipliers", 2)
    yield tensor(f"{to}.ffn_gate.weight", f"{at}.gate_proj.weight", (ffn, embd), change=scaled(gate))
    yield tensor(f"{to}.ffn_up.weight", f"{at}.up_proj.weight", (ffn, embd))
    yield tensor(f"{to}.ffn_down.weight", f"{at}.down_proj.weight", (embd, ffn), change=scaled(down))


def _numbers(config: Config, key: str, count: int) -> list[float]:
    values = config.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise impossible(config, f"{key!r} is not a list of {count} numbers")
    if not all(type(value) in (int, float) and 0 < value < 1e30 for value in values):
        raise impossible(config, f"{key!r} has something else than positive numbers")
    return [float(value) for value in values]


ARCHITECTURE = Architecture(
    name="falcon-h1",
    defaults={
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_ssm": 1024,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "max_position_embeddings": 8192,
        "mlp_multipliers": [1.0, 1.0],
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "ssm_out_multiplier": 1.0,
        "tie_word_embeddings": False,
        "vocab_size": 128000,
    },
    metadata=metadata,
    tensors=tensors,
)
