"""Experts as Qwen's hybrids have them: many small ones, and one that every token shares, behind a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures import delta_net
from edgeinfer.convert.architectures.base import MAX_EXPERTS, Part, TensorRule, expert_counts, tensor
from edgeinfer.convert.architectures.blocks import experts, gated_ffn
from edgeinfer.convert.architectures.fused_experts import fused_experts
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """With what the names of the experts show: whether they are stacked, in the layers and in the one after them."""
    checkpoint = delta_net.adapted(checkpoint)
    values = {_stacked(at): any(name.startswith(at) and name.endswith(".experts.gate_up_proj")
                                for name in checkpoint.tensors)
              for at in ("model.layers.", "mtp.layers.")}  # fmt: skip
    return replace(checkpoint, config=checkpoint.config.with_values(values))


def _stacked(at: str) -> str:
    return "mtp_experts_are_stacked" if at.startswith("mtp.") else "experts_are_stacked"


def expert_metadata(config: Config) -> dict[str, Any]:
    """The keys of experts."""
    return {
        **expert_counts(config),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
    }


def expert_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    """Router, experts, and the shared expert with its gate."""
    embd, count = config.integer("hidden_size"), config.integer("num_experts", at_most=MAX_EXPERTS)
    ffn, shared, mlp = config.integer("moe_intermediate_size"), "shared_expert", f"{at}.mlp"
    stacked = fused_experts if config.flag(_stacked(at)) else experts
    yield tensor(f"{to}.ffn_gate_inp.weight", f"{mlp}.gate.weight", (count, embd))
    yield from stacked(to, mlp, count, embd, ffn)
    yield TensorRule(f"{to}.ffn_gate_inp_shexp.weight", (embd,), (Part(f"{mlp}.{shared}_gate.weight", (1, embd)),))
    length = config.integer("shared_expert_intermediate_size")
    yield from gated_ffn(to, f"{mlp}.{shared}", embd, length, suffix="_shexp")
