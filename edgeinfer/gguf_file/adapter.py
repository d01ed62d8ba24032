"""Reads and checks a LoRA adapter in GGUF before the C library sees it.

The library (src/llama-adapter.cpp) ends the process over metadata of another type, and multiplies with shapes that it
never compared; what it does not know, it leaves out without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from edgeinfer.errors import UnusableInputError, listed
from edgeinfer.finite import is_finite
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import Header, TensorInfo, read_header
from edgeinfer.gguf_file.metadata import ValueType

TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0)
MAX_SCALE = 1e30
"""Of what a product is multiplied with, so that F32 can hold it."""
_ALPHA_KEY = "adapter.lora.alpha"
_TABLE = "token_embd.weight"
"""Of a tensor whose rows are looked up both factors lie the other way round."""
_HEAD = "output.weight"
_SLAB_NBYTES = 34 << 16


@dataclass(frozen=True, slots=True)
class Pair:
    """The two factors of what is added to the tensor `name`; shapes in ggml's order, padded to four."""

    name: str
    a: TensorInfo
    b: TensorInfo

    @property
    def rank(self) -> int:
        """The inner dimension."""
        return _padded(self.b)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that it fits."""
        a, b = _padded(self.a), _padded(self.b)
        return (b[1], a[1], 1, 1) if self.name.endswith(_TABLE) else (a[0], b[1], *a[2:])

    @property
    def is_product(self) -> bool:
        """Whether the two can be multiplied."""
        a, b = _padded(self.a), _padded(self.b)
        if self.name.endswith(_TABLE):
            return a[0] == b[0] and a[2:] == b[2:] == (1, 1)
        return a[1] == b[0] and a[2:] == b[2:] and a[3] == 1


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter file."""

    header: Header
    alpha: float
    """What the file says, divided by a pair's rank, is the scale of its product; 0 where it says nothing: 1."""
    pairs: tuple[Pair, ...]


def read_adapter(path: Path) -> Adapter:
    """Read the header of an adapter, checked in itself.

    Raises NotFoundError; UnusableInputError for what is no LoRA adapter, or none that the library runs as it should.
    """
    header = read_header(path)
    _check_kind(header)
    alpha = _alpha(header)
    pairs = tuple(_pairs(header))
    if not pairs:
        _fail(header, "has no tensors")
    for pair in pairs:
        if not pair.is_product:
            shapes = f"{list(pair.a.shape)} and {list(pair.b.shape)}"
            _fail(header, f"has factors for {pair.name} that don't go together: {shapes}")
        if wrong := [t for t in (pair.a, pair.b) if t.type not in TYPES]:
            _fail(header, f"has {wrong[0].name} as {wrong[0].type.name}, not {', '.join(t.name for t in TYPES)}")
        if abs(alpha) / pair.rank > MAX_SCALE:
            _fail(header, f"has the {_ALPHA_KEY} {alpha:g}")
    return Adapter(header, alpha, pairs)


def check_fits(adapter: Adapter, model: Sequence[Header]) -> None:
    """Raise UnusableInputError unless the adapter is for a model with these shards: architecture, tensors, shapes."""
    header = adapter.header
    if header.architecture != model[0].architecture:
        raise _misfit(header, model, f"is for {header.architecture}, the model is {model[0].architecture}")
    tensors = {tensor.name: tensor for shard in model for tensor in shard.tensors}
    shapes = {name: _padded(tensor) for name, tensor in tensors.items()}
    missing = [pair.name for pair in adapter.pairs if pair.name not in shapes]
    if missing:
        raise _misfit(header, model, f"is for {len(missing)} tensors that the model does not have: {listed(missing)}")
    wrong = [
        f"{pair.name} ({_text(pair.shape)}, the model has {_text(shapes[pair.name])})"
        for pair in adapter.pairs
        if pair.shape != shapes[pair.name]
    ]
    if wrong:
        raise _misfit(header, model, f"is for {len(wrong)} tensors of other shapes: {listed(wrong)}")
    _check_uses(adapter, model, tensors)


