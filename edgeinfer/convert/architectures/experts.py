"""Experts as DeepSeek V2 and its followers have them: routed ones in groups, and shared ones that are always on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import TensorRule, stack, tensor
from edgeinfer.convert.config import Config

MAX_EXPERTS = 1024  # llama.cpp's LLAMA_MAX_EXPERTS
GATING = {"softmax": 1, "sigmoid": 2}
"""llama.cpp's numbers for how the router's scores become weights."""


def expert_counts(config: Config, count: str, used: str) -> tuple[int, int]:
    """How many experts there are and how many a token uses, by the names that the config has for them."""
    n_experts = config.integer(count, at_most=MAX_EXPERTS)
    return n_experts, config.integer(used, at_most=n_experts)


def routed_expert_metadata(config: Config) -> dict[str, Any]:
    """The keys of routed and shared experts. Raises UnusableInputError for groups that cannot be."""
    n_experts, n_used = expert_counts(config, "n_routed_experts", "num_experts_per_tok")
    return {
        "expert_count": n_experts,
        "expert_used_count": n_used,
        **_group_metadata(config, n_experts),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts"),
        "expert_weights_scale": config.number("routed_scaling_factor"),
        "leading_dense_block_count": n_dense_layers(config),
    }


def n_dense_layers(config: Config) -> int:
    """The first layers, which have an ordinary feed-forward."""
    return config.integer("first_k_dense_replace", at_least=0)


def _group_metadata(config: Config, n_experts: int) -> dict[str, Any]:
    if config.get("n_group") is None or config.get("topk_group") is None:
        return {}
    n_groups, n_used = config.integer("n_group"), config.integer("topk_group")
    if n_groups > 1 and (n_experts % n_groups or n_experts // n_groups < 2 or n_used > n_groups):
        raise config.impossible(f"{n_used} of {n_groups} groups cannot be chosen from {n_experts} experts")
    if n_groups > 1 and n_used == n_groups:
        return {}  # all of them, which is to say no groups; the library refuses to load it stated thus
    return {"expert_group_count": n_groups, "expert_group_used_count": n_used}


def routed_expert_tensors(config: Config, to: str, at: str, *, has_bias: bool) -> Iterator[TensorRule]:
    """Router, experts and shared experts of the layer that is `to` in the file and `at` in the checkpoint."""
    n_experts, embd = config.integer("n_routed_experts", at_most=MAX_EXPERTS), config.integer("hidden_size")
    ffn = config.integer("moe_intermediate_size")
    shared_ffn = ffn * config.integer("n_shared_experts")
    yield tensor(f"{to}.ffn_gate_inp.weight", f"{at}.mlp.gate.weight", (n_experts, embd))
    if has_bias:
        yield tensor(f"{to}.exp_probs_b.bias", f"{at}.mlp.gate.e_score_correction_bias", (n_experts,))
    for name, part, shape in _projections(embd, ffn):
        experts = [f"{at}.mlp.experts.{j}.{part}.weight" for j in range(n_experts)]
        yield stack(f"{to}.{name}_exps.weight", experts, shape)
    for name, part, shape in _projections(embd, shared_ffn):
        yield tensor(f"{to}.{name}_shexp.weight", f"{at}.mlp.shared_experts.{part}.weight", shape)


def dense_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    """The feed-forward of a layer without experts."""
    for name, part, shape in _projections(config.integer("hidden_size"), config.integer("intermediate_size")):
        yield tensor(f"{to}.{name}.weight", f"{at}.mlp.{part}.weight", shape)


def _projections(embd: int, ffn: int) -> tuple[tuple[str, str, tuple[int, int]], ...]:
    return (
        ("ffn_gate", "gate_proj", (ffn, embd)),
        ("ffn_up", "up_proj", (ffn, embd)),
        ("ffn_down", "down_proj", (embd, ffn)),
    )
