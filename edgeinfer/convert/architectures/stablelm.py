"""StableLM 3B and StableLM 2: layer norms, a rope over a part of each head, in the 12B a norm of each head's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    attention_metadata,
    check_activation,
    head_dim,
    n_kv_heads,
    require,
    rotary_dim,
    stack,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, layers, norm
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every rotary decoder, and whether attention and feed-forward have the same input."""
    check_activation(config, "hidden_act", "silu", "swish")
    require(config, "tie_word_embeddings", False)
    require(config, "head_dim", None)
    return {
        **attention_metadata(config, partial=True),
        "rope.dimension_count": rotary_dim(config),
        "use_parallel_residual": config.flag("use_parallel_residual"),
        "attention.layer_norm_epsilon": config.number("layer_norm_eps"),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """llama.cpp tells layers with attention beside feed-forward by their having one norm only."""
    embd, ffn, vocab = config.integer("hidden_size"), config.integer("intermediate_size"), config.vocab_size
    yield tensor("token_embd.weight", "model.embed_tokens.weight", (vocab, embd))
    yield from norm("output_norm", "model.norm", embd, bias=True)
    yield tensor("output.weight", "lm_head.weight", (vocab, embd))
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd, bias=True)
        yield from attention(config, to, at, bias=config.flag("use_qkv_bias"))
        if config.flag("qk_layernorm"):
            heads, kv_heads = config.integer("num_attention_heads"), n_kv_heads(config)
            yield _norms_of_heads(config, f"{to}.attn_q_norm", f"{at}.self_attn.q_layernorm", heads)
            yield _norms_of_heads(config, f"{to}.attn_k_norm", f"{at}.self_attn.k_layernorm", kv_heads)
        if not config.flag("use_parallel_residual"):
            yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd, bias=True)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)


def _norms_of_heads(config: Config, name: str, source: str, count: int) -> TensorRule:
    return stack(f"{name}.weight", [f"{source}.norms.{i}.weight" for i in range(count)], (head_dim(config),))


ARCHITECTURE = Architecture(
    name="stablelm",
    defaults={
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_parallel_residual": False,
        "vocab_size": 50304,
    },
    metadata=metadata,
    tensors=tensors,
)
