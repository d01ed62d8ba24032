"""The pieces that decoder layers are built of, as Hugging Face and GGUF name them.

`to` is a layer's prefix in the GGUF file (`blk.3`), `at` in the checkpoint (`model.layers.3`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgeinfer.convert.architectures.base import Part, TensorRule, head_dim, n_kv_heads, n_layers, stack, tensor
from edgeinfer.convert.architectures.transforms import Elementwise, RowTransform, some_rows
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config


def as_part_of_a_model(checkpoint: Checkpoint) -> Checkpoint:
    """The names that a decoder has together with its head, for one that was saved without: `model.norm`, not `norm`."""
    if "embed_tokens.weight" not in checkpoint.tensors:
        return checkpoint
    return replace(checkpoint, tensors={f"model.{name}": spec for name, spec in checkpoint.tensors.items()})


def layers(config: Config, checkpoint_prefix: str = "model.layers") -> Iterator[tuple[str, str]]:
    """The prefixes `to` and `at` of each layer."""
    for i in range(n_layers(config)):
        yield f"blk.{i}", f"{checkpoint_prefix}.{i}"


def linear(
    name: str, source: str, shape: tuple[int, int], transform: RowTransform | None = None, *, bias: bool = False
) -> Iterator[TensorRule]:
    """A matrix of `shape` (rows, row length), and its bias."""
    yield tensor(f"{name}.weight", f"{source}.weight", shape, transform)
    if bias:
        yield tensor(f"{name}.bias", f"{source}.bias", shape[:1], transform)


def norm(
    name: str, source: str, length: int, *, change: Elementwise | None = None, bias: bool = False
) -> Iterator[TensorRule]:
    """A norm's weight, and its bias."""
    yield tensor(f"{name}.weight", f"{source}.weight", (length,), change=change)
    if bias:
        yield tensor(f"{name}.bias", f"{source}.bias", (length,))


def attention(
    config: Config,
    to: str,
    at: str,
    rotary: RowTransform | None = None,
    *,
    bias: bool = False,
    output_bias: bool = False,
) -> Iterator[TensorRule]:
    """The projections of grouped-query attention; `rotary` reorders what the rope turns."""
    embd, dim = config.integer("hidden_size"), head_dim(config)
    q, kv = config.integer("num_attention_heads") * dim, n_kv_heads(config) * dim
    yield from linear(f"{to}.attn_q", f"{at}.self_attn.q_proj", (q, embd), rotary, bias=bias)
    yield from linear(f"{to}.attn_k", f"{at}.self_attn.k_proj", (kv, embd), rotary, bias=bias)
    yield from linear(f"{to}.attn_v", f"{at}.self_attn.v_proj", (kv, embd), bias=bias)
    yield from linear(f"{to}.attn_output", f"{at}.self_attn.o_proj", (embd, q), bias=output_bias)


def head_norms(config: Config, to: str, at: str, *, change: Elementwise | None = None) -> Iterator[TensorRule]:
    """Norms over each head of query and key."""
    yield from norm(f"{to}.attn_q_norm", f"{at}.self_attn.q_norm", head_dim(config), change=change)
    yield from norm(f"{to}.attn_k_norm", f"{at}.self_attn.k_norm", head_dim(config), change=change)


def fused_qkv(name: str, source: str, shape: tuple[int, ...], head_dim: int, q_per_kv: int = 1) -> TensorRule:
    """Query, key and value in one matrix (or bias), which the checkpoint has together for each key-value head.

    There, the rows of `q_per_kv` query heads, of the key and of the value follow each other; in GGUF all queries come
    first, then all keys, then all values.
    """
    key, value, group = ((q_per_kv + i) * head_dim for i in range(3))
    spans = ((0, key), (key, value), (value, group))
    return TensorRule(name, shape, tuple(Part(source, shape, transform=some_rows(group, *span)) for span in spans))


def gated_ffn(to: str, at: str, embd: int, ffn: int, *, suffix: str = "", bias: bool = False) -> Iterator[TensorRule]:
    """A gated feed-forward network; `suffix` is `_shexp` for the expert that all tokens share."""
    yield from linear(f"{to}.ffn_gate{suffix}", f"{at}.gate_proj", (ffn, embd), bias=bias)
    yield from linear(f"{to}.ffn_up{suffix}", f"{at}.up_proj", (ffn, embd), bias=bias)
    yield from linear(f"{to}.ffn_down{suffix}", f"{at}.down_proj", (embd, ffn), bias=bias)


def experts(
    to: str,
    at: str,
    count: int,
    embd: int,
    ffn: int,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[TensorRule]:
    """The gate, up and down matrices of all experts, stacked; the checkpoint has expert `i`'s at `<at>.experts.<i>`."""
    shapes = {"gate": (ffn, embd), "up": (ffn, embd), "down": (embd, ffn)}
    for (kind, shape), projection in zip(shapes.items(), projections, strict=True):
        sources = [f"{at}.experts.{i}.{projection}.weight" for i in range(count)]
        yield stack(f"{to}.ffn_{kind}_exps.weight", sources, shape)
