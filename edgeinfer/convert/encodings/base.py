"""What the methods of quantization share: finding stored tensors that belong together, checking and reading them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.checkpoint import Checkpoint, Encoding, Reader, TensorSpec, encoded
from edgeinfer.convert.reader import RAW, whole, widen
from edgeinfer.errors import UnusableInputError
from edgeinfer.ggml_types import GGMLType

Floats = NDArray[np.float32]
FLOATS = ("F32", "BF16", "F16")


class OnlyFloats:
    """The part of an encoding that says that no type of ggml holds its rows without loss."""

    __slots__ = ()

    @property
    def type(self) -> GGMLType:
        """See checkpoint.Encoding."""
        return GGMLType.F32

    def repack(self, reader: Reader, row0: int, n_rows: int) -> NDArray[np.uint8]:
        """Never asked for."""
        raise NotImplementedError


Parts = Mapping[str, TensorSpec]
"""Stored tensors by the suffix of their names."""
Decoder = Callable[[Parts], tuple[tuple[int, ...], Encoding]]
"""Makes the logical shape and the encoding of a tensor of its parts, or raises UnusableInputError."""


def with_decoded(
    checkpoint: Checkpoint,
    key: str,
    required: Sequence[str],
    optional: Sequence[str],
    decode: Decoder,
    becomes: str = "",
) -> Checkpoint:
    """The checkpoint in which stored tensors `STEM + suffix` are one, `STEM + becomes`.

    There is one wherever the suffix `key` occurs, and it must have those of `required` too. Only where that is the
    stem itself, the suffix alone says nothing: other tensors are called scale, too.
    """
    tensors = dict(checkpoint.tensors)
    for first in [name for name in tensors if name.endswith(key)]:
        stem = first.removesuffix(key)
        if "" in required and stem not in tensors:
            continue
        missing = [stem + suffix for suffix in required if stem + suffix not in tensors]
        if missing:
            raise misfit(tensors[first], f"comes without {missing[0]}")
        names = {suffix: stem + suffix for suffix in (key, *required, *optional) if stem + suffix in tensors}
        parts = {suffix: tensors.pop(name) for suffix, name in names.items()}
        if stem + becomes in tensors:
            raise misfit(tensors[stem + becomes], f"stands beside {first}, which is the same tensor")
        shape, encoding = decode(parts)
        tensors[stem + becomes] = encoded(stem + becomes, shape, encoding)
    return replace(checkpoint, tensors=tensors)


def check(spec: TensorSpec, dtypes: Sequence[str], shape: tuple[int, ...] | None = None) -> None:
    """Raise UnusableInputError unless a stored tensor has one of the types, and the shape."""
    if spec.dtype not in dtypes:
        raise misfit(spec, f"is {spec.dtype}, expected {' or '.join(dtypes)}")
    if shape is not None and spec.shape != shape:
        raise misfit(spec, f"has the shape {list(spec.shape)}, expected {list(shape)}")


def misfit(spec: TensorSpec, what: str) -> UnusableInputError:
    """The error for a stored tensor that does not fit the others or the config."""
    return UnusableInputError(
        f"{spec.path}: tensor {spec.name} {what}", "do config.json and the weights belong together?"
    )


def check_matrix(spec: TensorSpec) -> None:
    """Raise UnusableInputError unless a stored tensor has at least two dimensions and is not empty."""
    if len(spec.shape) < 2 or not spec.n_elements:
        raise misfit(spec, f"has the shape {list(spec.shape)}, expected a matrix")


def contents(spec: TensorSpec, at_most: int) -> bytes:
    """All bytes of a stored tensor that says something about others. UnusableInputError when it has too many."""
    if spec.nbytes > at_most:
        raise misfit(spec, f"has {spec.nbytes} bytes, expected at most {at_most}")
    return whole(spec)


def numbers(dtype: str, raw: NDArray[np.uint8]) -> Floats:
    """The numbers of a type that weights or scales are stored in; `raw` has their bytes in its last dimension."""
    if dtype in RAW:
        bits = raw.view(RAW[dtype])
        out = np.empty(bits.shape, np.float32)
        widen(dtype, bits, out)
        return out
    if dtype == "I8":
        return raw.view(np.int8).astype(np.float32)
    return TABLES[dtype][raw]


def _e4m3() -> Floats:
    """One sign, four bits of exponent, three of mantissa; no infinity (arXiv 2209.05433)."""
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> 3, (magnitude & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent > 0, normal, np.ldexp(mantissa, -9)).astype(np.float32)
    values[127] = np.nan
    return np.concatenate([values, -values])


def _e8m0() -> Floats:
    """Only an exponent (Open Compute Project, Microscaling Formats 1.0)."""
    values: Floats = np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127)
    values[255] = np.nan
    return values


TABLES: dict[str, Floats] = {
    "F8_E4M3": _e4m3(),
    "F8_E5M2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
    "F8_E8M0": _e8m0(),
}
"""The number of each byte."""
