"""Watches a forward pass and sums up the squares of what each weight is multiplied with.

The definitions are those of llama.cpp's tools/imatrix: matrix products of the layers with at least 16 rows, and every
product with experts; sums in double precision here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnusableInputError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.native.library import llama
from edgeinfer.native.tensors import Tensor, prove_layout, tensor_at, values, weight_name
from edgeinfer.types import Importance

MIN_ROWS = 16
MAX_SUM = float(np.finfo(np.float32).max)


class ActivationSums:
    """Collects over all passes of the contexts that were given its `callback`."""

    def __init__(self) -> None:
        self._mul_mat, self._mul_mat_id = prove_layout()
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._failure: BaseException | None = None
        self._last_input, self._last_squares = 0, np.empty(0)
        self.callback = llama.ggml_backend_sched_eval_callback(self._observe)
        """For a context's `cb_eval`; must outlive it."""

    def entries(self) -> dict[str, Importance]:
        """What was collected, by the names of the weights."""
        return {
            name: Importance(sums.ravel().astype(np.float32), self._counts[name].astype(np.float32))
            for name, sums in self._sums.items()
        }

    def check(self) -> None:
        """Raise what went wrong in the callback since the last call; to be called after each pass."""
        self._last_input = 0
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _observe(self, address: int, ask: bool, _: Any) -> bool:
        """Asked: is this operation of interest? Told: it has been computed. False then ends the pass."""
        try:
            node = tensor_at(address)
            if ask:
                return self._is_wanted(node)
            name = weight_name(tensor_at(node.src[0]))
            if node.op == self._mul_mat_id:
                self._add_routed(name, node)
            else:
                self._add(name, node)
        except BaseException as error:  # an exception cannot pass through C; `check` raises it again
            self._failure = self._failure or error
            return False
        return True

    def _is_wanted(self, node: Tensor) -> bool:
        if node.op != self._mul_mat:
            return bool(node.op == self._mul_mat_id)
        rows = tensor_at(node.src[1])
        is_wide = rows.ne[1] >= MIN_ROWS and rows.type == GGMLType.F32
        return is_wide and weight_name(tensor_at(node.src[0])).startswith("blk.")

    def _add(self, name: str, node: Tensor) -> None:
        weight = tensor_at(node.src[0])
        n_matrices = weight.ne[2] * weight.ne[3]
        if node.src[1] != self._last_input:  # queries, keys and values have the same, gate and up too
            self._last_input, self._last_squares = node.src[1], _sum_of_squares(values(node.src[1]))
        squares, n_rows = self._last_squares, tensor_at(node.src[1]).ne[1]
        sums = self._of(name, n_matrices, squares.shape[-1], n_counts=1)
        for i in range(len(squares)):
            for j in range(len(squares[i])):  # a weight of fewer matrices serves several
                sums[i % weight.ne[3] * weight.ne[2] + j % weight.ne[2]] += squares[i, j]
        self._counts[name] += n_rows * (squares.size // squares.shape[-1]) // n_matrices
        self._check_finite(name, sums)

    def _add_routed(self, name: str, node: Tensor) -> None:
        """Each token's row, or one of its rows, goes to the experts that `ids` names for it."""
        rows = values(node.src[1])[0]  # (tokens, rows of a token, row length)
        experts = values(node.src[2])[0, 0]  # (tokens, experts per token)
        n_experts = tensor_at(node.src[0]).ne[2]
        sums = self._of(name, n_experts, rows.shape[-1], n_counts=n_experts)
        which_row = np.broadcast_to(np.arange(experts.shape[1]) % rows.shape[1], experts.shape)
        for expert in np.unique(experts):
            tokens, chosen = np.nonzero(experts == expert)
            sums[expert] += _sum_of_squares(rows[tokens, which_row[tokens, chosen]])
            self._counts[name][expert] += len(tokens)
        self._check_finite(name, sums)

    def _of(self, name: str, n_matrices: int, row_length: int, n_counts: int) -> NDArray[np.float64]:
        if name not in self._sums:
            self._sums[name] = np.zeros((n_matrices, row_length))
            self._counts[name] = np.zeros(n_counts, np.int64)
        return self._sums[name]

    def _check_finite(self, name: str, sums: NDArray[np.float64]) -> None:
        if not sums.max() < MAX_SUM:  # NaN compares with nothing
            raise UnusableInputError(
                f"the activations before {name} are not finite", "the model or its conversion is broken"
            )


def _sum_of_squares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Over the rows of each matrix: shape `(…, rows, row length)` to `(…, row length)`."""
    with np.errstate(over="ignore", invalid="ignore"):  # `_check_finite` finds it
        sums: NDArray[np.float64] = np.square(rows).sum(axis=-2, dtype=np.float64)
    return sums
