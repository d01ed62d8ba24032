"""Encodes the header of a GGUF file (ggml/include/gguf.h, version 3)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from edgeinfer.convert.resolve import TensorPlan

ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SCALARS: dict[type, tuple[int, str]] = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
_ARRAYS: dict[str, int] = {"uint8": 0, "int32": 5, "float32": 6, "uint32": 4, "bool": 7}


def encode_header(metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> bytes:
    """The bytes before the tensor data, padded to the alignment.

    Python values become: bool BOOL, int UINT32, float FLOAT32, str STRING, a list of str an array of strings,
    a numpy array of uint8, int32, uint32, float32 or bool an array of that. Bytes are a value that is encoded already.
    """
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += (_string(key), _value(key, value))
    for tensor, offset in zip(tensors, tensor_offsets(tensors), strict=True):
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape, tensor.type, offset))
    header = b"".join(parts)
    return header + bytes(padding(len(header)))


def tensor_offsets(tensors: Iterable[TensorPlan]) -> list[int]:
    """Where each tensor begins, counted from the start of the tensor data."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += tensor.nbytes + padding(tensor.nbytes)
    return offsets


def data_nbytes(tensors: Iterable[TensorPlan]) -> int:
    """Bytes of the tensor data with its padding."""
    return sum(tensor.nbytes + padding(tensor.nbytes) for tensor in tensors)


def padding(nbytes: int) -> int:
    """The bytes missing to the next multiple of the alignment."""
    return -nbytes % ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list):
        # A vocabulary has hundreds of thousands, and a function call for each would take half a second.
        data = [text.encode() for text in value]
        lengths = map(_LENGTH.pack, map(len, data))
        return struct.pack("<IIQ", _ARRAY, _STRING, len(data)) + b"".join(
            chain.from_iterable(zip(lengths, data, strict=True))
        )
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, _ARRAYS[value.dtype.name], value.size) + value.tobytes()
    code, layout = _SCALARS[type(value)]
    try:
        return struct.pack("<I", code) + struct.pack(layout, value)
    except struct.error:
        raise ValueError(f"{key} = {value!r} does not fit its type in the file") from None
