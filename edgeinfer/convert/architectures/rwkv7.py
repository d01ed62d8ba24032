"""RWKV-7, as flash-linear-attention saves it: a state that each token decays and corrects, and no attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    check_activation,
    impossible,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import layers, linear, norm
from edgeinfer.convert.architectures.mamba import RECURRENT_CONTEXT
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config

_RANKS = {
    "w": ("decay_low_rank_dim", "attention.decay_lora_rank"),
    "a": ("a_low_rank_dim", "attention.iclr_lora_rank"),
    "v": ("v_low_rank_dim", "attention.value_residual_mix_lora_rank"),
    "g": ("gate_low_rank_dim", "attention.gate_lora_rank"),
}
_GROUP_NORM_EPS = 64e-5
"""Of the norm over each head: llama.cpp knows no other (src/models/rwkv7-base.cpp)."""
_LERPS = "rwkvag"  # in the order of llama.cpp's fused tensor
_FUSED = "has fused lerps"  # no key of theirs: the first checkpoints had them in one tensor


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """What tensors show: the ranks that a config leaves open, for there were several ways to compute them."""
    config = checkpoint.config
    ranks: dict[str, Any] = {_FUSED: "model.layers.0.attn.x_x" in checkpoint.tensors}
    for letter, (key, _) in _RANKS.items():
        weight = checkpoint.tensors.get(f"model.layers.{1 if letter == 'v' else 0}.attn.{letter}_lora.lora.0.weight")
        if weight is not None and weight.shape and config.get(key) is None:
            ranks[key] = weight.shape[0]
    return replace(checkpoint, config=config.with_values(ranks))


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for variants that llama.cpp lacks."""
    check_activation(config, "hidden_act", "sqrelu")
    require(config, "norm_first", True)
    require(config, "norm_bias", True)
    require(config, "attn", None)
    require(config, "tie_word_embeddings", False)
    embd, head, epsilon = config.integer("hidden_size"), config.integer("head_dim"), config.number("norm_eps")
    if embd % head:
        raise impossible(config, f"hidden_size {embd} is not a multiple of head_dim {head}")
    if abs(head * epsilon - _GROUP_NORM_EPS) > 1e-9:
        raise impossible(config, f"'norm_eps' {epsilon:g} times 'head_dim' {head} is not {_GROUP_NORM_EPS:g}")
    return {
        "context_length": RECURRENT_CONTEXT,
        "embedding_length": embd,
        "block_count": n_layers(config),
        "attention.layer_norm_epsilon": epsilon,
        "wkv.head_size": head,
        **{gguf_key: config.integer(key) for key, gguf_key in _RANKS.values()},
        "feed_forward_length": _n_ffn(config),
        "attention.head_count": 0,
    }


def _n_ffn(config: Config) -> int:
    stated = config.get("intermediate_size")
    return 4 * config.integer("hidden_size") if stated is None else config.integer("intermediate_size")


def tensors(config: Config) -> Iterator[TensorRule]:
    """A time mix and a channel mix in each layer; the first has a norm more, over the embedding."""
    embd, ffn, vocab = config.integer("hidden_size"), _n_ffn(config), config.vocab_size
    yield tensor("token_embd.weight", "model.embeddings.weight", (vocab, embd))
    yield from norm("token_embd_norm", "model.layers.0.pre_norm", embd, bias=True)
    yield from norm("output_norm", "model.norm", embd, bias=True)
    yield tensor("output.weight", "lm_head.weight", (vocab, embd))
    for i, (to, at) in enumerate(layers(config)):
        yield from norm(f"{to}.attn_norm", f"{at}.attn_norm", embd, bias=True)
        yield from _time_mix(config, to, f"{at}.attn", is_first=i == 0)
        yield from norm(f"{to}.attn_norm_2", f"{at}.ffn_norm", embd, bias=True)
        yield tensor(f"{to}.channel_mix_lerp_k.weight", f"{at}.ffn.x_k", (embd,))
        yield from linear(f"{to}.channel_mix_key", f"{at}.ffn.key", (ffn, embd))
        yield from linear(f"{to}.channel_mix_value", f"{at}.ffn.value", (embd, ffn))


def _time_mix(config: Config, to: str, at: str, *, is_first: bool) -> Iterator[TensorRule]:
    embd, head = config.integer("hidden_size"), config.integer("head_dim")
    lerps = tuple(Part(f"{at}.x_{letter}", (1, 1, embd)) for letter in _LERPS)
    if config.flag(_FUSED):
        lerps = (Part(f"{at}.x_x", (len(_LERPS), embd)),)
    yield TensorRule(f"{to}.time_mix_lerp_fused.weight", (len(_LERPS), 1, 1, embd), lerps)
    for name in ("k_k", "k_a"):
        yield tensor(f"{to}.time_mix_{name}.weight", f"{at}.{name}", (embd,))
    yield TensorRule(f"{to}.time_mix_r_k.weight", (embd,), (Part(f"{at}.r_k", (embd // head, head)),))
    for name, source in (("receptance", "r"), ("key", "k"), ("value", "v"), ("output", "o")):
        yield from linear(f"{to}.time_mix_{name}", f"{at}.{source}_proj", (embd, embd))
    for letter in "wavg":
        # The first layer has no other values to mix in: the loader wants something in the place of it all the same.
        source = "a" if is_first and letter == "v" else letter
        yield from _low_rank(config, f"{to}.time_mix_{letter}", f"{at}.{source}_lora.lora", source)
    yield from norm(f"{to}.time_mix_ln", f"{at}.g_norm", embd, bias=True)


def _low_rank(config: Config, to: str, at: str, letter: str) -> Iterator[TensorRule]:
    """Two matrices, and what is added to their product; nothing is to the gate's."""
    embd, rank = config.integer("hidden_size"), config.integer(_RANKS[letter][0])
    if letter != "g":
        yield tensor(f"{to}0.weight", f"{at}.2.bias", (embd,))
    yield tensor(f"{to}1.weight", f"{at}.0.weight", (rank, embd))
    yield tensor(f"{to}2.weight", f"{at}.2.weight", (embd, rank))


ARCHITECTURE = Architecture(
    name="rwkv7",
    defaults={
        "head_dim": 64,
        "hidden_size": 2048,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "norm_first": True,
        "num_hidden_layers": 24,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=adapted,
)
