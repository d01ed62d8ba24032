"""Gemma 3n: four streams that predict and correct each other (AltUp), low-rank side paths (LAuReL), and an embedding
of the token for every layer; the last layers look into the caches of earlier ones.

Paper: https://arxiv.org/abs/2301.13310 (AltUp), https://arxiv.org/abs/2411.07501 (LAuReL).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    attention_metadata,
    check_activation,
    embedding_tensors,
    impossible,
    n_layers,
    require,
    stack,
    tensor,
)
from edgeinfer.convert.architectures.blocks import attention, gated_ffn, head_norms, layers, norm
from edgeinfer.convert.architectures.windows import has_window, window_metadata
from edgeinfer.convert.config import Config

_FULL_EVERY = 5
_STREAMS = 4
_LAYERS_WITH_CACHE = 20
_SPARSE_LAYERS = 10
_SPARSITY = 0.95
_CUTOFF = 1.6448535919189453
"""So many standard deviations above the mean lie the largest 5 % (in F32); the library has a constant of its own."""
_MAX_TOKENS_ELSEWHERE = 4096
# What the config can say and llama.cpp can't do otherwise.
_BUILT_IN = {
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": _STREAMS,
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256,
    "laurel_rank": 64,
}


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for the many things that llama.cpp computes in one way only."""
    for key, value in _BUILT_IN.items():
        require(config, key, value)
    check_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    if config.rope.get("rope_type") != "default":
        raise impossible(config, "a scaled rope, llama.cpp runs this architecture without")
    _check_sparsity(config)
    config = config.with_values({"intermediate_size": _n_ffn(config)})
    return {
        **attention_metadata(config),
        "feed_forward_length": np.full(n_layers(config), _n_ffn(config), np.int32),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
        "rope.freq_base_swa": config.window_rope.number("rope_theta"),
        **window_metadata(config, full_every=_FULL_EVERY),
        "attention.shared_kv_layers": _n_shared(config),
        "final_logit_softcapping": config.number("final_logit_softcapping"),
        "altup.active_idx": 0,
        "altup.num_inputs": _STREAMS,
        "embedding_length_per_layer_input": config.integer("hidden_size_per_layer_input"),
        "activation_sparsity_scale": np.array(
            [_CUTOFF if i < _SPARSE_LAYERS else -np.inf for i in range(n_layers(config))], np.float32
        ),
    }


def _n_shared(config: Config) -> int:
    """The last layers, which have no cache of their own; llama.cpp gives the first twenty one."""
    shared = config.integer("num_kv_shared_layers", at_least=0)
    if shared != max(0, n_layers(config) - _LAYERS_WITH_CACHE):
        raise impossible(
            config, f"'num_kv_shared_layers' is {shared}, llama.cpp shares after layer {_LAYERS_WITH_CACHE}"
        )
    windowed = has_window(config, full_every=_FULL_EVERY)
    if shared and windowed[_LAYERS_WITH_CACHE - 2 : _LAYERS_WITH_CACHE] != [True, False]:
        raise impossible(config, "the last layers with a cache are not one with a window and one without")
    return shared


def _n_ffn(config: Config) -> int:
    """The feed-forward's width, which the config may state for each layer. Raises UnusableInputError for several."""
    stated = config.get("intermediate_size")
    widths = stated if isinstance(stated, list) else [stated]
    if not widths or any(width != widths[0] for width in widths):
        raise impossible(config, "'intermediate_size' differs between layers, llama.cpp has one for all")
    return config.with_values({"intermediate_size": widths[0]}).integer("intermediate_size")


def _check_sparsity(config: Config) -> None:
    """Raise UnusableInputError unless the first ten layers keep 5 % of their gates, and the others all."""
    stated = config.get("activation_sparsity_pattern")
    layers_ = n_layers(config)
    expected = [_SPARSITY if i < _SPARSE_LAYERS else 0 for i in range(layers_)]
    if stated is None and layers_ > _SPARSE_LAYERS:
        return
    if stated != expected:
        raise impossible(config, f"'activation_sparsity_pattern' is not {_SPARSITY} in the first ten layers only")


