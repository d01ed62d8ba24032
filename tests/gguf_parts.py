"""GGUF files taken apart, changed, and put together again, with whatever lies a test wants in them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeinfer.gguf_file.header import ValueType, read_header

_CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "B",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
T = ValueType


@dataclass(frozen=True)
class Tensor:
    """A tensor and its data; `shape` in ggml's order. `offset` None is where it belongs."""

    name: bytes
    shape: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


@dataclass(frozen=True)
class Parts:
    """A file in parts: each value as it stands in the file, its type in front."""

    fields: dict[str, bytes]
    tensors: tuple[Tensor, ...]
    alignment: int = 32
    n_tensors: int | None = None
    n_fields: int | None = None
    version: int = 3
    extra_fields: tuple[tuple[bytes, bytes], ...] = field(default=())

    def with_fields(self, **changes: bytes | None) -> Parts:
        """The same with some values changed, dots written as `__`; None leaves one out."""
        named = {key.replace("__", "."): value for key, value in changes.items()}
        return self.changed(named)

    def changed(self, changes: dict[str, bytes | None]) -> Parts:
        """The same with some values changed; None leaves one out."""
        merged = {**self.fields, **changes}
        return replace(self, fields={key: value for key, value in merged.items() if value is not None})

    def with_tensor(self, name: str, **changes: Any) -> Parts:
        """The same with one tensor changed."""
        tensors = [replace(t, **changes) if t.name == name.encode() else t for t in self.tensors]
        return replace(self, tensors=tuple(tensors))

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.fields["general.architecture"][12:].decode()

    def header(self) -> bytes:
        """Everything before the data, unpadded."""
        pairs = [*((key.encode(), value) for key, value in self.fields.items()), *self.extra_fields]
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_fields = len(pairs) if self.n_fields is None else self.n_fields
        parts = [b"GGUF", struct.pack("<IQQ", self.version, n_tensors, n_fields)]
        parts += [struct.pack("<Q", len(key)) + key + value for key, value in pairs]
        offset = 0
        for tensor in self.tensors:
            at = offset if tensor.offset is None else tensor.offset
            shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            parts.append(struct.pack("<Q", len(tensor.name)) + tensor.name + shape)
            parts.append(struct.pack("<IQ", tensor.type, at))
            offset += -(-len(tensor.data) // self.alignment) * self.alignment
        return b"".join(parts)

    def encoded(self) -> bytes:
        """The whole file."""
        head = self.header()
        parts = [head, bytes(-len(head) % self.alignment)]
        for tensor in self.tensors:
            parts += [tensor.data, bytes(-len(tensor.data) % self.alignment)]
        return b"".join(parts)


def take_apart(path: Path) -> Parts:
    """The parts of a sound file."""
    header = read_header(path)
    raw = path.read_bytes()
    tensors = tuple(
        Tensor(t.name.encode(), t.shape, t.type, raw[t.offset : t.offset + t.nbytes]) for t in header.tensors
    )
    return Parts({key: header.metadata.encoded(key) for key in header.metadata}, tensors, header.alignment)


def value(kind: ValueType, number: float) -> bytes:
    """A number as a metadata value."""
    return struct.pack("<I" + _CODES[kind], kind, number)


def u32(number: int) -> bytes:
    """The usual type of a hyper-parameter."""
    return value(T.UINT32, number)


def f32(number: float) -> bytes:
    """The usual type of one that is no count."""
    return value(T.FLOAT32, number)


def text(content: str | bytes) -> bytes:
    """A string as a metadata value."""
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<IQ", T.STRING, len(raw)) + raw


def array(kind: ValueType, numbers: Sequence[float]) -> bytes:
    """An array of numbers as a metadata value."""
    return struct.pack(f"<IIQ{len(numbers)}{_CODES[kind]}", T.ARRAY, kind, len(numbers), *numbers)


def texts(strings: Sequence[str | bytes]) -> bytes:
    """An array of strings as a metadata value."""
    raws = [s.encode() if isinstance(s, str) else s for s in strings]
    return struct.pack("<IIQ", T.ARRAY, T.STRING, len(raws)) + b"".join(struct.pack("<Q", len(r)) + r for r in raws)


def read_texts(encoded: bytes) -> list[bytes]:
    """The strings of such an array."""
    (count,) = struct.unpack_from("<Q", encoded, 8)
    pos, found = 16, []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", encoded, pos)
        found.append(encoded[pos + 8 : pos + 8 + length])
        pos += 8 + length
    return found
