"""Says what is in a GGUF file and what running it needs, from the header alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.gguf_file.header import Header, TensorInfo
from edgeinfer.gguf_file.metadata import Metadata, ValueType
from edgeinfer.gguf_file.recurrent import attends, state_nbytes

CONTEXT_SIZES = (2048, 4096, 8192)
KV_ELEMENT_NBYTES = 2  # F16, the default
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
MAX_ARRAY_ELEMENTS = 8
MAX_BLOCKS = 512  # as in `limits`: a damaged header must not make a loop of four billion


@dataclass(frozen=True, slots=True)
class TypeShare:
    """The tensors of one type."""

    type: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes for a context of `ctx_size` tokens, one sequence; the library's working buffers come on top."""

    ctx_size: int
    weights_nbytes: int
    kv_nbytes: int
    state_nbytes: int
    """Of recurrent layers, for one sequence."""
    total_nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor; `shape` in ggml's order, the row length first."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Description:
    """What `inspect` shows. `memory` is empty where the header does not tell the shape of the KV cache."""

    path: str
    architecture: str
    name: str
    version: int
    file_nbytes: int
    tensor_nbytes: int
    parameters: int
    bits_per_weight: float
    context_length: int | None
    window: int | None
    """The sliding window in tokens, if some layers have one. The KV cache is full-size all the same."""
    has_chat_template: bool
    shard: int
    """Counts from 1."""
    shards: int
    types: tuple[TypeShare, ...]
    memory: tuple[MemoryNeed, ...]
    metadata: dict[str, Any]
    """Numbers and strings; a long array as `{"type", "count", "first"}`."""
    tensors: tuple[TensorRow, ...]


def describe(header: Header) -> Description:
    """Describe a file by its header."""
    metadata, parameters = header.metadata, header.n_parameters
    context_length = _count(header, "context_length")
    return Description(
        path=str(header.path),
        architecture=readable(header.architecture),
        name=readable(metadata.text("general.name")),
        version=header.version,
        file_nbytes=header.file_nbytes,
        tensor_nbytes=header.tensor_nbytes,
        parameters=parameters,
        bits_per_weight=round(8 * header.tensor_nbytes / parameters, 4) if parameters else 0.0,
        context_length=context_length or None,
        window=_count(header, "attention.sliding_window") or None,
        has_chat_template=bool(metadata.text("tokenizer.chat_template")),
        shard=metadata.count("split.no") + 1,
        shards=max(1, metadata.count("split.count")),
        types=tuple(_types(header)),
        memory=tuple(_memory(header, context_length)),
        metadata={readable(key): _value(metadata, key) for key in metadata},
        tensors=tuple(TensorRow(t.name, t.shape, t.type.name, t.nbytes) for t in header.tensors),
    )


def is_encoder(header: Header) -> bool:
    """Whether the model makes vectors or scores of texts, rather than further text."""
    return reads_both_ways(header) or header.hyperparameter("pooling_type", 0) != 0


def reads_both_ways(header: Header) -> bool:
    """Whether attention sees the whole text at once."""
    return header.hyperparameter("attention.causal", True) is False or header.architecture == "gemma-embedding"


def kv_nbytes_per_token(header: Header) -> int | None:
    """Bytes of F16 KV cache that one token takes in all layers, or None where the header does not tell.

    Recurrent layers take none, nor do those that share an earlier layer's or predict further tokens.
    """
    blocks = _count(header, "block_count") - _count(header, "nextn_predict_layers")
    heads = _per_layer(header, "attention.head_count")
    if heads is None or not 0 < blocks <= MAX_BLOCKS:
        return None
    if reads_both_ways(header):
        return 0
    kv_heads = _per_layer(header, "attention.head_count_kv")
    kv_heads = heads if kv_heads is None else kv_heads
    embedding = _count(header, "embedding_length")
    head_length = embedding // int(heads.max()) if heads.max() > 0 else 0
    windowed = _per_layer(header, "attention.sliding_window_pattern")
    with_cache = blocks - _count(header, "attention.shared_kv_layers")
    elements = 0
    for layer in range(with_cache):
        if not attends(header, layer):
            continue
        # One window pattern for all layers (a period) says nothing about the lengths of keys.
        is_windowed = windowed is not None and windowed.size > layer and windowed.size > 1 and bool(windowed[layer])
        lengths = _head_lengths(header, head_length, windowed=is_windowed)
        elements += int(kv_heads[min(layer, kv_heads.size - 1)]) * lengths
    return elements * KV_ELEMENT_NBYTES


