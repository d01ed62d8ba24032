"""gpt-oss: experts in MXFP4 or in floats, attention sinks, biases everywhere, a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures.base import (
    MAX_EXPERTS,
    Architecture,
    Part,
    TensorRule,
    decoder_metadata,
    embedding_tensors,
    expert_counts,
    impossible,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, layers, linear, norm
from edgeinfer.convert.architectures.transforms import some_rows, transposed, transposed_columns
from edgeinfer.convert.config import Config


def metadata(config: Config) -> dict[str, Any]:
    """The keys of every decoder, then window and experts. llama.cpp has the window's layers and limits built in."""
    require(config, "swiglu_limit", 7.0, None)
    kinds = [("full_attention", "sliding_attention")[i % 2 == 0] for i in range(n_layers(config))]
    if config.get("layer_types") not in (None, kinds):
        raise impossible(config, "'layer_types' does not begin with a sliding window in every other layer")
    return {
        **decoder_metadata(config),
        "attention.sliding_window": config.integer("sliding_window"),
        **expert_counts(config),
        "expert_feed_forward_length": config.integer("intermediate_size"),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """Biases on every projection, of the experts too."""
    embd, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    n_experts = config.integer("num_local_experts", at_most=MAX_EXPERTS)
    yield from embedding_tensors(config)
    for to, at in layers(config):
        yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
        yield from attention(config, to, at, bias=True, output_bias=True)
        yield tensor(f"{to}.attn_sinks.weight", f"{at}.self_attn.sinks", (heads,))
        yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd)
        yield from linear(f"{to}.ffn_gate_inp", f"{at}.mlp.router", (n_experts, embd), bias=True)
        yield from _expert_tensors(config, n_experts, to, f"{at}.mlp.experts")


def _expert_tensors(config: Config, n_experts: int, to: str, at: str) -> Iterator[TensorRule]:
    """Gate and up are rows in turn of one matrix, and so are their biases' elements."""
    embd, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    experts = _packed_experts if config.quantization_method == "mxfp4" else _float_experts
    for first, name in enumerate(("ffn_gate_exps", "ffn_up_exps")):
        yield experts(config, f"{to}.{name}.weight", f"{at}.gate_up_proj", (n_experts, 2 * ffn, embd), first)
        bias = Part(
            f"{at}.gate_up_proj_bias", (n_experts, 2 * ffn), row_length=1, transform=some_rows(2, first, first + 1)
        )
        yield TensorRule(f"{to}.{name}.bias", (n_experts, ffn), (bias,))
    yield experts(config, f"{to}.ffn_down_exps.weight", f"{at}.down_proj", (n_experts, embd, ffn))
    yield tensor(f"{to}.ffn_down_exps.bias", f"{at}.down_proj_bias", (n_experts, embd))


def _packed_experts(
    config: Config, name: str, source: str, shape: tuple[int, int, int], first: int | None = None
) -> TensorRule:
    """All rows of a stack of matrices, or every other one from `first` on, as checkpoints in MXFP4 have them."""
    n_experts, n_rows, row_length = shape
    part = Part(source, shape, transform=None if first is None else some_rows(2, first, first + 1))
    return TensorRule(name, (n_experts, n_rows if first is None else n_rows // 2, row_length), (part,))


def _float_experts(
    config: Config, name: str, source: str, shape: tuple[int, int, int], first: int | None = None
) -> TensorRule:
    """The same of floats, whose matrices are stored the other way round."""
    n_experts, n_rows, row_length = shape
    if row_length % 2:
        raise impossible(config, f"experts with rows of {row_length} elements, an odd number")
    transform = transposed(row_length) if first is None else transposed_columns(row_length, slice(first, None, 2))
    part = Part(source, (n_experts, row_length, n_rows), transform=transform)
    return TensorRule(name, (n_experts, n_rows if first is None else n_rows // 2, row_length), (part,))


ARCHITECTURE = Architecture(
    name="gpt-oss",
    defaults={
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    metadata=metadata,
    tensors=tensors,
)
