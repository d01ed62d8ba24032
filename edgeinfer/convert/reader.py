"""One thread's access to the tensors of the source: open files, buffers that are used again, and numbers as F32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.checkpoint import TensorSpec
from edgeinfer.errors import UnusableInputError
from edgeinfer.finite import INFINITY
from edgeinfer.ggml_types import GGMLType

RAW: dict[str, np.dtype[Any]] = {"F32": np.dtype("<u4"), "F16": np.dtype("<u2"), "BF16": np.dtype("<u2")}
"""The bits of floats as unsigned integers, by their type."""
_MAGNITUDE = {"F32": np.uint32(0x7FFFFFFF), "F16": np.uint16(0x7FFF), "BF16": np.uint16(0x7FFF)}
_MAX_FILES = 16


class SourceReader:
    """Implements `checkpoint.Reader`. What it has given is valid until `begin`."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._buffers: list[NDArray[np.uint8]] = []
        self._n_used = 0

    def begin(self) -> None:
        """Take all buffers back."""
        self._n_used = 0

    def close(self) -> None:
        """Close the open files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, spec: TensorSpec, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See checkpoint.Reader. Raises UnusableInputError when the file has gone or become shorter."""
        buffer = self._buffer(nbytes)
        self._fill(spec, ((buffer, offset),))
        return buffer

    def columns(self, spec: TensorSpec, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See checkpoint.Reader. Raises UnusableInputError when the file has gone or become shorter."""
        row_nbytes = spec.row_nbytes(spec.shape[-1])
        n_rows = spec.nbytes // row_nbytes
        if nbytes == row_nbytes:
            return self.read(spec, 0, spec.nbytes).reshape(n_rows, nbytes)
        out = self._buffer(n_rows * nbytes).reshape(n_rows, nbytes)
        self._fill(spec, ((row, offset + i * row_nbytes) for i, row in enumerate(out)))
        return out

    def floats(self, spec: TensorSpec, row0: int, out: NDArray[np.float32]) -> None:
        """See checkpoint.Reader. Raises UnusableInputError for a number that is not finite."""
        if spec.encoding is not None:
            with np.errstate(all="ignore"):  # what comes out is checked
                spec.encoding.dequantize(self, row0, out)
            check_finite(spec, "F32", out.view(np.uint32), row0)
            return
        row_nbytes = spec.row_nbytes(out.shape[1])
        bits = self.read(spec, row0 * row_nbytes, len(out) * row_nbytes).view(RAW[spec.dtype]).reshape(out.shape)
        check_finite(spec, spec.dtype, bits, row0)
        widen(spec.dtype, bits, out)

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        if self._n_used == len(self._buffers):
            self._buffers.append(np.empty(0, np.uint8))
        buffer = self._buffers[self._n_used] = at_least(self._buffers[self._n_used], nbytes)
        self._n_used += 1
        return buffer[:nbytes]

    def _fill(self, spec: TensorSpec, pieces: Any) -> None:
        try:
            descriptor = self._open(spec.path)
            for piece, offset in pieces:
                _read_at(descriptor, piece.data, spec.offset + offset)
        except (OSError, EOFError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it has become shorter"
            raise UnusableInputError(
                f"{spec.path}: tensor {spec.name} cannot be read ({reason})", "was it changed meanwhile?"
            ) from None

    def _open(self, path: Path) -> int:
        descriptor = self._files.get(path)
        if descriptor is None:
            if len(self._files) == _MAX_FILES:
                self.close()
            descriptor = self._files[path] = os.open(path, os.O_RDONLY)
        return descriptor


def whole(spec: TensorSpec) -> bytes:
    """All bytes of a small stored tensor. Raises UnusableInputError when they cannot be read."""
    reader = SourceReader()
    try:
        return reader.read(spec, 0, spec.nbytes).tobytes()
    finally:
        reader.close()


def at_least(buffer: NDArray[Any], size: int) -> NDArray[Any]:
    """The buffer, or a new one if it is too small."""
    return buffer if buffer.size >= size else np.empty(size, buffer.dtype)


def widen(dtype: str, bits: NDArray[Any], out: NDArray[np.float32]) -> None:
    """The floats of a type, given as unsigned integers, as F32 into `out` of the same shape."""
    match dtype:
        case "BF16":
            np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)
        case "F16":
            np.copyto(out, bits.view(np.float16))
        case "F32":
            np.copyto(out, bits.view(np.float32))


def check_finite(spec: TensorSpec, dtype: str, bits: NDArray[Any], row0: int) -> None:
    """Raise UnusableInputError for the first row with a NaN or an infinity among floats given as unsigned integers."""
    # The quantizers let many a NaN pass, and every one spoils a whole block.
    infinity = int(INFINITY[GGMLType[dtype]])
    magnitude = bits & _MAGNITUDE[dtype]
    if int(magnitude.max(initial=0)) < infinity:
        return
    row = int((magnitude >= infinity).any(axis=1).argmax())
    kind = "NaN" if int(magnitude[row].max()) > infinity else "an infinite value"
    raise broken(spec, f"{kind} in row {row0 + row}")


def broken(spec: TensorSpec, what: str) -> UnusableInputError:
    """The error for contents that cannot be."""
    return UnusableInputError(
        f"{spec.path}: tensor {spec.name} has {what}",
        "the weights are broken: get them again, or the checkpoint of another training step",
    )


def _read_at(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        got = os.preadv(descriptor, [view], offset)
        if got == 0:
            raise EOFError
        view, offset = view[got:], offset + got
