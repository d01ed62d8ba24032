"""Layers for the prediction of further tokens, as DeepSeek V3 and its followers have them after the last one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgeinfer.convert.architectures.base import TensorRule, n_layers, tensor
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config

MAX_NEXTN = 8


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """As many layers for further tokens as there are: finetunes lose them, or parts, and their config counts on."""
    first, stated, there = n_layers(checkpoint.config), n_nextn(checkpoint.config), 0
    while there < MAX_NEXTN and f"model.layers.{first + there}.eh_proj.weight" in checkpoint.tensors:
        there += 1
    config = checkpoint.config.with_values({"num_nextn_predict_layers": there})
    parts = "|".join(str(layer) for layer in range(first + there, first + stated)) or "none"
    left = checkpoint.without(rf"model\.layers\.({parts})\.", "parts of a layer for the prediction of further tokens")
    return replace(left, config=config)


def n_nextn(config: Config) -> int:
    """How many there are."""
    return config.integer("num_nextn_predict_layers", at_least=0, at_most=MAX_NEXTN)


def nextn_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    """What such a layer has besides those of every layer."""
    embd, vocab = config.integer("hidden_size"), config.vocab_size
    for name, source, shape, optional in (
        ("eh_proj", "eh_proj", (embd, 2 * embd), False),
        ("enorm", "enorm", (embd,), False),
        ("hnorm", "hnorm", (embd,), False),
        ("embed_tokens", "embed_tokens", (vocab, embd), True),
        ("shared_head_head", "shared_head.head", (vocab, embd), True),
        ("shared_head_norm", "shared_head.norm", (embd,), True),
    ):
        yield tensor(f"{to}.nextn.{name}.weight", f"{at}.{source}.weight", shape, optional=optional)
