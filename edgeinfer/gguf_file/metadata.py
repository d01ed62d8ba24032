"""The metadata of a GGUF file: typed values, decoded only when they are asked for.

A vocabulary of 150k strings would cost a Python object each; most callers never look at it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np


class ValueType(IntEnum):
    """The types of metadata values (enum gguf_type)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALAR_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Field:
    """Where a metadata value lies: `count` elements in the bytes `[pos, end)`; a scalar counts 1."""

    type: ValueType
    is_array: bool
    pos: int
    end: int
    count: int
    squares: int = 0
    """Of strings, the sum of the squares of their lengths: for what takes time quadratic in each."""


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a header; numbers, strings, and for arrays numpy arrays or lists of strings.

    Bytes that are not UTF-8 come back as lone surrogates (`surrogateescape`).
    """

    def __init__(self, buffer: mmap.mmap | bytes, fields: dict[str, Field]) -> None:
        self._buffer = buffer
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        if field.type is ValueType.STRING:
            strings = [raw.decode("utf-8", "surrogateescape") for raw in self._raw_strings(field)]
            return strings if field.is_array else strings[0]
        values = np.frombuffer(self._buffer, SCALAR_DTYPES[field.type], field.count, field.pos)
        return values.copy() if field.is_array else values[0].item()

    def __contains__(self, key: object) -> bool:
        return key in self._fields  # Mapping's own would decode the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def value_type(self, key: str) -> tuple[ValueType, int | None]:
        """A value's (element) type, and its element count if it is an array."""
        field = self._fields[key]
        return field.type, field.count if field.is_array else None

    def number(self, key: str, default: int | float | None = None) -> Any:
        """The scalar number under `key`, or `default` where there is none or it is something else."""
        field = self._fields.get(key)
        if field is None or field.is_array or field.type is ValueType.STRING:
            return default
        return self[key]

    def count(self, key: str, default: int = 0) -> int:
        """The non-negative integer under `key`, or `default` where there is none or it is something else."""
        value = self.number(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default

    def text(self, key: str, default: str = "") -> str:
        """The string under `key`, or `default` where there is none or it is something else."""
        field = self._fields.get(key)
        if field is None or field.is_array or field.type is not ValueType.STRING:
            return default
        value: str = self[key]
        return value

    def head(self, key: str, limit: int) -> Any:
        """An array's first `limit` elements, without decoding the others."""
        field = self._fields[key]
        return Metadata(self._buffer, {key: replace(field, count=min(field.count, limit))})[key]

    def squares(self, key: str) -> int:
        """The sum of the squares of the lengths of the strings under `key`; 0 where there are none."""
        field = self._fields.get(key)
        return field.squares if field else 0

    def encoded(self, key: str) -> bytes:
        """A value as it stands in the file, its type in front."""
        field = self._fields[key]
        kind = struct.pack("<I", field.type)
        if field.is_array:
            kind = struct.pack("<IIQ", ValueType.ARRAY, field.type, field.count)
        return kind + self._buffer[field.pos : field.end]

    def _raw_strings(self, field: Field) -> Iterator[bytes]:
        # A copy, because slices of a map cost twice as much as slices of bytes.
        buffer, unpack, pos = self._buffer[field.pos : field.end], _U64.unpack_from, 0
        for _ in range(field.count):
            end = pos + 8 + unpack(buffer, pos)[0]
            yield buffer[pos + 8 : end]
            pos = end
