"""Qwen3.5 and Qwen3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B), the text model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures import delta_net, qwen35, qwen_experts
from edgeinfer.convert.architectures.base import Architecture, TensorRule
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The dense model's keys and those of experts."""
    return {**qwen35.metadata(config), **qwen_experts.expert_metadata(config)}


def tensors(config: Config) -> Iterator[TensorRule]:
    """Hybrid layers with experts."""
    return delta_net.tensors(config, qwen35.linear_attention, qwen_experts.expert_tensors)


ARCHITECTURE = Architecture(
    name="qwen35moe",
    defaults={
        **delta_net.DEFAULTS,
        "experts_are_stacked": True,
        "intermediate_size": 512,  # which no layer has
        "moe_intermediate_size": 512,
        "mtp_experts_are_stacked": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=qwen_experts.adapted,
)
