"""What one thread does with a slab of rows: read, check, reorder, widen, quantize, write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert import mxfp4
from edgeinfer.convert.checkpoint import TensorSpec
from edgeinfer.convert.resolve import PartPlan, TensorPlan
from edgeinfer.errors import UnusableInputError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.types import Quantizer


@dataclass(frozen=True, slots=True)
class Slab:
    """Rows `[row0, row0 + n_rows)` of a part of a tensor, and where their result goes."""

    tensor: TensorPlan
    part: PartPlan
    row0: int
    n_rows: int
    out_row0: int
    """The first row of the result, counted through the whole tensor."""
    output: int
    """The descriptor of the file that the result goes to."""
    out_offset: int
    """Bytes from the start of the file."""
    out_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of input."""
        return self.n_rows * self.part.row_nbytes


_RAW: dict[str, np.dtype[Any]] = {"F32": np.dtype("<u4"), "F16": np.dtype("<u2"), "BF16": np.dtype("<u2")}
# The bits of a positive infinity; without the sign bit, every NaN lies above it and every number below.
_INFINITY = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
_MAGNITUDE = {"F32": np.uint32(0x7FFFFFFF), "F16": np.uint16(0x7FFF), "BF16": np.uint16(0x7FFF)}
_MAX_F16 = 65504.0
_MAX_ON_GRID = 1e6
"""The quantizers that look up a grid end the process when their sums overflow; F16 scales are long infinite then."""


