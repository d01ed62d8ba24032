"""What a rule does with rows and elements on their way into the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

View = Callable[[NDArray[Any]], NDArray[Any]]
Elementwise = Callable[[NDArray[np.float32]], None]
"""Computes something of each element, in its place."""


@dataclass(frozen=True, slots=True)
class RowTransform:
    """A reordering or choice of rows that works on groups of `rows_per_group`, so that a slab of groups is enough.

    `view` maps rows of shape `(n, row length)`, `n` a multiple of `rows_per_group`, to a view of the elements of
    `rows_kept` rows per group in their new order (of any shape); nothing is copied.
    """

    rows_per_group: int
    view: View
    rows_kept: int = 0
    """0 keeps all of them."""

    def n_kept(self, n_rows: int) -> int:
        """How many of `n_rows` rows' worth of elements the view has."""
        return n_rows // self.rows_per_group * (self.rows_kept or self.rows_per_group)

    def keeps_rows(self, row_length: int) -> bool:
        """Whether rows stay whole, so that it can be done to rows of blocks as well as to rows of numbers."""
        view = self.view(np.empty((self.rows_per_group, row_length), np.uint8))
        return view.shape[-1] == row_length and view.strides[-1] == 1


def interleave_halves(head_dim: int) -> RowTransform:
    """Per head, rows `0 … d/2-1` and `d/2 … d-1` become pairs `(0, d/2), (1, d/2 + 1), …`.

    Hugging Face rotates halves of a head against each other, ggml's "normal" rope rotates neighbours
    (llama.cpp: conversion/llama.py, permute).
    """
    return RowTransform(head_dim, lambda rows: rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2))


def some_rows(rows_per_group: int, first: int, end: int) -> RowTransform:
    """Of each group of rows those from `first` to before `end`."""
    return RowTransform(
        rows_per_group,
        lambda rows: rows.reshape(-1, rows_per_group, rows.shape[1])[:, first:end],
        rows_kept=end - first,
    )


def transposed(n_rows: int) -> RowTransform:
    """Rows and columns exchanged, a whole matrix of `n_rows` at a time."""
    return RowTransform(n_rows, lambda rows: rows.reshape(-1, n_rows, rows.shape[1]).swapaxes(1, 2))


def transposed_columns(n_rows: int, columns: slice) -> RowTransform:
    """Half of the columns of matrices of `n_rows`, which is even, as rows: every other one, or those of one side."""
    return RowTransform(
        n_rows,
        lambda rows: rows.reshape(-1, n_rows, rows.shape[1])[:, :, columns].swapaxes(1, 2),
        rows_kept=n_rows // 2,  # in elements: half of them
    )


def scaled(*factors: float) -> Elementwise:
    """Times each factor, one after the other, in F32 as llama.cpp's script does it."""

    def scale(rows: NDArray[np.float32]) -> None:
        for factor in factors:
            rows *= np.float32(factor)

    return scale


def plus_one(rows: NDArray[np.float32]) -> None:
    """What a norm multiplies by that is stored less 1."""
    rows += np.float32(1)


def negative_exponential(rows: NDArray[np.float32]) -> None:
    """`-exp(x)`: how fast the state of a recurrent layer decays, whose logarithm checkpoints have.

    Correctly rounded. torch's is off by a unit in the last place in half a percent of all cases.
    """
    with np.errstate(over="ignore"):  # what is infinite then is refused by who reads it
        np.exp(rows, out=rows, dtype=np.float64, casting="same_kind")
    np.negative(rows, out=rows)