def _check_uses(adapter: Adapter, model: Sequence[Header], tensors: Mapping[str, TensorInfo]) -> None:
    """What the library would end the process over."""
    for pair in adapter.pairs:
        if tensors[pair.name].type is GGMLType.NVFP4:
            what = f"is for {pair.name}, which the model has as NVFP4: llama.cpp adapts no weights of that type"
            raise _misfit(adapter.header, model, what, "convert the model to another type")
    is_encoder = model[0].metadata.get(f"{model[0].architecture}.attention.causal") is False
    if any(pair.name == _TABLE for pair in adapter.pairs) and _HEAD not in tensors and not is_encoder:
        what = f"is for {_TABLE}, which is the output matrix of this model, too"
        raise _misfit(adapter.header, model, what, "train an adapter without the embedding")


def check_finite(adapter: Adapter) -> None:
    """Raise UnusableInputError for a value that is not finite, which would spoil every answer; reads the whole file."""
    path = adapter.header.path
    try:
        with open(path, "rb") as file:
            for tensor in adapter.header.tensors:
                file.seek(tensor.offset)
                for start in range(0, tensor.nbytes, _SLAB_NBYTES):
                    wanted = min(_SLAB_NBYTES, tensor.nbytes - start)
                    raw = file.read(wanted)
                    if len(raw) < wanted or not is_finite(tensor.type, np.frombuffer(raw, np.uint8)):
                        _fail(adapter.header, f"has values in {tensor.name} that are not finite")
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the permissions") from None


def _check_kind(header: Header) -> None:
    kind = _text_value(header, "general.type")
    if kind != "adapter":
        raise UnusableInputError(
            f"{header.path}: not an adapter (general.type is {kind[:40]!r})",
            "`edgeinfer convert ADAPTER_DIR` makes one of a PEFT adapter",
        )
    _text_value(header, "general.architecture")
    if (method := _text_value(header, "adapter.type")) != "lora":
        _fail(header, f"has the adapter.type {method[:40]!r}, not 'lora'")
    for key in header.metadata:
        if key.startswith("adapter.alora."):
            _fail(header, f"has {key}: an activated LoRA, which is not supported")


def _text_value(header: Header, key: str) -> str:
    if key not in header.metadata or header.metadata.value_type(key) != (ValueType.STRING, None):
        _fail(header, f"has no text for {key}")
    return header.metadata.text(key)


def _alpha(header: Header) -> float:
    if _ALPHA_KEY not in header.metadata:
        return 0.0
    if header.metadata.value_type(_ALPHA_KEY) != (ValueType.FLOAT32, None):
        _fail(header, f"has no 32-bit number for {_ALPHA_KEY}")
    alpha = float(header.metadata[_ALPHA_KEY])
    if not math.isfinite(alpha) or alpha == 0:  # the library takes 0 for "not stated"
        _fail(header, f"has the {_ALPHA_KEY} {alpha:g}")
    return alpha


def _pairs(header: Header) -> Iterator[Pair]:
    sides: dict[str, dict[str, TensorInfo]] = {}
    others = []
    for tensor in header.tensors:
        name, dot, side = tensor.name.rpartition(".")
        if dot and side in ("lora_a", "lora_b") and ".lora_" not in name:
            sides.setdefault(name, {})[side] = tensor
        else:
            others.append(tensor.name)
    if others:
        _fail(header, f"has {len(others)} tensors that are no part of a LoRA adapter: {listed(others)}")
    for name, found in sides.items():
        if len(found) < 2:
            _fail(header, f"has only {', '.join(found)} for {name}")
        yield Pair(name, found["lora_a"], found["lora_b"])


def _padded(tensor: TensorInfo) -> tuple[int, ...]:
    return (*tensor.shape, 1, 1, 1, 1)[:4]


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape[: 3 if shape[2] > 1 else 2]))


def _misfit(
    header: Header, model: Sequence[Header], what: str, hint: str = "use the model that it was trained on"
) -> UnusableInputError:
    return UnusableInputError(f"{header.path}: {what} ({model[0].path})", hint)


def _fail(header: Header, what: str) -> NoReturn:
    raise UnusableInputError(f"{header.path}: {what}", "convert the adapter again, with `edgeinfer convert`")
