"""How much each type would lose of each tensor: a sample of its rows is quantized and held against itself.

The loss is the energy of the error of a product with the tensor, as a share of the energy of the product: the sum over
rows and columns of E[x²] (w - q)², divided by the sum of E[x²] w². E[x²] is the importance matrix's mean square of what
a column is multiplied with; without a matrix all columns count alike. A sample of a few rows from all over the tensor
tells it to a few percent, so that the cost does not grow with the model.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.kept_errors import KeptErrors
from edgeinfer.convert.resolve import PartPlan, TensorPlan
from edgeinfer.convert.target import Errors
from edgeinfer.convert.worker import Slab, Worker, fits_range
from edgeinfer.ggml_types import GGMLType
from edgeinfer.types import Quantizer

N_SAMPLES = 16
"""Places of a tensor that rows are taken from, evenly spread."""
SAMPLE_ELEMENTS = 1 << 15
"""Of all of a tensor's samples together, unless its rows are longer than a sixteenth of that."""

MAX_COLUMNS = 1 << 17
"""Of a longer row only this much is measured: more than known models have, and a stranger's may have billions."""

Rows = tuple[NDArray[np.float32], NDArray[np.float32] | None]
"""Some rows of one matrix, and how much each column matters, if that is known."""


def measure(
    tensors: Sequence[tuple[TensorPlan, Sequence[GGMLType]]],
    quantizer: Quantizer,
    threads: int,
    kept: KeptErrors,
    progress: Callable[[int, int], None],
) -> list[Errors]:
    """For each tensor the errors of the types that stand beside it; what `kept` has is not measured again.

    `progress` is told the tensors done and their total. Raises UnusableInputError naming tensor and row when a sampled
    weight is NaN or infinite, or when a source can no longer be read.
    """
    quantizer.prepare(ggml_type for _, types in tensors for ggml_type in types)
    found: list[Errors] = [{} for _ in tensors]
    local, workers = threading.local(), list[Worker]()

    def work(number: int) -> None:
        if not hasattr(local, "worker"):
            local.worker = Worker(quantizer)
            workers.append(local.worker)
        tensor, types = tensors[number]
        found[number] = _errors_of(_sampled(tensor, local.worker), types, quantizer, kept)

    try:
        with ThreadPoolExecutor(max(1, min(threads, len(tensors))), thread_name_prefix="measure") as pool:
            futures = [pool.submit(work, number) for number in range(len(tensors))]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    progress(done, len(futures))
            finally:
                for future in futures:
                    future.cancel()
    finally:
        for worker in workers:
            worker.close()
    return found


def _errors_of(samples: Sequence[Rows], types: Sequence[GGMLType], quantizer: Quantizer, kept: KeptErrors) -> Errors:
    digest = hashlib.sha256()
    for rows, weights in samples:
        digest.update(f"{rows.shape} {weights is not None} ".encode())
        digest.update(rows.tobytes())
        digest.update(b"" if weights is None else weights.tobytes())
    key = digest.hexdigest()
    largest = max(float(np.abs(rows).max(initial=0)) for rows, _ in samples)
    known = kept.of(key)
    measured = {t: _error(samples, t, quantizer) for t in types if t not in known and fits_range(t, largest)}
    new = {t: error for t, error in measured.items() if math.isfinite(error)}  # else a factor is too large for F16
    kept.add(key, new)
    return {t: error for t, error in {**known, **new}.items() if t in types}


def _error(samples: Sequence[Rows], ggml_type: GGMLType, quantizer: Quantizer) -> float:
    error = energy = 0.0
    for rows, weights in samples:
        data = np.empty(len(rows) * ggml_type.row_nbytes(rows.shape[1]), np.uint8)
        quantizer.quantize(ggml_type, rows, data, weights)
        back = np.empty_like(rows)
        quantizer.dequantize(ggml_type, data, back)
        with np.errstate(all="ignore"):  # infinities tell that the type is too narrow
            back -= rows
            error += _energy(back, weights)
        energy += _energy(rows, weights)
    return error / energy if energy else 0.0


def _energy(rows: NDArray[np.float32], weights: NDArray[np.float32] | None) -> float:
    columns = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
    return float(columns.sum() if weights is None else columns @ weights)


def _sampled(tensor: TensorPlan, worker: Worker) -> list[Rows]:
    """Rows from all over a tensor, those of one matrix together."""
    row_length, rows_per_matrix = tensor.shape[:2]
    wanted = max(1, SAMPLE_ELEMENTS // N_SAMPLES // row_length)
    n_rows = tensor.n_elements // row_length
    by_matrix: dict[int, list[NDArray[np.float32]]] = {}
    next_row = 0
    for number in range(N_SAMPLES):
        first = max(n_rows * (2 * number + 1) // (2 * N_SAMPLES), next_row)
        if first >= n_rows:
            break
        matrix = first // rows_per_matrix
        count = min(wanted, (matrix + 1) * rows_per_matrix - first)
        slab = _slab_with(tensor, first, count)
        rows = worker.rows(slab)[first - slab.out_row0 :][:count]
        by_matrix.setdefault(matrix, []).append(rows[:, :MAX_COLUMNS].copy())
        next_row = first + len(rows)
    importance = tensor.importance
    return [
        (np.concatenate(parts), None if importance is None else importance.weights(matrix, row_length)[:MAX_COLUMNS])
        for matrix, parts in by_matrix.items()
    ]


def _slab_with(tensor: TensorPlan, first: int, count: int) -> Slab:
    """What must be read for row `first` of the tensor and, as far as its part has them, `count - 1` more."""
    row_length = tensor.shape[0]
    part, part_row0 = next((part, row0) for part, row0, n_rows in _parts(tensor) if first < row0 + n_rows)
    group = part.transform.rows_per_group if part.transform else 1
    kept_elements = (part.transform.n_kept(group) if part.transform else 1) * part.row_length
    first_group = (first - part_row0) * row_length // kept_elements
    end_group = -(-(first + count - part_row0) * row_length // kept_elements)
    n_rows = min((end_group - first_group) * group, part.n_rows - first_group * group)
    out_row0 = part_row0 + first_group * kept_elements // row_length
    return Slab(tensor, part, part.first_row + first_group * group, n_rows, out_row0, -1, 0, 0)


def _parts(tensor: TensorPlan) -> Iterator[tuple[PartPlan, int, int]]:
    """The parts with the tensor's rows that they make: the first one's number and how many."""
    row0 = 0
    for part in tensor.parts:
        kept = part.transform.n_kept(part.n_rows) if part.transform else part.n_rows
        n_rows = kept * part.row_length // tensor.shape[0]
        yield part, row0, n_rows
        row0 += n_rows
