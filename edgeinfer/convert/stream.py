"""Writes the planned file: slabs of rows are read, widened, reordered, checked and quantized in threads.

Every byte's place is known from the plan, so the threads need no order among themselves: each takes the next slab
and writes it where it belongs. Memory is threads × slab, whatever the model's size: buffers are reused, because
fresh ones cost page faults, and input is read with `pread` instead of mapped, because mapped pages stay resident.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.convert.split import OutputFile
from edgeinfer.convert.worker import Slab, Worker, write_at
from edgeinfer.convert.writer import data_nbytes, tensor_offsets
from edgeinfer.types import Quantizer

_SYNC_EVERY_S = 1.0
SLAB_ELEMENTS = 1 << 20
"""A slab is 2 to 4 MiB of input: large enough to hide the calls, small enough to stay in the caches."""


def write(plan: ConvertPlan, path: Path, quantizer: Quantizer, threads: int, progress: Callable[[int], None]) -> None:
    """Write the planned file to `path`, which must not be there yet; `progress` is told the input bytes done.

    The other shards of a split output are written beside it. Raises UnusableInputError naming tensor and row when a
    weight is NaN or infinite (or too large for F16), or when a source can no longer be read; OSError when the output
    cannot be written.
    """
    quantizer.prepare(t.type for t in plan.tensors)
    outputs: list[int] = []
    jobs: list[Slab] = []
    try:
        for file, file_path in zip(plan.files, plan.paths(path), strict=True):
            outputs.append(os.open(file_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
            jobs += _begin(file, outputs[-1])
        _run(iter(jobs), lambda: Worker(quantizer), min(threads, len(jobs)), outputs, progress)
        for output in outputs:
            os.fsync(output)
    finally:
        for output in outputs:
            os.close(output)


def _begin(file: OutputFile, output: int) -> Iterator[Slab]:
    """Write all of a file but the tensors that are made of the source's, and say what is to be done for those."""
    header = file.header
    write_at(output, header, 0)
    # The padding between tensors, and after the last, is never written: it reads as zeros.
    os.ftruncate(output, len(header) + data_nbytes(file.tensors))
    for tensor, offset in zip(file.tensors, tensor_offsets(file.tensors), strict=True):
        write_at(output, tensor.constant, len(header) + offset)
        yield from _slabs(tensor, output, len(header) + offset)


def _slabs(tensor: TensorPlan, output: int, start: int) -> Iterator[Slab]:
    out_offset, out_row_nbytes = start, tensor.type.row_nbytes(tensor.shape[0])
    for part in tensor.parts:
        transform = part.transform
        group = transform.rows_per_group if transform else 1
        rows_per_slab = max(SLAB_ELEMENTS // part.row_length // group, 1) * group
        end = part.first_row + part.n_rows
        for row0 in range(part.first_row, end, rows_per_slab):
            n_rows = min(rows_per_slab, end - row0)
            n_elements = (transform.n_kept(n_rows) if transform else n_rows) * part.row_length
            out_nbytes = n_elements // tensor.type.block_length * tensor.type.block_nbytes
            out_row0 = (out_offset - start) // out_row_nbytes
            yield Slab(tensor, part, row0, n_rows, out_row0, output, out_offset, out_nbytes)
            out_offset += out_nbytes


def _run(
    jobs: Iterator[Slab],
    make_worker: Callable[[], Worker],
    threads: int,
    outputs: Sequence[int],
    progress: Callable[[int], None],
) -> None:
    lock, stop = threading.Lock(), threading.Event()

    def work() -> None:
        worker = make_worker()
        try:
            while not stop.is_set():
                with lock:
                    slab = next(jobs, None)
                if slab is None:
                    return
                worker.do(slab)
                with lock:
                    progress(slab.nbytes)
        finally:
            worker.close()

    with ThreadPoolExecutor(threads, thread_name_prefix="convert") as pool:
        futures = [pool.submit(work) for _ in range(threads)]
        try:
            while (waited := wait(futures, _SYNC_EVERY_S, FIRST_EXCEPTION)).not_done:
                if any(future.exception() for future in waited.done):
                    break
                for output in outputs:  # so that the last one has little to wait for
                    os.fsync(output)
        finally:
            stop.set()
    for future in futures:
        future.result()
