"""Qwen3.5 and Qwen3.6, dense, the text model: gated delta nets and gated attention, positions of three kinds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from edgeinfer.convert.architectures import delta_net
from edgeinfer.convert.architectures.base import Architecture, Part, TensorRule, rotary_dim
from edgeinfer.convert.architectures.blocks import gated_ffn
from edgeinfer.convert.architectures.mrope import sections_metadata
from edgeinfer.convert.architectures.transforms import RowTransform, some_rows
from edgeinfer.convert.config import Config

DEFAULT_SECTIONS = [11, 11, 10]


def metadata(config: Config) -> dict[str, Any]:
    """The keys of delta nets, and how the kinds of positions share the part of a head that rope turns."""
    sections = sections_metadata(config, rotary_dim(config) // 2, DEFAULT_SECTIONS, interleaved=True)
    return {**delta_net.metadata(config), **sections}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Hybrid layers with an ordinary feed-forward."""
    return delta_net.tensors(config, linear_attention, _feed_forward)


def _feed_forward(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    return gated_ffn(to, f"{at}.mlp", config.integer("hidden_size"), config.integer("intermediate_size"))


def linear_attention(config: Config, to: str, layer: str) -> Iterator[TensorRule]:
    """Value heads stand by key head; llama.cpp wants the first ones of all key heads, then all second ones, and so on.

    It repeats the key heads as a whole for them (conversion/qwen.py, _LinearAttentionVReorderBase).
    """
    embd, at = config.integer("hidden_size"), f"{layer}.linear_attn"
    dim, n_key, n_value = delta_net.heads(config)
    first, length, per_key = 2 * n_key * dim, n_value * dim, n_value // n_key
    tiled = partial(_tiled, per_key)
    qkv, shape = f"{at}.in_proj_qkv.weight", (first + length, embd)
    parts = (Part(qkv, shape, n_rows=first), *tiled(qkv, shape, dim, first))
    yield TensorRule(f"{to}.attn_qkv.weight", shape, parts)
    gate = tiled(f"{at}.in_proj_z.weight", (length, embd), dim, 0)
    yield TensorRule(f"{to}.attn_gate.weight", (length, embd), gate)
    for name, source in (("ssm_alpha", "in_proj_a"), ("ssm_beta", "in_proj_b")):
        parts = tiled(f"{at}.{source}.weight", (n_value, embd), 1, 0)
        yield TensorRule(f"{to}.{name}.weight", (n_value, embd), parts)
    yield from delta_net.state_tensors(config, to, at, tiled)
    columns = RowTransform(1, lambda rows: rows.reshape(-1, n_key, per_key, dim).swapaxes(1, 2))
    out = Part(f"{at}.out_proj.weight", (embd, length), transform=columns)
    yield TensorRule(f"{to}.ssm_out.weight", (embd, length), (out,))


def _tiled(per_key: int, source: str, shape: tuple[int, ...], rows_per_head: int, first_row: int) -> tuple[Part, ...]:
    """A part for the first value head of each key head, one for the second, …"""
    group, ends = per_key * rows_per_head, range(rows_per_head, per_key * rows_per_head + 1, rows_per_head)
    return tuple(Part(source, shape, first_row, transform=some_rows(group, end - rows_per_head, end)) for end in ends)


ARCHITECTURE = Architecture(
    name="qwen35",
    defaults={
        **delta_net.DEFAULTS,
        "intermediate_size": 12288,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=delta_net.adapted,
)
