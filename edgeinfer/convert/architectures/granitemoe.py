"""GraniteMoe: a Granite with experts, which the checkpoint has stacked, gate and up matrix in one."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.convert.architectures import granite, llama
from edgeinfer.convert.architectures.base import Architecture, ConstantRule, Part, TensorRule, tensor
from edgeinfer.convert.config import Config


def tensors(config: Config) -> Iterator[TensorRule | ConstantRule]:
    """As llama, with a router and experts."""
    ffn, count = config.integer("intermediate_size"), config.integer("num_local_experts")

    def feed_forward(to: str, at: str, embd: int) -> Iterator[TensorRule]:
        moe = f"{at}.block_sparse_moe"
        yield tensor(f"{to}.ffn_gate_inp.weight", f"{moe}.router.layer.weight", (count, embd))
        for kind, first_row in (("gate", 0), ("up", ffn)):
            halves = tuple(
                Part(f"{moe}.input_linear.weight", (count, 2 * ffn, embd), i * 2 * ffn + first_row, ffn)
                for i in range(count)
            )
            yield TensorRule(f"{to}.ffn_{kind}_exps.weight", (count, ffn, embd), halves)
        yield tensor(f"{to}.ffn_down_exps.weight", f"{moe}.output_linear.weight", (count, embd, ffn))

    return llama.interleaved_layers(config, feed_forward)


ARCHITECTURE = Architecture(
    name="granitemoe",
    defaults={**granite.DEFAULTS, "num_experts_per_tok": 2, "num_local_experts": 8},
    metadata=granite.metadata,
    tensors=tensors,
)
