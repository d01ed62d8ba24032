"""EXAONE 3 and 3.5: a llama with names of its own, whose rope stays as transformers has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    ConstantRule,
    TensorRule,
    decoder_metadata,
    head_dim,
    n_kv_heads,
    tensor,
)
from edgeinfer.convert.architectures.blocks import layers, linear, norm
from edgeinfer.convert.architectures.llama import rope_factors
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder."""
    return {**decoder_metadata(config, rope_factors=True), "rope.dimension_count": head_dim(config)}


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """Pre-norm layers with a gated feed-forward."""
    embd, ffn, vocab = config.integer("hidden_size"), config.integer("intermediate_size"), config.vocab_size
    heads, kv_heads, dim = config.integer("num_attention_heads"), n_kv_heads(config), head_dim(config)
    yield tensor("token_embd.weight", "transformer.wte.weight", (vocab, embd))
    yield tensor("output_norm.weight", "transformer.ln_f.weight", (embd,))
    yield tensor("output.weight", "lm_head.weight", (vocab, embd), optional=config.flag("tie_word_embeddings"))
    yield from rope_factors(config)
    for to, at in layers(config, "transformer.h"):
        yield from norm(f"{to}.attn_norm", f"{at}.ln_1", embd)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield from linear(f"{to}.attn_{name}", f"{at}.attn.attention.{name}_proj", (count * dim, embd))
        yield from linear(f"{to}.attn_output", f"{at}.attn.attention.out_proj", (embd, heads * dim))
        yield from norm(f"{to}.ffn_norm", f"{at}.ln_2", embd)
        yield from linear(f"{to}.ffn_gate", f"{at}.mlp.c_fc_0", (ffn, embd))
        yield from linear(f"{to}.ffn_up", f"{at}.mlp.c_fc_1", (ffn, embd))
        yield from linear(f"{to}.ffn_down", f"{at}.mlp.c_proj", (embd, ffn))


ARCHITECTURE = Architecture(
    name="exaone",
    defaults={
        "hidden_size": 2048,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 102400,
    },
    metadata=metadata,
    tensors=tensors,
    synonyms={
        "num_layers": "num_hidden_layers",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    },
)
