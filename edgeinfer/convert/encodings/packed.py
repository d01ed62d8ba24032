"""Whole numbers of 1 to 8 bits, packed along the rows: compressed-tensors' `pack-quantized`.

The library fills its words without gaps; its older versions left the bits over that a whole number didn't fit into
(vllm-project/compressed-tensors, compressors/pack_quantized). Zero points are packed down the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.checkpoint import Reader, TensorSpec
from edgeinfer.convert.encodings.base import FLOATS, Floats, OnlyFloats, Parts, check, check_matrix, contents, misfit
from edgeinfer.convert.encodings.bits import n_words, unpack, words_with
from edgeinfer.convert.encodings.grid import Grid, check_groups, fit
from edgeinfer.convert.reader import broken

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Packed(OnlyFloats):
    """`(codes - zeros) * scales`, where the middle of the range is zero unless there are zero points."""

    codes: TensorSpec
    scales: TensorSpec
    zeros: TensorSpec | None
    groups: TensorSpec | None
    """Which of its row's scales each column has; None where they take turns evenly."""
    grid: Grid
    bits: int
    word_bits: int
    """Bits of a word that are in use."""

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """Codes, scales and what else there is."""
        return tuple(spec for spec in (self.codes, self.scales, self.zeros, self.groups) if spec)

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        n_rows, length = out.shape
        row_nbytes = self.codes.row_nbytes(self.codes.shape[-1])
        words = reader.read(self.codes, row0 * row_nbytes, n_rows * row_nbytes).view("<u4").reshape(n_rows, -1)
        np.copyto(out, unpack(words, self.bits, 0, length, self.word_bits))
        groups = self._groups(reader)
        if self.zeros is None:
            out -= 1 << (self.bits - 1)
        else:
            self._apply(np.subtract, out, self._zeros(reader, self.zeros, row0, n_rows), groups)
        scales = self.grid.read(reader, self.scales, self.scales.dtype, row0, n_rows)
        self._apply(np.multiply, out, scales, groups)

    def _apply(self, operation: np.ufunc, out: Floats, values: Floats, groups: NDArray[np.int32] | None) -> None:
        if groups is None:
            self.grid.apply(operation, out, values)
        else:
            operation(out, np.take(values, groups, axis=1), out=out)

    def _zeros(self, reader: Reader, zeros: TensorSpec, row0: int, n_rows: int) -> Floats:
        """Shape `(n_rows, columns of the grid)`."""
        if zeros.dtype == "I8":
            # Stored as they are, where the codes have been moved to begin at zero.
            return self.grid.read(reader, zeros, "I8", row0, n_rows) + np.float32(1 << (self.bits - 1))
        begin, end, first = words_with(row0, n_rows, self.bits, self.word_bits)
        row_nbytes = 4 * self.grid.columns
        raw = reader.read(zeros, begin * row_nbytes, (end - begin) * row_nbytes)
        words = raw.view("<u4").reshape(-1, self.grid.columns)
        return unpack(words.T, self.bits, row0 - first, n_rows, self.word_bits).T.astype(np.float32)

    def _groups(self, reader: Reader) -> NDArray[np.int32] | None:
        if self.groups is None:
            return None
        groups = reader.read(self.groups, 0, self.groups.nbytes).view("<i4")
        if int(groups.min()) == -1:  # never set: the library takes it for none
            return None
        check_groups(self.groups, groups, self.grid.columns)
        return groups


def decode(parts: Parts, sizes: Sequence[int]) -> tuple[tuple[int, int], Packed]:
    """The logical shape and the encoding; `sizes` are the bits that the config knows.

    Raises UnusableInputError for tensors that do not fit together.
    """
    codes, scales = parts[".weight_packed"], parts[".weight_scale"]
    zeros, groups = parts.get(".weight_zero_point"), parts.get(".weight_g_idx")
    check(codes, ["I32"])
    check_matrix(codes)
    check(scales, FLOATS)
    shape = n_rows, length = _logical_shape(codes, parts.get(".weight_shape"))
    # Without gaps first, which is how it is written today.
    packings = [(bits, word_bits) for bits in sizes for word_bits in (_WORD_BITS, _WORD_BITS // bits * bits)]
    found = next((p for p in packings if n_words(length, *p) == codes.shape[1]), None)
    if found is None or len(codes.shape) > 2 or n_rows != codes.shape[0]:
        bits = " or ".join(map(str, sizes)) or "unknown"
        raise misfit(codes, f"has the shape {list(codes.shape)}, which is not {n_rows} x {length} at {bits} bits")
    n_bits, word_bits = found
    grid = fit(shape, scales)
    if groups:
        check(groups, ["I32"], (length,))
    if zeros and zeros.dtype == "I8":
        check(zeros, ["I8"], scales.shape)
    elif zeros:
        check(zeros, ["I32"], (n_words(n_rows, n_bits, word_bits), grid.columns))
    return shape, Packed(codes, scales, zeros, groups, grid, n_bits, word_bits)


def _logical_shape(codes: TensorSpec, stored: TensorSpec | None) -> tuple[int, int]:
    if stored is None:
        raise misfit(codes, "comes without .weight_shape")
    check(stored, ["I64", "I32"], (2,))
    rows, length = np.frombuffer(contents(stored, 16), f"<i{stored.nbytes // 2}").tolist()
    if not (rows > 0 and 0 < length <= codes.shape[-1] * _WORD_BITS):
        raise broken(stored, f"the shape {rows} x {length}")
    return rows, length