def tensors(config: Config) -> Iterator[TensorRule]:
    """Norms multiply by their weights here, unlike in the other Gemmas."""
    embd, per_layer = config.integer("hidden_size"), config.integer("hidden_size_per_layer_input")
    side = per_layer * n_layers(config)
    yield from embedding_tensors(config)
    yield embedding_per_layer(config, side)
    yield tensor("per_layer_model_proj.weight", "model.per_layer_model_projection.weight", (side, embd))
    yield from norm("per_layer_proj_norm", "model.per_layer_projection_norm", per_layer)
    for name, source in (("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections")):
        matrices = [f"model.{source}.{i}.weight" for i in range(_STREAMS - 1)]
        yield stack(f"{name}.weight", matrices, (embd, embd))
    for to, at in layers(config):
        yield from _layer(config, to, at)


def embedding_per_layer(config: Config, length: int) -> TensorRule:
    """Of fewer tokens than there are, as images and sounds have none; those get token 0's, as in transformers."""
    rows, vocab = config.integer("vocab_size_per_layer_input"), config.vocab_size
    if not 0 <= vocab - rows <= _MAX_TOKENS_ELSEWHERE:
        raise impossible(config, f"'vocab_size_per_layer_input' is {rows} of {vocab} tokens")
    name, shape = "model.embed_tokens_per_layer.weight", (rows, length)
    others = (Part(name, shape, n_rows=1),) * (vocab - rows)
    return TensorRule("per_layer_token_embd.weight", (vocab, length), (Part(name, shape), *others))


def _layer(config: Config, to: str, at: str) -> Iterator[TensorRule]:
    embd, per_layer = config.integer("hidden_size"), config.integer("hidden_size_per_layer_input")
    rank = config.integer("laurel_rank")
    yield from norm(f"{to}.attn_norm", f"{at}.input_layernorm", embd)
    yield from attention(config, to, at)
    yield from head_norms(config, to, at)
    yield from norm(f"{to}.post_attention_norm", f"{at}.post_attention_layernorm", embd)
    yield from norm(f"{to}.ffn_norm", f"{at}.pre_feedforward_layernorm", embd)
    yield from gated_ffn(to, f"{at}.mlp", embd, _n_ffn(config))
    yield from norm(f"{to}.post_ffw_norm", f"{at}.post_feedforward_layernorm", embd)
    yield tensor(f"{to}.inp_gate.weight", f"{at}.per_layer_input_gate.weight", (per_layer, embd))
    yield tensor(f"{to}.proj.weight", f"{at}.per_layer_projection.weight", (embd, per_layer))
    yield from norm(f"{to}.post_norm", f"{at}.post_per_layer_input_norm", embd)
    yield tensor(f"{to}.altup_correct_coef.weight", f"{at}.altup.correction_coefs.weight", (_STREAMS, _STREAMS))
    yield tensor(f"{to}.altup_correct_scale.weight", f"{at}.altup.correct_output_scale", (embd,))
    yield tensor(f"{to}.altup_predict_coef.weight", f"{at}.altup.prediction_coefs.weight", (_STREAMS**2, _STREAMS))
    yield tensor(f"{to}.altup_router.weight", f"{at}.altup.modality_router.weight", (_STREAMS, embd))
    yield from norm(f"{to}.altup_router_norm", f"{at}.altup.router_norm", embd)
    yield tensor(f"{to}.laurel_l.weight", f"{at}.laurel.linear_left.weight", (rank, embd))
    yield tensor(f"{to}.laurel_r.weight", f"{at}.laurel.linear_right.weight", (embd, rank))
    yield from norm(f"{to}.laurel_post_norm", f"{at}.laurel.post_laurel_norm", embd)


ARCHITECTURE = Architecture(
    name="gemma3n",
    defaults={
        **_BUILT_IN,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1e6,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    },
    metadata=metadata,
    tensors=tensors,
)
