"""Reads and checks the header of a GGUF file before the C library sees the file.

The format is ggml/include/gguf.h; the limits are those that ggml/src/gguf.cpp and src/llama-model-loader.cpp
enforce, some of them by ending the process.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edgeinfer.errors import NotFoundError, UnusableInputError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.metadata import SCALAR_DTYPES, Field, Metadata, ValueType

__all__ = ["Header", "Metadata", "TensorInfo", "ValueType", "read_header"]

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_NBYTES = 63  # GGML_MAX_NAME counts a final NUL
MAX_KEY_NBYTES = 65535
MAX_ELEMENTS = 2**63 - 1


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. `shape` is ggml's order: the row length (`ne0`) first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    """Bytes from the start of the file."""
    nbytes: int

    @property
    def n_elements(self) -> int:
        """The product of the shape."""
        return int(np.prod(self.shape, dtype=object)) if self.shape else 1


@dataclass(frozen=True, slots=True)
class Header:
    """A checked GGUF header."""

    path: Path
    version: int
    alignment: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_nbytes: int

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.metadata.text("general.architecture")

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors together."""
        return sum(t.n_elements for t in self.tensors)

    def hyperparameter(self, name: str, default: int | float | None = None) -> Any:
        """The number under `<architecture>.<name>`."""
        return self.metadata.number(f"{self.architecture}.{name}", default)


