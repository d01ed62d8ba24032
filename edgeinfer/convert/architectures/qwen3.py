"""Qwen3: a Qwen2 without biases whose queries and keys are normed head by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    require,
)
from edgeinfer.convert.architectures.blocks import (
    as_part_of_a_model,
    attention,
    gated_ffn,
    head_norms,
    layers,
    norm,
)
from edgeinfer.convert.architectures.pooling import modules, pooling_metadata
from edgeinfer.convert.architectures.reranker import (
    LOGIT_SCORE,
    TEMPLATE,
    head_of_answers,
    is_reranker,
    reranker_metadata,
    with_answers,
)
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """With the names of a model that has a head, which one that only makes vectors does without."""
    checkpoint = with_answers(as_part_of_a_model(checkpoint))
    is_headless = bool(modules(checkpoint.config, LOGIT_SCORE)) and "lm_head.weight" not in checkpoint.tensors
    if is_reranker(checkpoint.config) or not is_headless:
        return checkpoint
    return replace(checkpoint, config=checkpoint.config.with_values({"tie_word_embeddings": True}))


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, and what is made of its outputs where that isn't text."""
    require(config, "attention_bias", False)
    outputs = reranker_metadata() if is_reranker(config) else pooling_metadata(config)
    return {**decoder_metadata(config), **outputs}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers with norms for query and key."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    yield from head_of_answers(config) if is_reranker(config) else embedding_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at)
        yield from head_norms(config, to, at)
        yield from norm(f"{to}.ffn_norm", f"{at}.post_attention_layernorm", embd)
        yield from gated_ffn(to, f"{at}.mlp", embd, ffn)


ARCHITECTURE = Architecture(
    name="qwen3",
    defaults={
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=adapted,
    templates=lambda config: {"rerank": TEMPLATE} if is_reranker(config) else {},
)
