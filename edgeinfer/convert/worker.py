"""What one thread does with a slab of rows: read, check, reorder, widen, quantize, write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.reader import RAW, SourceReader, at_least, broken, check_finite, widen
from edgeinfer.convert.resolve import PartPlan, TensorPlan
from edgeinfer.errors import UnusableInputError
from edgeinfer.finite import is_finite
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
        return self.part.input_nbytes(self.row0, self.n_rows)


_MAX_F16 = 65504.0
_MAX_ON_GRID = 1e6
"""The quantizers that look up a grid end the process when their sums overflow; F16 scales are long infinite then."""


class Worker:
    """One thread's buffers and open files."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._reader = SourceReader()
        self._source = np.empty(0, np.float32)
        self._wide = np.empty(0, np.float32)
        self._out = np.empty(0, np.uint8)

    def close(self) -> None:
        """Close the open files."""
        self._reader.close()

    def do(self, slab: Slab) -> None:
        """Write what becomes of a slab; raises what `stream.write` says."""
        if _is_kept(slab):
            write_at(slab.output, np.ascontiguousarray(self._read_rows(slab, is_kept=True)), slab.out_offset)
            return
        rows = self.rows(slab)
        _check_range(slab, rows)
        out = self._out = at_least(self._out, slab.out_nbytes)
        out = out[: slab.out_nbytes]
        self._quantize(slab, rows, out)
        write_at(slab.output, out, slab.out_offset)

    def rows(self, slab: Slab) -> NDArray[np.float32]:
        """The slab's rows of the tensor, shape `(rows, row length)`, until the next call; raises as `do` does."""
        rows: NDArray[np.float32] = self._read_rows(slab, is_kept=False)
        if slab.part.change:
            slab.part.change(rows)
            _check_changed(slab, rows)
        return rows

    def _read_rows(self, slab: Slab, *, is_kept: bool) -> NDArray[Any]:
        self._reader.begin()
        return self._encoded(slab, is_kept) if slab.part.spec.encoding else self._numbers(slab, is_kept)

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
        spec = slab.part.spec
        row_nbytes = spec.row_nbytes(slab.part.row_length)
        raw = self._reader.read(spec, row_nbytes * slab.row0, row_nbytes * slab.n_rows)
        bits = raw.view(RAW.get(spec.dtype, np.uint8)).reshape(slab.n_rows, -1)
        self._check(slab, bits)
        view = slab.part.transform.view(bits) if slab.part.transform else bits
        return view if is_kept else self._widened(slab, view)

    def _encoded(self, slab: Slab, is_kept: bool) -> NDArray[Any]:
        """The same of a part that is made of several stored tensors: blocks of its type, or F32."""
        part, encoding = slab.part, slab.part.spec.encoding
        assert encoding
        if is_kept and part.type.is_quantized:
            rows: NDArray[Any] = encoding.repack(self._reader, slab.row0, slab.n_rows)
        else:
            self._source = at_least(self._source, slab.n_rows * part.row_length)
            rows = self._source[: slab.n_rows * part.row_length].reshape(slab.n_rows, -1)
            self._reader.floats(part.spec, slab.row0, rows)
        view = part.transform.view(rows) if part.transform else rows
        if is_kept:
            return view
        if part.transform:
            self._wide = at_least(self._wide, view.size)
            np.copyto(self._wide[: view.size].reshape(view.shape), view)
            view = self._wide[: view.size]
        return view.reshape(-1, slab.tensor.shape[0])

    def _check(self, slab: Slab, bits: NDArray[Any]) -> None:
        spec = slab.part.spec
        if spec.dtype in RAW:
            check_finite(spec, spec.dtype, bits, slab.row0)
        elif not is_finite(GGMLType[spec.dtype], bits):
            raise broken(spec, f"values that are not finite near row {slab.row0}")

    def _widened(self, slab: Slab, view: NDArray[Any]) -> NDArray[np.float32]:
        """The elements of `view` in its order as F32, shape `(rows, row length of the output)`."""
        dtype = slab.part.spec.dtype
        size = view.size if dtype in RAW else slab.n_rows * slab.part.row_length
        self._wide = at_least(self._wide, size)
        wide = self._wide[:size]
        if dtype in RAW:
            widen(dtype, view, wide.reshape(view.shape))
        else:
            self._quantizer.dequantize(GGMLType[dtype], view, wide)
        shape = slab.tensor.shape
        return wide.reshape(-1, shape[0] if len(shape) > 1 else 1)


def _is_kept(slab: Slab) -> bool:
    """Whether the result has the input's elements, at most in another order."""
    return slab.tensor.type == slab.part.type and not slab.part.change


def _check_changed(slab: Slab, rows: NDArray[np.float32]) -> None:
    if not np.isfinite(rows).all():
        raise broken(slab.part.spec, f"values near row {slab.row0} of which infinite ones are computed")


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


def write_at(descriptor: int, data: Any, offset: int) -> None:
    """All bytes of a buffer. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
