"""Qwen3-Next: gated delta nets and gated attention, with experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from edgeinfer.convert.architectures import delta_net, qwen_experts
from edgeinfer.convert.architectures.base import Architecture, Part, TensorRule, require, tensor
from edgeinfer.convert.architectures.transforms import some_rows
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for what llama.cpp computes in one way only: experts in every layer, weights normed."""
    require(config, "decoder_sparse_step", 1)
    require(config, "mlp_only_layers", [])
    require(config, "norm_topk_prob", True)
    return {**delta_net.metadata(config), **qwen_experts.expert_metadata(config)}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Hybrid layers with experts."""
    return delta_net.tensors(config, _linear_attention, qwen_experts.expert_tensors)


def _linear_attention(config: Config, to: str, layer: str) -> Iterator[TensorRule]:
    """A key head's rows stand together: its query, its key, its values and their gates."""
    embd, at = config.integer("hidden_size"), f"{layer}.linear_attn"
    dim, n_key, n_value = delta_net.heads(config)
    value = n_value // n_key * dim
    group = 2 * dim + 2 * value
    ends = (0, dim, 2 * dim, 2 * dim + value, group)
    query, key, values, gate = (
        Part(
            f"{at}.in_proj_qkvz.weight",
            (n_key * group, embd),
            transform=some_rows(group, first, end),
        )
        for first, end in pairwise(ends)
    )
    yield TensorRule(f"{to}.attn_qkv.weight", (n_key * 2 * dim + n_value * dim, embd), (query, key, values))
    yield TensorRule(f"{to}.attn_gate.weight", (n_value * dim, embd), (gate,))
    yield tensor(f"{to}.ssm_ba.weight", f"{at}.in_proj_ba.weight", (2 * n_value, embd))
    yield from delta_net.state_tensors(config, to, at, _as_they_are)
    yield tensor(f"{to}.ssm_out.weight", f"{at}.out_proj.weight", (embd, n_value * dim))


def _as_they_are(source: str, shape: tuple[int, ...], _rows_per_head: int, first_row: int) -> tuple[Part, ...]:
    return (Part(source, shape, first_row),)


ARCHITECTURE = Architecture(
    name="qwen3next",
    defaults={
        **delta_net.DEFAULTS,
        "decoder_sparse_step": 1,
        "experts_are_stacked": False,
        "intermediate_size": 5632,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "mtp_experts_are_stacked": False,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=qwen_experts.adapted,
)
