"""What an architecture module says about a model, and the pieces that several share."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from edgeinfer.convert.architectures.transforms import Elementwise, RowTransform
from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError

MAX_LAYERS = 512  # llama.cpp's LLAMA_MAX_LAYERS
MAX_HEAD_DIM = 1 << 16
MAX_EXPERTS = 1024  # llama.cpp's LLAMA_MAX_EXPERTS


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one tensor of the checkpoint, seen as a matrix; a vector is a column of rows of one element."""

    source: str
    shape: tuple[int, ...]
    """What the tensor must have there, row length last."""
    first_row: int = 0
    n_rows: int | None = None
    """None: all from `first_row` on."""
    transform: RowTransform | None = None
    row_length: int = 0
    """Not 0: rows are cut into shorter ones of this length first."""
    change: Elementwise | None = None
    """What becomes of the elements, in F32."""


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor of the GGUF file: the parts whose rows it is made of, one after the other."""

    name: str
    shape: tuple[int, ...]
    """Row length last."""
    parts: tuple[Part, ...]
    optional: bool = False
    """Left out when the checkpoint has none of the parts."""


def tensor(
    name: str,
    source: str,
    shape: tuple[int, ...],
    transform: RowTransform | None = None,
    *,
    optional: bool = False,
    change: Elementwise | None = None,
) -> TensorRule:
    """The commonest rule: one tensor becomes one of the same shape."""
    return TensorRule(name, shape, (Part(source, shape, transform=transform, change=change),), optional)


def stack(
    name: str, sources: Sequence[str], shape: tuple[int, ...], transform: RowTransform | None = None
) -> TensorRule:
    """Tensors of equal shape become one with a dimension more in front, as ggml wants experts."""
    parts = tuple(Part(source, shape, transform=transform) for source in sources)
    return TensorRule(name, (len(sources), *shape), parts)


@dataclass(frozen=True, slots=True)
class ConstantRule:
    """One F32 tensor of the GGUF file that is computed from the config."""

    name: str
    values: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model architecture: its name in GGUF, and functions of the config."""

    name: str
    defaults: Mapping[str, Any]
    """What transformers assumes where the config is silent."""
    metadata: Callable[[Config], dict[str, Any]]
    """The `<name>.*` keys, in order, without the prefix."""
    tensors: Callable[[Config], Iterator[TensorRule | ConstantRule]]
    prefix: str = ""
    """What some checkpoints put before every tensor's name, and the rules don't."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys that some configs use, and the names that the functions ask for; those go before these."""
    buffers: tuple[str, ...] = ()
    """How the names of tensors end that old checkpoints saved along with the weights, and that nobody needs."""
    adapted: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint
    """The checkpoint with what its tensors show in the config, and with the names that `tensors` uses."""
    templates: Callable[[Config], Mapping[str, str]] = lambda config: {}
    """Templates by name that go with the model and not with its tokenizer."""


def n_layers(config: Config) -> int:
    """Decoder layers."""
    return config.integer("num_hidden_layers", at_most=MAX_LAYERS)


