"""Experts that the checkpoint has stacked already, with gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.convert.architectures.base import Part, TensorRule, impossible, tensor
from edgeinfer.convert.architectures.transforms import transposed, transposed_columns
from edgeinfer.convert.config import Config


def fused_experts(
    to: str,
    at: str,
    count: int,
    embd: int,
    ffn: int,
    names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
) -> Iterator[TensorRule]:
    """A tensor of shape `(count, 2 ffn, embd)`, the gate's rows before the others, and one for the way down."""
    gate_up, down = (f"{at}.{name}" for name in names)
    for kind, first in (("gate", 0), ("up", ffn)):
        # A part for each expert, so that nothing is read but its half.
        halves = tuple(Part(gate_up, (count, 2 * ffn, embd), i * 2 * ffn + first, ffn) for i in range(count))
        yield TensorRule(f"{to}.ffn_{kind}_exps.weight", (count, ffn, embd), halves)
    yield tensor(f"{to}.ffn_down_exps.weight", down, (count, embd, ffn))


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
