"""Experts that the checkpoint has stacked already, with gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.convert.architectures.base import (
    Part,
    TensorRule,
    impossible,
    tensor,
    transposed,
    transposed_columns,
)
from edgeinfer.convert.architectures.blocks import some_blocks
from edgeinfer.convert.config import Config


def fused_experts(to: str, at: str, count: int, embd: int, ffn: int) -> Iterator[TensorRule]:
    """`gate_up_proj` of shape `(count, 2 ffn, embd)`, the gate's rows before the others, and `down_proj`."""
    for i, kind in enumerate(("gate", "up")):
        part = Part(f"{at}.experts.gate_up_proj", (count, 2 * ffn, embd), transform=some_blocks(2, ffn, i, i + 1))
        yield TensorRule(f"{to}.ffn_{kind}_exps.weight", (count, ffn, embd), (part,))
    yield tensor(f"{to}.ffn_down_exps.weight", f"{at}.experts.down_proj", (count, embd, ffn))


def fused_transposed_experts(config: Config, to: str, at: str, count: int, ffn: int) -> Iterator[TensorRule]:
    """The same, but every matrix is stored the other way round: `gate_up_proj` has the shape `(count, embd, 2 ffn)`."""
    embd = config.integer("hidden_size")
    if embd % 2:
        raise impossible(config, f"experts with matrices of {embd} rows, an odd number")
    for kind, columns in (("gate", slice(ffn)), ("up", slice(ffn, None))):
        part = Part(f"{at}.experts.gate_up_proj", (count, embd, 2 * ffn), transform=transposed_columns(embd, columns))
        yield TensorRule(f"{to}.ffn_{kind}_exps.weight", (count, ffn, embd), (part,))
    down = Part(f"{at}.experts.down_proj", (count, ffn, embd), transform=transposed(ffn))
    yield TensorRule(f"{to}.ffn_down_exps.weight", (count, embd, ffn), (down,))