class Worker:
    """One thread's buffers and open file."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._raw = {name: np.empty(0, np.uint8) for name in ("weights", "scales")}
        self._wide = np.empty(0, np.float32)
        self._out = np.empty(0, np.uint8)
        self._path: Path | None = None
        self._input = -1

    def close(self) -> None:
        """Close the open file."""
        if self._input >= 0:
            os.close(self._input)
        self._input, self._path = -1, None

    def do(self, slab: Slab) -> None:
        """Write what becomes of a slab; raises what `stream.write` says."""
        if slab.tensor.type == slab.part.type and not slab.tensor.add:
            write_at(slab.output, np.ascontiguousarray(self._read_rows(slab, is_kept=True)), slab.out_offset)
            return
        rows = self.rows(slab)
        _check_range(slab, rows)
        out = self._out = _at_least(self._out, slab.out_nbytes)
        out = out[: slab.out_nbytes]
        self._quantize(slab, rows, out)
        write_at(slab.output, out, slab.out_offset)

    def rows(self, slab: Slab) -> NDArray[np.float32]:
        """The slab's rows of the tensor, shape `(rows, row length)`, until the next call; raises as `do` does."""
        rows: NDArray[np.float32] = self._read_rows(slab, is_kept=False)
        if slab.tensor.add:
            rows += np.float32(slab.tensor.add)
        return rows

    def _read_rows(self, slab: Slab, *, is_kept: bool) -> NDArray[Any]:
        return self._blocks(slab, is_kept) if slab.part.scales else self._numbers(slab, is_kept)

    def _quantize(self, slab: Slab, rows: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
        tensor, importance = slab.tensor, slab.tensor.importance
        if importance is None:
            self._quantizer.quantize(tensor.type, rows, out)
            return
        # Each matrix of a stack has its own weights, so no call goes beyond one.
        row_length, rows_per_matrix = tensor.shape[:2]
        row_nbytes = tensor.type.row_nbytes(row_length)
        done = 0
        while done < len(rows):
            matrix, row = divmod(slab.out_row0 + done, rows_per_matrix)
            end = min(len(rows), done + rows_per_matrix - row)
            weights = importance.weights(matrix, row_length)
            self._quantizer.quantize(tensor.type, rows[done:end], out[done * row_nbytes : end * row_nbytes], weights)
            done = end

    def _numbers(self, slab: Slab, is_kept: bool) -> NDArray[Any]:
        """The part's rows in their new order, as they are or as F32."""
        raw = self._read(slab, slab.part.spec, slab.part.row_nbytes)
        self._check(slab, raw)
        view = slab.part.transform.view(raw) if slab.part.transform else raw
        return view if is_kept else self._widened(slab, view)

    def _blocks(self, slab: Slab, is_kept: bool) -> NDArray[Any]:
        """The same of a part that is MXFP4: ggml's blocks, or F32."""
        assert slab.part.scales
        n_blocks = slab.part.row_length // mxfp4.BLOCK_LENGTH
        packed = self._read(slab, slab.part.spec, n_blocks * mxfp4.PACKED_NBYTES)
        scales = self._read(slab, slab.part.scales, n_blocks)
        _check_scales(slab, scales)
        if slab.part.transform:
            packed, scales = (np.ascontiguousarray(slab.part.transform.view(rows)) for rows in (packed, scales))
        if is_kept:
            return mxfp4.repack(packed, scales)
        self._wide = _at_least(self._wide, 2 * packed.size)
        wide = self._wide[: 2 * packed.size].reshape(len(packed), -1)
        mxfp4.dequantize(packed, scales, wide)
        return wide

    def _read(self, slab: Slab, spec: TensorSpec, row_nbytes: int) -> NDArray[Any]:
        """The bits of the slab's rows of `spec` as unsigned integers, a row each, until the next call."""
        nbytes = slab.n_rows * row_nbytes
        name = "scales" if spec is slab.part.scales else "weights"
        buffer = self._raw[name] = _at_least(self._raw[name], nbytes)
        try:
            self._open(spec.path)
            _read_at(self._input, buffer[:nbytes].data, spec.offset + row_nbytes * slab.row0)
        except (OSError, EOFError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it has become shorter"
            raise UnusableInputError(
                f"{spec.path}: tensor {spec.name} cannot be read ({reason})", "was it changed meanwhile?"
            ) from None
        rows: NDArray[Any] = buffer[:nbytes].view(_RAW.get(spec.dtype, np.uint8))
        return rows.reshape(slab.n_rows, -1)

    def _open(self, path: Path) -> None:
        if path != self._path:
            self.close()
            self._input, self._path = os.open(path, os.O_RDONLY), path

    def _check(self, slab: Slab, raw: NDArray[Any]) -> None:
        spec = slab.part.spec
        if spec.dtype in _INFINITY:
            _check_finite(slab, raw)
        elif not self._quantizer.is_valid(GGMLType[spec.dtype], raw):
            raise _broken(spec, f"values that are not finite near row {slab.row0}")

    def _widened(self, slab: Slab, view: NDArray[Any]) -> NDArray[np.float32]:
        """The elements of `view` in its order as F32, shape `(rows, row length of the output)`."""
        dtype = slab.part.spec.dtype
        size = view.size if dtype in _INFINITY else slab.n_rows * slab.part.row_length
        self._wide = _at_least(self._wide, size)
        wide = self._wide[:size]
        match dtype:
            case "BF16":
                np.left_shift(view, 16, out=wide.reshape(view.shape).view(np.uint32), dtype=np.uint32)
            case "F16":
                np.copyto(wide.reshape(view.shape), view.view(np.float16))
            case "F32":
                np.copyto(wide.reshape(view.shape), view.view(np.float32))
            case _:
                self._quantizer.dequantize(GGMLType[dtype], view, wide)
        shape = slab.tensor.shape
        return wide.reshape(-1, shape[0] if len(shape) > 1 else 1)


def _at_least(buffer: NDArray[Any], size: int) -> NDArray[Any]:
    return buffer if buffer.size >= size else np.empty(size, buffer.dtype)


def _check_finite(slab: Slab, raw: NDArray[Any]) -> None:
    # The quantizers let many a NaN pass, and every one spoils a whole block.
    spec = slab.part.spec
    infinity = _INFINITY[spec.dtype]
    magnitude = raw & _MAGNITUDE[spec.dtype]
    if int(magnitude.max(initial=0)) < infinity:
        return
    row = int((magnitude >= infinity).any(axis=1).argmax())
    kind = "NaN" if int(magnitude[row].max()) > infinity else "an infinite value"
    raise _broken(spec, f"{kind} in row {slab.row0 + row}")


def _broken(spec: TensorSpec, what: str) -> UnusableInputError:
    return UnusableInputError(
        f"{spec.path}: tensor {spec.name} has {what}",
        "the weights are broken: get them again, or the checkpoint of another training step",
    )


def _check_scales(slab: Slab, scales: NDArray[np.uint8]) -> None:
    if int(scales.max(initial=0)) > mxfp4.MAX_SCALE:
        row = int((scales > mxfp4.MAX_SCALE).any(axis=1).argmax())
        assert slab.part.scales
        raise UnusableInputError(
            f"{slab.part.scales.path}: tensor {slab.part.scales.name} has an infinite scale in row {slab.row0 + row}",
            "the weights are broken: get them again",
        )


def _check_range(slab: Slab, rows: NDArray[np.float32]) -> None:
    kind = slab.tensor.type
    limit = _limit(kind)
    largest = max(float(rows.max(initial=0)), -float(rows.min(initial=0))) if limit < np.inf else 0
    if largest > limit:
        row = int((np.abs(rows) > limit).any(axis=1).argmax())
        raise UnusableInputError(
            f"tensor {slab.tensor.name} has values up to {largest:.3g} near row {slab.row0 + row}, too large for "
            f"{kind.name}",
            "use -t BF16",
        )


def fits_range(kind: GGMLType, largest: float) -> bool:
    """Whether values of at most this magnitude can become this type."""
    return largest <= _limit(kind)


def _limit(kind: GGMLType) -> float:
    return _MAX_F16 if kind is GGMLType.F16 else _MAX_ON_GRID if kind.name.startswith("IQ") else np.inf


def _read_at(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        got = os.preadv(descriptor, [view], offset)
        if got == 0:
            raise EOFError
        view, offset = view[got:], offset + got


def write_at(descriptor: int, data: Any, offset: int) -> None:
    """All bytes of a buffer. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
