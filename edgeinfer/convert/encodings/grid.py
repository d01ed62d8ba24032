"""Scales: one number for each block of rows and columns of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.checkpoint import Reader, TensorSpec
from edgeinfer.convert.encodings.base import Floats, misfit, numbers
from edgeinfer.convert.reader import broken

Block = tuple[int, int]
"""Rows and columns that share a scale."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Which scale an element has. Rows are those of all matrices of a stack, one after the other."""

    matrix_rows: int
    block_rows: int
    block_columns: int
    rows: int
    """Rows of scales of a matrix."""
    columns: int
    """Scales in each of them."""

    def rows_of(self, row0: int, n_rows: int) -> NDArray[np.int64]:
        """The row of scales of each of the rows `[row0, row0 + n_rows)`, ascending."""
        matrix, row = np.divmod(np.arange(row0, row0 + n_rows), self.matrix_rows)
        rows: NDArray[np.int64] = matrix * self.rows + row // self.block_rows
        return rows

    def read(self, reader: Reader, spec: TensorSpec, dtype: str, row0: int, n_rows: int) -> Floats:
        """The scales (or whatever else is stored like them) of rows of the matrix, shape `(n_rows, columns)`."""
        rows = self.rows_of(row0, n_rows)
        first, count = int(rows[0]), int(rows[-1] - rows[0]) + 1
        row_nbytes = spec.row_nbytes(self.columns)
        raw = reader.read(spec, first * row_nbytes, count * row_nbytes).reshape(count, row_nbytes)
        return numbers(dtype, raw)[rows - first]

    def apply(self, operation: Callable[..., Any], out: Floats, values: Floats) -> None:
        """`out = operation(out, values)`, where a row of `values` has one number for each block of columns."""
        by_block(operation, out, values, self.block_columns)


def by_block(operation: Callable[..., Any], out: Floats, values: Floats, length: int) -> None:
    """`out = operation(out, values)`, where each of `values` stands for `length` elements of its row (or the rest)."""
    if out.shape[1] % length == 0:
        blocks = out.reshape(len(out), -1, length)
        operation(blocks, values[..., None], out=blocks)
    else:
        operation(out, np.repeat(values, length, axis=1)[:, : out.shape[1]], out=out)


def check_groups(spec: TensorSpec, groups: NDArray[np.int32], count: int) -> None:
    """Raise UnusableInputError unless all that `spec` says are numbers of groups, of which there are `count`."""
    least, most = int(groups.min()), int(groups.max())
    if least < 0 or most >= count:
        raise broken(spec, f"group {least if least < 0 else most}, but there are {count}")


def fit(shape: tuple[int, ...], scales: TensorSpec, blocks: Sequence[Block] = ()) -> Grid:
    """The grid that gives matrices of `shape` as many scales as there are.

    `blocks` are what the config may say; otherwise a scale is for a matrix, a row or equal parts of rows. Raises
    UnusableInputError where none fits.
    """
    n_rows, length = shape[-2:]
    if scales.n_elements == 1:
        total = math.prod(shape[:-1])
        return Grid(total, total, length, 1, 1)
    there = scales.shape + (1,) * (len(shape) - len(scales.shape))
    if there[:-2] == shape[:-2] and len(there) == len(shape):
        rows, columns = there[-2:]
        for block_rows, block_columns in blocks:
            if (rows, columns) == (-(-n_rows // block_rows), -(-length // block_columns)):
                return Grid(n_rows, block_rows, min(block_columns, length), rows, columns)
        if rows in (1, n_rows) and columns and length % columns == 0:
            return Grid(n_rows, n_rows // rows, length // columns, rows, columns)
    known = "".join(f", blocks of {rows} x {columns}" for rows, columns in blocks)
    raise misfit(scales, f"has the shape {list(scales.shape)}, which is no grid over a weight of {list(shape)}{known}")
