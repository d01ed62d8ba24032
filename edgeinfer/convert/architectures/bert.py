"""BERT and the sentence encoders built on it: all-MiniLM, BGE, E5, GTE."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures.base import Architecture, Part, TensorRule, head_dim, n_layers, tensor
from edgeinfer.convert.architectures.pooling import pooling_metadata
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config

_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """Without the prefix that the tensors have under a head, and with today's names of a norm's vectors."""
    renamed = {_renamed(name): spec for name, spec in checkpoint.tensors.items()}
    if len(renamed) < len(checkpoint.tensors):
        raise checkpoint.config.impossible("the weights have some tensors twice, with and without a prefix")
    return replace(checkpoint, tensors=renamed)


def _renamed(name: str) -> str:
    name = re.sub(r"^(bert|roberta)\.", "", name)
    return re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda m: _OLD_NAMES[m[1]], name)


def metadata(config: Config) -> dict[str, Any]:
    """Attention in both directions, and how the outputs become one embedding."""
    config.require("hidden_act", "gelu", "gelu_new", "gelu_pytorch_tanh")
    config.require("position_embedding_type", "absolute")
    config.require("is_decoder", False, None)
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
        "tokenizer.ggml.token_type_count": config.integer("type_vocab_size"),
    }


def n_unused_positions(config: Config) -> int:
    """Position embeddings before the first token's: RoBERTa counts from after the padding token's number."""
    if config.get("model_type") != "xlm-roberta":
        return 0
    unused = 1 + config.integer("pad_token_id", at_least=0)
    if unused >= config.integer("max_position_embeddings"):
        raise config.impossible(f"'pad_token_id' {unused - 1} leaves none of the position embeddings")
    return unused


def unused(config: Config) -> Mapping[str, str]:
    """What training needed."""
    return {
        r"embeddings\.position_ids$": "",
        r"pooler\.": "a head that embeddings do without",
        r"(cls|lm_head)\.": "a head for words left out, which embeddings do without",
    }


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
    yield from _with_bias("token_embd_norm", "embeddings.LayerNorm", (embd,))
    for i in range(n_layers(config)):
        to, at = f"blk.{i}", f"encoder.layer.{i}"
        for name, source, shape in (
            ("attn_q", "attention.self.query", (embd, embd)),
            ("attn_k", "attention.self.key", (embd, embd)),
            ("attn_v", "attention.self.value", (embd, embd)),
            ("attn_output", "attention.output.dense", (embd, embd)),
            ("attn_output_norm", "attention.output.LayerNorm", (embd,)),
            ("ffn_up", "intermediate.dense", (ffn, embd)),
            ("ffn_down", "output.dense", (embd, ffn)),
            ("layer_output_norm", "output.LayerNorm", (embd,)),
        ):
            yield from _with_bias(f"{to}.{name}", f"{at}.{source}", shape)


def _with_bias(name: str, source: str, shape: tuple[int, ...]) -> Iterator[TensorRule]:
    yield tensor(f"{name}.weight", f"{source}.weight", shape)
    yield tensor(f"{name}.bias", f"{source}.bias", shape[:1])


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
    unused=unused,
)
