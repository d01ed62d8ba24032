"""What a rule does with the elements of a matrix, found out by trying: an adapter's factors must go the same way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.architectures.base import Part
from edgeinfer.convert.architectures.transforms import Elementwise

MAX_TRIED_ELEMENTS = 1 << 26
"""Several times a group of rows of the largest known models."""


@dataclass(frozen=True, slots=True)
class Order:
    """Element (i, j) of a part is `factor` times element (rows[i], columns[j]) of the source."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64] | None = None
    """None: as they are."""
    factor: float = 1.0


def row_length(part: Part) -> int:
    """Elements of a row of the part, as the rule sees it; a vector is a column."""
    return part.row_length or (part.shape[-1] if len(part.shape) > 1 else 1)


def n_rows(part: Part) -> int:
    """Rows that the part gives, of that length."""
    there = math.prod(part.shape) // row_length(part) - part.first_row
    count = there if part.n_rows is None else part.n_rows
    return part.transform.n_kept(count) if part.transform else count


def order_of(part: Part) -> Order | None:
    """Where the part's elements come from; None where rows and columns don't stay apart, or become something else."""
    length, factor = row_length(part), _factor(part.change)
    if length != part.shape[-1] or factor is None:
        return None
    if part.transform is None:
        return Order(part.first_row + np.arange(n_rows(part)), None, factor)
    seen = _seen(part)
    if seen is None or seen.size % length:
        return None
    rows, columns = np.divmod(seen.reshape(-1, length), length)
    if (rows != rows[:, :1]).any() or (columns != columns[:1]).any():
        return None
    groups = part.first_row + part.transform.rows_per_group * np.arange(n_rows(part) // len(rows))
    is_moved = not np.array_equal(columns[0], np.arange(length))
    return Order((groups[:, None] + rows[:, 0]).ravel(), columns[0].astype(np.int64) if is_moved else None, factor)


def is_transposed(part: Part) -> bool:
    """Whether the part is the whole matrix with rows and columns exchanged."""
    if part.transform is None or len(part.shape) != 2 or part.transform.rows_per_group != part.shape[0]:
        return False
    seen = _seen(part)
    if seen is None or seen.size != math.prod(part.shape) or part.change is not None:
        return False
    return np.array_equal(seen.reshape(-1), np.arange(seen.size).reshape(part.shape).T.reshape(-1))


def _seen(part: Part) -> NDArray[np.int32] | None:
    """The numbers of the elements of a group of rows, in the order that the transform sees them in."""
    assert part.transform
    group, length = part.transform.rows_per_group, row_length(part)
    if group * length > MAX_TRIED_ELEMENTS:
        return None
    return np.ascontiguousarray(part.transform.view(np.arange(group * length, dtype=np.int32).reshape(group, length)))


def _factor(change: Elementwise | None) -> float | None:
    """What the elements are multiplied with; None where they become something else."""
    if change is None:
        return 1.0
    tried = np.array([1, 0, -2, 0.5, 3], np.float32)
    found = tried.copy()
    change(found)
    return float(found[0]) if np.allclose(found, found[0] * tried, rtol=1e-6, atol=0) else None
