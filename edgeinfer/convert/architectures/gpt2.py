"""GPT-2 and DistilGPT2: learned positions, layer norms, and matrices stored with rows and columns exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    MAX_LAYERS,
    Architecture,
    Part,
    TensorRule,
    check_activation,
    impossible,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import norm
from edgeinfer.convert.architectures.transforms import transposed
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys that llama.cpp's loader wants. Raises UnusableInputError for variants of attention that it lacks."""
    check_activation(config, "activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    require(config, "scale_attn_weights", True)
    require(config, "scale_attn_by_inverse_layer_idx", False)
    embd, heads = config.integer("n_embd"), config.integer("n_head")
    if embd % heads:
        raise impossible(config, f"n_embd {embd} is not a multiple of n_head {heads}")
    return {
        "block_count": config.integer("n_layer", at_most=MAX_LAYERS),
        "context_length": config.integer("n_positions"),
        "embedding_length": embd,
        "feed_forward_length": _ffn(config),
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": config.number("layer_norm_epsilon"),
    }


def _ffn(config: Config) -> int:
    return 4 * config.integer("n_embd") if config.get("n_inner") is None else config.integer("n_inner")


def tensors(config: Config) -> Iterator[TensorRule]:
    """Pre-norm layers with query, key and value in one matrix."""
    embd, ffn, vocab = config.integer("n_embd"), _ffn(config), config.vocab_size
    yield tensor("token_embd.weight", "wte.weight", (vocab, embd))
    yield tensor("position_embd.weight", "wpe.weight", (config.integer("n_positions"), embd))
    yield from norm("output_norm", "ln_f", embd, bias=True)
    yield tensor("output.weight", "lm_head.weight", (vocab, embd), optional=config.flag("tie_word_embeddings"))
    for i in range(config.integer("n_layer", at_most=MAX_LAYERS)):
        to, at = f"blk.{i}", f"h.{i}"
        yield from norm(f"{to}.attn_norm", f"{at}.ln_1", embd, bias=True)
        yield from _conv1d(f"{to}.attn_qkv", f"{at}.attn.c_attn", 3 * embd, embd)
        yield from _conv1d(f"{to}.attn_output", f"{at}.attn.c_proj", embd, embd)
        yield from norm(f"{to}.ffn_norm", f"{at}.ln_2", embd, bias=True)
        yield from _conv1d(f"{to}.ffn_up", f"{at}.mlp.c_fc", ffn, embd)
        yield from _conv1d(f"{to}.ffn_down", f"{at}.mlp.c_proj", embd, ffn)


def _conv1d(name: str, source: str, rows: int, row_length: int) -> Iterator[TensorRule]:
    """A matrix that the checkpoint has as `(row length, rows)`, as transformers' Conv1D keeps it, and its bias."""
    part = Part(f"{source}.weight", (row_length, rows), transform=transposed(row_length))
    yield TensorRule(f"{name}.weight", (rows, row_length), (part,))
    yield tensor(f"{name}.bias", f"{source}.bias", (rows,))


ARCHITECTURE = Architecture(
    name="gpt2",
    defaults={
        "layer_norm_epsilon": 1e-5,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "vocab_size": 50257,
    },
    metadata=metadata,
    tensors=tensors,
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
