"""Experts as DeepSeek V2 and its followers have them: routed ones in groups, and shared ones that are always on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import MAX_EXPERTS, TensorRule, impossible, tensor
from edgeinfer.convert.architectures.blocks import experts, gated_ffn
from edgeinfer.convert.config import Config

GATING = {"softmax": 1, "sigmoid": 2}
"""llama.cpp's numbers for how the router's scores become weights."""


def routed_expert_metadata(config: Config) -> dict[str, Any]:
    """The keys of routed and shared experts. Raises UnusableInputError for groups that cannot be."""
    n_experts = _n_experts(config)
    return {
        "expert_count": n_experts,
        "expert_used_count": config.integer("num_experts_per_tok", at_most=n_experts),
        **_group_metadata(config, n_experts),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts"),
        "expert_weights_scale": config.number("routed_scaling_factor"),
        "leading_dense_block_count": _n_dense_layers(config),
    }


def _n_experts(config: Config) -> int:
    return config.integer("n_routed_experts", at_most=MAX_EXPERTS)


def _n_dense_layers(config: Config) -> int:
    """The first layers, which have an ordinary feed-forward."""
    return config.integer("first_k_dense_replace", at_least=0)


def _group_metadata(config: Config, n_experts: int) -> dict[str, Any]:
    if config.get("n_group") is None or config.get("topk_group") is None:
        return {}
    n_groups, n_used = config.integer("n_group"), config.integer("topk_group")
    if n_groups > 1 and (n_experts % n_groups or n_experts // n_groups < 2 or n_used > n_groups):
        raise impossible(config, f"{n_used} of {n_groups} groups cannot be chosen from {n_experts} experts")
    if n_groups > 1 and n_used == n_groups:
        return {}  # all of them, which is to say no groups; stated so, the library ends the process
    return {"expert_group_count": n_groups, "expert_group_used_count": n_used}


def ffn_tensors(config: Config, i: int, to: str, at: str, *, has_bias: bool) -> Iterator[TensorRule]:
    """The feed-forward of layer `i`: an ordinary one, or router (`has_bias` on the choice), experts, shared experts."""
    embd, ffn, mlp = config.integer("hidden_size"), config.integer("moe_intermediate_size"), f"{at}.mlp"
    if i < _n_dense_layers(config):
        yield from gated_ffn(to, mlp, embd, config.integer("intermediate_size"))
        return
    n_experts = _n_experts(config)
    yield tensor(f"{to}.ffn_gate_inp.weight", f"{mlp}.gate.weight", (n_experts, embd))
    if has_bias:
        yield tensor(f"{to}.exp_probs_b.bias", f"{mlp}.gate.e_score_correction_bias", (n_experts,))
    yield from experts(to, mlp, n_experts, embd, ffn)
    shared_ffn = ffn * config.integer("n_shared_experts")
    yield from gated_ffn(to, f"{mlp}.shared_experts", embd, shared_ffn, suffix="_shexp")