class _Reader:
    """A cursor over the mapped file that refuses to leave it."""

    def __init__(self, path: Path, buffer: mmap.mmap | bytes) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0

    def fail(self, what: str) -> NoReturn:
        raise UnusableInputError(
            f"{self.path}: {what}", "the file is damaged or incomplete: download or convert it again"
        )

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.pos:
            self.fail(f"the file ends inside {what} (needs {nbytes} bytes at {self.pos}, has {self.size - self.pos})")

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.buffer, self.pos)
        self.pos += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.buffer, self.pos)
        self.pos += 8
        return int(value)

    def string(self, what: str, max_nbytes: int) -> str:
        length = self.u64(what)
        if length > max_nbytes:
            self.fail(f"{what} is {length} bytes long, more than {max_nbytes}")
        self.need(length, what)
        raw = self.buffer[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def count(self, what: str, min_nbytes: int) -> int:
        """A count of things that take at least `min_nbytes` each: more than the file can hold is a lie."""
        count = self.u64(f"the number of {what}")
        if count * min_nbytes > self.size - self.pos:
            self.fail(f"claims {count} {what}, more than the file can hold")
        return count

    def field(self, key: str) -> Field:
        value_type, is_array = self.value_type(key), False
        count = 1
        if value_type is ValueType.ARRAY:
            is_array = True
            value_type = self.value_type(key)
            if value_type is ValueType.ARRAY:
                self.fail(f"the value of {key!r} is an array of arrays")
            count = self.count(f"elements of {key!r}", _min_nbytes(value_type))
        pos, squares = self.pos, 0
        if value_type is ValueType.STRING:
            squares = self.skip_strings(count, f"the value of {key!r}")
        else:
            nbytes = count * SCALAR_DTYPES[value_type].itemsize
            self.need(nbytes, f"the value of {key!r}")
            if value_type is ValueType.BOOL and max(self.buffer[pos : pos + nbytes], default=0) > 1:
                self.fail(f"the value of {key!r} is neither true nor false")
            self.pos += nbytes
        return Field(value_type, is_array, pos, self.pos, count, squares)

    def value_type(self, key: str) -> ValueType:
        number = self.u32(f"the type of {key!r}")
        try:
            return ValueType(number)
        except ValueError:
            self.fail(f"the value of {key!r} has the unknown type {number}")

    def skip_strings(self, count: int, what: str) -> int:
        """Go on behind so many strings; returns the sum of the squares of their lengths."""
        # The hot loop of reading a header: vocabularies hold hundreds of thousands of strings.
        pos, size, buffer, unpack, squares = self.pos, self.size, self.buffer, _U64.unpack_from, 0
        try:
            for _ in range(count):
                length = unpack(buffer, pos)[0]
                pos += 8 + length
                squares += length * length
        except (struct.error, OverflowError):
            pos = size + 1
        if pos > size:
            self.fail(f"the file ends inside {what}")
        self.pos = pos
        return squares


def _min_nbytes(value_type: ValueType) -> int:
    return 8 if value_type is ValueType.STRING else SCALAR_DTYPES[value_type].itemsize


def read_header(path: str | Path) -> Header:
    """Read and check a GGUF header, in time linear in its size.

    Raises NotFoundError when there is no such file, UnusableInputError when it is not a sound GGUF file:
    wrong magic or version, a count, length, offset or type that cannot be, names twice, data beyond the end.
    """
    path = Path(path)
    reader = _Reader(path, _map(path))
    if reader.size < 24 or reader.buffer[:4] != MAGIC:
        raise UnusableInputError(
            f"{path}: not a GGUF file"
            + (f" (it begins with {bytes(reader.buffer[:4])!r})" if reader.size else " (it is empty)"),
            "give a .gguf file; of a checkpoint, give the directory to `edgeinfer convert`",
        )
    reader.pos = 4
    version = reader.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "is big-endian" if swapped in (2, 3) else f"has GGUF version {version}"
        raise UnusableInputError(f"{path}: the file {what}", "only little-endian versions 2 and 3 can be read")
    n_tensors = reader.count("tensors", 8 + 4 + 8 + 4 + 8)
    n_fields = reader.count("metadata pairs", 8 + 4 + 1)

    fields: dict[str, Field] = {}
    for _ in range(n_fields):
        key = reader.string("a metadata key", MAX_KEY_NBYTES)
        if key in fields:
            reader.fail(f"the metadata key {key!r} stands twice")
        fields[key] = reader.field(key)
    metadata = Metadata(reader.buffer, fields)
    alignment = _alignment(reader, metadata)
    infos = [_tensor_info(reader) for _ in range(n_tensors)]
    data_offset = -(-reader.pos // alignment) * alignment
    tensors = _check_layout(reader, infos, data_offset, alignment)
    return Header(path, version, alignment, metadata, tensors, data_offset, reader.size)


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():
            raise UnusableInputError(f"{path}: is not an ordinary file", "save it to a file first")
        with open(path, "rb") as file:
            if file.seek(0, 2) == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file", "check the path") from None
    except IsADirectoryError:
        raise UnusableInputError(f"{path}: is a directory", "give the .gguf file in it") from None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the permissions") from None


def _alignment(reader: _Reader, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    if metadata.value_type(key) != (ValueType.UINT32, None):
        reader.fail(f"{key} is not a 32-bit number")
    alignment: int = metadata[key]
    if alignment == 0 or alignment & (alignment - 1):
        reader.fail(f"{key} is {alignment}, not a power of two")
    return alignment


def _tensor_info(reader: _Reader) -> TensorInfo:
    """One entry of the tensor table, its offset still relative to the data section."""
    name = reader.string("a tensor name", MAX_NAME_NBYTES)
    n_dims = reader.u32(f"tensor {name!r}")
    if n_dims > MAX_DIMS:
        reader.fail(f"tensor {name!r} has {n_dims} dimensions, more than {MAX_DIMS}")
    shape = tuple(reader.u64(f"tensor {name!r}") for _ in range(n_dims))
    number = reader.u32(f"tensor {name!r}")
    offset = reader.u64(f"tensor {name!r}")
    try:
        ggml_type = GGMLType(number)
    except ValueError:
        reader.fail(f"tensor {name!r} has the unknown type {number}")
    n_elements = 1
    for length in shape:
        n_elements *= length
        if not 0 < length <= MAX_ELEMENTS or n_elements > MAX_ELEMENTS:
            reader.fail(f"tensor {name!r} has the impossible shape {list(shape)}")
    row_length = shape[0] if shape else 1
    if row_length % ggml_type.block_length:
        reader.fail(
            f"tensor {name!r} has rows of {row_length} elements, which do not divide into {ggml_type.name} blocks"
        )
    nbytes = n_elements // ggml_type.block_length * ggml_type.block_nbytes
    return TensorInfo(name, shape, ggml_type, offset, nbytes)


def _check_layout(reader: _Reader, infos: list[TensorInfo], data_offset: int, alignment: int) -> tuple[TensorInfo, ...]:
    """The C library wants the tensors gapless, in the table's order, each padded to the alignment."""
    seen: set[str] = set()
    expected = 0
    placed = []
    for info in infos:
        if info.name in seen:
            reader.fail(f"tensor {info.name!r} stands twice")
        seen.add(info.name)
        if info.offset != expected:
            reader.fail(f"tensor {info.name!r} has offset {info.offset}, expected {expected}")
        end = data_offset + info.offset + info.nbytes
        if end > reader.size:
            reader.fail(f"tensor {info.name!r} ends at byte {end}, the file at {reader.size}")
        expected += -(-info.nbytes // alignment) * alignment
        placed.append(TensorInfo(info.name, info.shape, info.type, data_offset + info.offset, info.nbytes))
    return tuple(placed)
