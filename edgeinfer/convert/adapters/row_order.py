"""What a rule does with the rows of a matrix, found out by trying: an adapter's factors must go the same way."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.architectures.base import Part

MAX_TRIED_ELEMENTS = 1 << 26
"""Several times a group of rows of the largest known models."""


def row_length(part: Part) -> int:
    """Elements of a row of the part, as the rule sees it; a vector is a column."""
    return part.row_length or (part.shape[-1] if len(part.shape) > 1 else 1)


def n_rows(part: Part) -> int:
    """Rows that the part gives, of that length."""
    there = math.prod(part.shape) // row_length(part) - part.first_row
    count = there if part.n_rows is None else part.n_rows
    return part.transform.n_kept(count) if part.transform else count


def row_order(part: Part) -> NDArray[np.int64] | None:
    """Which rows of the source become the part's rows, in order; None where the rows don't stay what they are."""
    length = row_length(part)
    if length != part.shape[-1] or part.change is not None:
        return None
    if part.transform is None:
        return part.first_row + np.arange(n_rows(part))
    seen = _seen(part)
    if seen is None or seen.size % length:
        return None
    rows = seen.reshape(-1, length)
    if not np.array_equal(rows, rows[:, :1] + np.arange(length)) or (rows[:, 0] % length).any():
        return None
    group = part.transform.rows_per_group
    groups = part.first_row + group * np.arange(n_rows(part) // len(rows))
    return np.asarray(groups[:, None] + rows[:, 0] // length).ravel()


def is_transposed(part: Part) -> bool:
    """Whether the part is the whole matrix with rows and columns exchanged."""
    if part.transform is None or len(part.shape) != 2 or part.transform.rows_per_group != part.shape[0]:
        return False
    seen = _seen(part)
    return seen is not None and np.array_equal(seen.reshape(-1), np.arange(seen.size).reshape(part.shape).T.reshape(-1))


def _seen(part: Part) -> NDArray[np.int32] | None:
    """The numbers of the elements of a group of rows, in the order that the transform sees them in."""
    assert part.transform
    group, length = part.transform.rows_per_group, row_length(part)
    if group * length > MAX_TRIED_ELEMENTS:
        return None
    return np.ascontiguousarray(part.transform.view(np.arange(group * length, dtype=np.int32).reshape(group, length)))
