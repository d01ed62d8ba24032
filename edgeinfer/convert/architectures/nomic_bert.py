"""Nomic-BERT (nomic-embed-text v1 and v1.5): rotary positions, a gated feed-forward, no biases but the norms'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.convert.architectures import bert
from edgeinfer.convert.architectures.base import MAX_LAYERS, Architecture, TensorRule, impossible, require, tensor
from edgeinfer.convert.architectures.blocks import norm
from edgeinfer.convert.architectures.pooling import pooling_metadata
from edgeinfer.convert.config import Config

# What the config can say and llama.cpp can't do otherwise.
_BUILT_IN = {
    "activation_function": "swiglu",
    "moe_every_n_layers": 0,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "causal": False,
}


def metadata(config: Config) -> dict[str, Any]:
    """The config has GPT-2's names."""
    for key, value in _BUILT_IN.items():
        require(config, key, value)
    embd, heads = config.integer("n_embd"), config.integer("n_head")
    if embd % heads or embd // heads % 2:
        raise impossible(config, f"'n_embd' {embd} does not share out into {heads} even heads")
    return {
        "block_count": _n_layers(config),
        # Trained on fewer tokens than it has positions for; llama.cpp's script knows no other case either.
        "context_length": min(config.integer("n_positions"), config.integer("max_trained_positions")),
        "embedding_length": embd,
        "feed_forward_length": config.integer("n_inner"),
        "attention.head_count": heads,
        "rope.freq_base": config.number("rotary_emb_base"),
        "attention.layer_norm_epsilon": config.number("layer_norm_epsilon"),
        "attention.causal": False,
        **pooling_metadata(config),
    }


def _n_layers(config: Config) -> int:
    return config.integer("n_layer", at_most=MAX_LAYERS)


def tensors(config: Config) -> Iterator[TensorRule]:
    """As BERT's, but query, key and value are one matrix."""
    embd, ffn = config.integer("n_embd"), config.integer("n_inner")
    yield tensor("token_embd.weight", "embeddings.word_embeddings.weight", (config.vocab_size, embd))
    types = (config.integer("type_vocab_size"), embd)
    yield tensor("token_types.weight", "embeddings.token_type_embeddings.weight", types)
    yield from norm("token_embd_norm", "emb_ln", embd, bias=True)
    for i in range(_n_layers(config)):
        to, at = f"blk.{i}", f"encoder.layers.{i}"
        yield from norm(f"{to}.attn_output_norm", f"{at}.norm1", embd, bias=True)
        yield from norm(f"{to}.layer_output_norm", f"{at}.norm2", embd, bias=True)
        for name, source, shape in (
            ("attn_qkv", "attn.Wqkv", (3 * embd, embd)),
            ("attn_output", "attn.out_proj", (embd, embd)),
            ("ffn_up", "mlp.fc11", (ffn, embd)),
            ("ffn_gate", "mlp.fc12", (ffn, embd)),
            ("ffn_down", "mlp.fc2", (embd, ffn)),
        ):
            yield tensor(f"{to}.{name}.weight", f"{at}.{source}.weight", shape)


ARCHITECTURE = Architecture(
    name="nomic-bert",
    defaults={
        "activation_function": "swiglu",
        "causal": False,
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "moe_every_n_layers": 0,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": 3072,
        "n_layer": 12,
        "n_positions": 8192,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": 1000.0,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "type_vocab_size": 2,
        "vocab_size": 30528,
    },
    metadata=metadata,
    tensors=tensors,
    adapted=bert.adapted,
)