def recurrent_state_nbytes(header: Header) -> int:
    """Bytes of state that each sequence has in recurrent layers."""
    blocks = _count(header, "block_count") - _count(header, "nextn_predict_layers")
    return state_nbytes(header, blocks) if 0 < blocks <= MAX_BLOCKS else 0


def computing_tensors(header: Header, tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Those of `tensors` that a plain run reads: not the layers for the prediction of further tokens, the last ones."""
    more = _count(header, "nextn_predict_layers")
    if not more:
        return list(tensors)
    first = _count(header, "block_count") - more
    layers = ((tensor, _LAYER.match(tensor.name)) for tensor in tensors)
    return [tensor for tensor, layer in layers if layer is None or int(layer[1]) < first]


def _head_lengths(header: Header, default: int, *, windowed: bool) -> int:
    """Elements of a key and a value of one head together."""
    total = 0
    for kind in ("key", "value"):
        length = _count(header, f"attention.{kind}_length", default)
        total += _count(header, f"attention.{kind}_length_swa", length) if windowed else length
    return total


def _count(header: Header, name: str, default: int = 0) -> int:
    return header.metadata.count(f"{header.architecture}.{name}", default)


def _per_layer(header: Header, name: str) -> Any:
    """A hyper-parameter that is one number or one per layer, as an array; None if it is neither."""
    value = header.metadata.get(f"{header.architecture}.{name}")
    if isinstance(value, int):
        return np.array([value])
    return value if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iub" else None


def _memory(header: Header, context_length: int) -> Iterator[MemoryNeed]:
    per_token = kv_nbytes_per_token(header)
    if per_token is None or not context_length:
        return
    weights, state = header.tensor_nbytes, recurrent_state_nbytes(header)
    for ctx_size in sorted({*(size for size in CONTEXT_SIZES if size < context_length), context_length}):
        kv = per_token * ctx_size
        yield MemoryNeed(ctx_size, weights, kv, state, weights + kv + state)


def _types(header: Header) -> Iterator[TypeShare]:
    """Largest share first."""
    by_type: dict[str, TypeShare] = {}
    for tensor in header.tensors:
        old = by_type.get(tensor.type.name, TypeShare(tensor.type.name, 0, 0, 0))
        by_type[tensor.type.name] = TypeShare(
            old.type, old.tensors + 1, old.parameters + tensor.n_elements, old.nbytes + tensor.nbytes
        )
    return iter(sorted(by_type.values(), key=lambda share: -share.nbytes))


def _value(metadata: Metadata, key: str) -> Any:
    value_type, count = metadata.value_type(key)
    if count is None:
        value = metadata[key]
        return _plain(np.float32(value) if value_type is ValueType.FLOAT32 else value)
    elements = [_plain(element) for element in metadata.head(key, MAX_ARRAY_ELEMENTS)]
    if count <= MAX_ARRAY_ELEMENTS:
        return elements
    return {"type": value_type.name, "count": count, "first": elements}


def _plain(value: Any) -> Any:
    """A value that JSON can hold: it has no NaN, no infinity and no lone surrogates."""
    if isinstance(value, np.float32):
        value = float(str(value))  # the shortest decimal: 1e-05, not 9.999999747378752e-06
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return readable(value) if isinstance(value, str) else value


def readable(text: str) -> str:
    """`text` with bytes that were not UTF-8 replaced."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