def head_dim(config: Config) -> int:
    """Elements per attention head: stated, or the hidden size shared out. Even, as rope turns pairs."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if config.get("head_dim") is not None:
        dim = config.integer("head_dim")
    elif hidden % heads:
        raise impossible(config, f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    else:
        dim = hidden // heads
    if dim % 2 or dim > MAX_HEAD_DIM:
        raise impossible(config, f"heads of {dim} elements, expected an even number up to {MAX_HEAD_DIM}")
    return dim


def rotary_dim(config: Config) -> int:
    """Elements per head that rope turns, where it is not all of them."""
    factor = config.rope.number("partial_rotary_factor")
    dim = int(head_dim(config) * factor)
    if factor > 1 or dim % 2 or not dim:
        raise impossible(config, f"'partial_rotary_factor' is {factor:g}: {dim} of {head_dim(config)} elements")
    return dim


def n_kv_heads(config: Config) -> int:
    """Key-value heads, each shared by as many query heads: stated, or as many as query heads."""
    heads = config.integer("num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise impossible(config, f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def require(config: Config, key: str, *known: object) -> None:
    """Raise UnusableInputError unless `key` has a value that llama.cpp computes, as nothing tells it another."""
    value = config.get(key)
    if value not in known:
        only = " or ".join(map(repr, known))
        raise impossible(config, f"{key!r} is {reprlib.repr(value)}, llama.cpp runs this architecture with {only} only")


def impossible(config: Config, what: str) -> UnusableInputError:
    """The error for a config that contradicts itself, or that llama.cpp would compute differently."""
    return UnusableInputError(f"{config.path}: {what}", "is this file complete?")


def decoder_metadata(config: Config, **rope: bool) -> dict[str, Any]:
    """The keys that every rotary decoder with RMS norms and SiLU has; `rope` goes to `rope_metadata`.

    Raises UnusableInputError for another one.
    """
    check_activation(config, "hidden_act", "silu", "swish")
    rms_norm = {"attention.layer_norm_rms_epsilon": config.number("rms_norm_eps")}
    return {**attention_metadata(config, **rope), **rms_norm}


def attention_metadata(config: Config, **rope: bool) -> dict[str, Any]:
    """The keys that every rotary decoder has, whatever its norms and activation; `rope` goes to `rope_metadata`."""
    metadata: dict[str, Any] = {
        "block_count": n_layers(config),
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": config.integer("intermediate_size"),
        "attention.head_count": config.integer("num_attention_heads"),
        "attention.head_count_kv": n_kv_heads(config),
        **rope_metadata(config, **rope),
    }
    if config.get("head_dim") is not None:
        metadata["attention.key_length"] = metadata["attention.value_length"] = head_dim(config)
    return metadata


def check_activation(config: Config, key: str, *known: str) -> None:
    """Raise UnusableInputError for another activation than those of `known`, of which the first is the default."""
    activation = config.get(key)
    if activation is not None and activation not in known:
        # The file has no place for it: llama.cpp would silently compute its own.
        raise impossible(config, f"{key!r} is {reprlib.repr(activation)}, this architecture is known with {known[0]!r}")


def expert_counts(config: Config) -> dict[str, Any]:
    """How many experts there are and how many a token uses; nothing for a config that knows of none."""
    key = next((k for k in ("num_local_experts", "num_experts") if config.get(k) is not None), None)
    if key is None:
        return {}
    count = config.integer(key, at_least=0, at_most=MAX_EXPERTS)
    used = config.integer("num_experts_per_tok", at_most=count) if count else 0
    return {"expert_count": count, "expert_used_count": used}


def rope_metadata(
    config: Config, *, rope_factors: bool = False, partial: bool = False, dynamic: bool = False
) -> dict[str, Any]:
    """Base frequency and scaling of the rotary embedding. Raises UnusableInputError for an unknown scaling.

    `rope_factors`: whether llama.cpp reads a tensor of rope divisors for this architecture, as `llama3` scaling needs.
    `partial`: whether it can leave a part of each head as it is. `dynamic`: whether a scaling may be stated that begins
    where the context length ends.
    """
    rope = config.rope
    kind = rope.get("rope_type")
    if not partial and rope.get("partial_rotary_factor") not in (None, 1):
        raise impossible(config, "'partial_rotary_factor' is not 1, this architecture is known with full rotation")
    further = [name for name, is_known in (("llama3", rope_factors), ("dynamic", dynamic)) if is_known]
    scaling: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        scaling = {"rope.scaling.type": kind, "rope.scaling.factor": rope.number("factor")}
    if kind == "yarn":
        scaling["rope.scaling.original_context_length"] = _original_context(config)
        _check_yarn(config)
        for source, target in _YARN_NUMBERS.items():
            if rope.get(source) is not None:
                scaling.setdefault(f"rope.scaling.{target}", rope.number(source))
    elif kind not in ("default", "linear", *further):
        known = ", ".join(("default", "linear", "yarn", *further))
        raise UnusableInputError(
            f"{config.path}: unknown rope scaling {reprlib.repr(kind)}", f"this architecture is known with {known}"
        )
    return {**scaling, "rope.freq_base": rope.number("rope_theta")}


def _check_yarn(config: Config) -> None:
    """Raise UnusableInputError for a yarn that sharpens attention otherwise than llama.cpp, which computes that."""
    rope, sharpened = config.rope, 1 + 0.1 * math.log(max(config.rope.number("factor"), 1))
    stated = rope.get("attention_factor")
    if stated is not None and not math.isclose(rope.number("attention_factor"), sharpened, rel_tol=1e-4):
        raise impossible(config, f"'attention_factor' of the yarn is {stated:g}, llama.cpp has {sharpened:g}")


def _original_context(config: Config) -> int:
    rope, key = config.rope, "original_max_position_embeddings"
    return config.integer("max_position_embeddings") if rope.get(key) is None else rope.integer(key)


_YARN_NUMBERS = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "attn_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def embedding_tensors(config: Config, *, norm_change: Elementwise | None = None) -> Iterator[TensorRule]:
    """Token embedding, final norm and output head, which is absent when tied to the embedding."""
    embd, vocab = config.integer("hidden_size"), config.vocab_size
    yield tensor("token_embd.weight", "model.embed_tokens.weight", (vocab, embd))
    yield tensor("output_norm.weight", "model.norm.weight", (embd,), change=norm_change)
    tied = config.flag("tie_word_embeddings")
    yield tensor("output.weight", "lm_head.weight", (vocab, embd), optional=tied)
