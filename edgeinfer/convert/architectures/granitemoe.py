"""GraniteMoe: a Granite with experts, which the checkpoint has stacked, gate and up matrix in one; some are shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures import granite, llama
from edgeinfer.convert.architectures.base import Architecture, ConstantRule, Part, TensorRule, tensor
from edgeinfer.convert.architectures.fused_experts import fused_experts
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """As granite's, and the width of the experts that all tokens share, if there are any."""
    shared = _n_shared(config)
    return {**granite.metadata(config), **({"expert_shared_feed_forward_length": shared} if shared else {})}


def _n_shared(config: Config) -> int:
    return config.integer("shared_intermediate_size", at_least=0)


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """As llama, with a router and experts."""

    def feed_forward(to: str, at: str, embd: int) -> Iterator[TensorRule]:
        yield from expert_tensors(config, to, f"{at}.block_sparse_moe")
        if _n_shared(config):
            yield from fused_ffn(to, f"{at}.shared_mlp", embd, _n_shared(config), suffix="_shexp")

    return llama.interleaved_layers(config, feed_forward)


def expert_tensors(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    """The router and the experts that it chooses from."""
    embd, ffn, count = (config.integer(k) for k in ("hidden_size", "intermediate_size", "num_local_experts"))
    yield tensor(f"{to}.ffn_gate_inp.weight", f"{at}.router.layer.weight", (count, embd))
    yield from fused_experts(to, at, count, embd, ffn, ("input_linear.weight", "output_linear.weight"))


def fused_ffn(to: str, at: str, embd: int, ffn: int, *, suffix: str = "") -> Iterator[TensorRule]:
    """A gated feed-forward network whose gate and up matrix the checkpoint has in one."""
    for kind, first_row in (("gate", 0), ("up", ffn)):
        half = Part(f"{at}.input_linear.weight", (2 * ffn, embd), first_row, ffn)
        yield TensorRule(f"{to}.ffn_{kind}{suffix}.weight", (ffn, embd), (half,))
    yield tensor(f"{to}.ffn_down{suffix}.weight", f"{at}.output_linear.weight", (embd, ffn))


ARCHITECTURE = Architecture(
    name="granitemoe",
    defaults={**granite.DEFAULTS, "num_experts_per_tok": 2, "num_local_experts": 8, "shared_intermediate_size": 0},
    metadata=metadata,
    tensors=tensors,
)
