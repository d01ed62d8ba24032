"""BERT and the sentence encoders built on it: all-MiniLM, BGE, E5, GTE."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    check_activation,
    head_dim,
    impossible,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import layers, linear, norm
from edgeinfer.convert.architectures.pooling import pooling_metadata
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config

_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """Without heads and the prefix that they bring, and with today's names of a norm's vectors."""
    renamed = {_renamed(name): spec for name, spec in checkpoint.tensors.items()}
    if len(renamed) < len(checkpoint.tensors):
        raise impossible(checkpoint.config, "the weights have some tensors twice, with and without a prefix")
    return (
        replace(checkpoint, tensors=renamed)
        .without(r"embeddings\.position_ids$", "")
        .without(r"(pooler|cls|lm_head)\.", "a head that embeddings do without")
    )


def _renamed(name: str) -> str:
    name = re.sub(r"^(bert|roberta)\.", "", name)
    return re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda m: _OLD_NAMES[m[1]], name)


def metadata(config: Config) -> dict[str, Any]:
    """Attention in both directions, and how the outputs become one embedding."""
    check_activation(config, "hidden_act", "gelu", "gelu_new", "gelu_pytorch_tanh")
    require(config, "position_embedding_type", "absolute")
    require(config, "is_decoder", False, None)
    head_dim(config)  # refuses heads that don't share out the hidden size
    return {
        "block_count": n_layers(config),
        "context_length": config.integer("max_position_embeddings") - n_unused_positions(config),
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": config.integer("intermediate_size"),
        "attention.head_count": config.integer("num_attention_heads"),
        "attention.layer_norm_epsilon": config.number("layer_norm_eps"),
        "attention.causal": False,
        **pooling_metadata(config),
    }


def n_unused_positions(config: Config) -> int:
    """Position embeddings before the first token's: RoBERTa counts from after the padding token's number."""
    if config.get("model_type") != "xlm-roberta":
        return 0
    unused = 1 + config.integer("pad_token_id", at_least=0)
    if unused >= config.integer("max_position_embeddings"):
        raise impossible(config, f"'pad_token_id' {unused - 1} leaves none of the position embeddings")
    return unused


def tensors(config: Config) -> Iterator[TensorRule]:
    """Norms after attention and feed-forward, biases everywhere."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    positions, first = config.integer("max_position_embeddings"), n_unused_positions(config)
    yield tensor("token_embd.weight", "embeddings.word_embeddings.weight", (config.vocab_size, embd))
    yield TensorRule(
        "position_embd.weight",
        (positions - first, embd),
        (Part("embeddings.position_embeddings.weight", (positions, embd), first_row=first),),
    )
    types = (config.integer("type_vocab_size"), embd)
    yield tensor("token_types.weight", "embeddings.token_type_embeddings.weight", types)
    yield from norm("token_embd_norm", "embeddings.LayerNorm", embd, bias=True)
    for to, at in layers(config, "encoder.layer"):
        for name, source, shape in (
            ("attn_q", "attention.self.query", (embd, embd)),
            ("attn_k", "attention.self.key", (embd, embd)),
            ("attn_v", "attention.self.value", (embd, embd)),
            ("attn_output", "attention.output.dense", (embd, embd)),
            ("ffn_up", "intermediate.dense", (ffn, embd)),
            ("ffn_down", "output.dense", (embd, ffn)),
        ):
            yield from linear(f"{to}.{name}", f"{at}.{source}", shape, bias=True)
        yield from norm(f"{to}.attn_output_norm", f"{at}.attention.output.LayerNorm", embd, bias=True)
        yield from norm(f"{to}.layer_output_norm", f"{at}.output.LayerNorm", embd, bias=True)


ARCHITECTURE = Architecture(
    name="bert",
    defaults={
        "hidden_act": "gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": 30522,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=adapted,
)
