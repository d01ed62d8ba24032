"""Importance matrices: for each column of a weight, the mean square of the activations that it is multiplied with.

The files are those of llama.cpp's tools/imatrix: GGUF (`NAME.in_sum2` and `NAME.counts`, F32), or the older `.dat`.
Values are mapped, not read: of a model with experts they are hundreds of megabytes.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.mixture_rules import category
from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.convert.writer import encode_header, padding
from edgeinfer.errors import NotFoundError, UnusableInputError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import Header, TensorInfo, read_header
from edgeinfer.types import Importance

MAX_MEAN_SQUARE = 1e15
"""No real activations come near; far beyond, the quantizers' own sums overflow, and some then end the process."""
MAX_STRING_NBYTES = 127  # of a string that llama-quantize passes on
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """A matrix file: what it knows, by the names of the model's tensors."""

    name: str
    """The file's name, without the directory."""
    entries: Mapping[str, Importance]
    datasets: tuple[str, ...]
    """The texts that it was computed from."""
    chunk_count: int

    def metadata(self) -> dict[str, Any]:
        """The keys that tell of the matrix in a quantized model, llama-quantize's; of paths only the names."""
        found: dict[str, Any] = {"quantize.imatrix.file": _cut(self.name)}
        if self.datasets:
            found["quantize.imatrix.dataset"] = _cut(re.split(r"[/\\]", self.datasets[0])[-1])
        found["quantize.imatrix.entries_count"] = len(self.entries)
        if self.chunk_count > 0:
            found["quantize.imatrix.chunks_count"] = self.chunk_count
        return found

    def given_to(self, tensors: Sequence[TensorPlan]) -> tuple[TensorPlan, ...]:
        """The tensors with what the matrix knows of each.

        Raises UnusableInputError when it knows tensors that are not there or have another size: a matrix of another
        model would spoil this one.
        """
        foreign = sorted(self.entries.keys() - {t.name for t in tensors})
        if foreign:
            raise UnusableInputError(
                f"{self.name} is the importance matrix of another model: it has {foreign[0]} "
                f"({len(foreign)} of {len(self.entries)} entries are not in this one)",
                "compute one of this model with `edgeinfer imatrix`",
            )
        return tuple(replace(t, importance=self._of(t)) for t in tensors)

    def _of(self, tensor: TensorPlan) -> Importance | None:
        entry = self.entries.get(tensor.name)
        if entry is None:
            return None
        expected = tensor.shape[0] * _n_matrices(tensor)
        if entry.sums.size == expected and entry.counts.size in (1, _n_matrices(tensor)):
            return entry if tensor.type.is_quantized else None
        if category(tensor.name) == "token_embd":  # llama.cpp passes over it too: rows are looked up, not multiplied
            return None
        raise UnusableInputError(
            f"{self.name} is the importance matrix of another model: it has {entry.sums.size} values for "
            f"{tensor.name}, which needs {expected}",
            "compute one of this model with `edgeinfer imatrix`",
        )


class ExpectedMatrix(ImportanceMatrix):
    """What is still to be computed from a text: it is going to know every matrix of the layers."""

    def __init__(self, text: Path) -> None:
        # Cut so that a file can have this name.
        super().__init__(f"{text.stem[:60]}.imatrix.gguf", {}, (text.name,), 1)

    def _of(self, tensor: TensorPlan) -> Importance | None:
        return _UNKNOWN if tensor.type.is_quantized and tensor.name.startswith("blk.") else None


_UNKNOWN = Importance(np.empty(0, np.float32), np.empty(0, np.float32))


def _n_matrices(tensor: TensorPlan) -> int:
    """How many matrices (experts) are stacked in a tensor, each with its own weights."""
    return tensor.shape[2] if len(tensor.shape) > 2 else 1


def _cut(text: str) -> str:
    return text.encode("utf-8", "surrogateescape")[:MAX_STRING_NBYTES].decode("utf-8", "ignore")


def _as_text(name: str) -> str:
    """A file's name, which need not be text."""
    return os.fsencode(name).decode("utf-8", "replace")


def load_imatrix(path: Path) -> ImportanceMatrix:
    """Read a matrix file of either format and check every value.

    Raises NotFoundError, and UnusableInputError for a file that is damaged or has values that cannot be.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such importance matrix", "check the path") from None
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the path") from None
    matrix = _from_gguf(read_header(path)) if magic == b"GGUF" else _LegacyReader(path).matrix()
    for name, entry in matrix.entries.items():
        _check_values(path, name, entry)
    return matrix


def _check_values(path: Path, name: str, entry: Importance) -> None:
    for values in (entry.counts, entry.sums):
        if not (values.min() >= 0 and values.max() < np.inf):  # NaN compares with nothing
            raise UnusableInputError(
                f"{path}: the values for {name} are not all finite and positive", "compute the matrix again"
            )
    largest = entry.sums.reshape(entry.counts.size, -1).max(axis=1) / np.maximum(entry.counts, 1)
    if largest.max() > MAX_MEAN_SQUARE:
        raise UnusableInputError(
            f"{path}: {name} has a mean square of {largest.max():g}", "is the model broken? compute the matrix again"
        )


def _from_gguf(header: Header) -> ImportanceMatrix:
    infos = {info.name: info for info in header.tensors}
    names = [name.removesuffix(_SUMS) for name in infos if name.endswith(_SUMS)]
    if not names:
        raise UnusableInputError(f"{header.path}: not an importance matrix", "make one with `edgeinfer imatrix`")
    data = np.memmap(header.path, np.uint8, "r")
    entries = {}
    for name in names:
        sums, counts = infos[name + _SUMS], infos.get(name + _COUNTS)
        if counts is None or {sums.type, counts.type} != {GGMLType.F32} or sums.n_elements % counts.n_elements:
            raise UnusableInputError(
                f"{header.path}: sums and counts of {name} do not belong together", "compute the matrix again"
            )
        # llama.cpp takes counts as whole numbers.
        entries[name] = Importance(_floats(data, sums), np.rint(_floats(data, counts)))
    datasets = header.metadata.get("imatrix.datasets", [])
    return ImportanceMatrix(
        header.path.name,
        entries,
        tuple(datasets) if isinstance(datasets, list) else (),
        header.metadata.count("imatrix.chunk_count"),
    )


def _floats(data: NDArray[np.uint8], info: TensorInfo) -> NDArray[np.float32]:
    return np.asarray(data[info.offset : info.offset + info.nbytes]).view("<f4")


class _LegacyReader:
    """The `.dat` format: int32 lengths, names, calls and F32 values, one after the other and unaligned.

    Its values are mean squares times the number of calls.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            self._data: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._pos = 0

    def matrix(self) -> ImportanceMatrix:
        entries: dict[str, Importance] = {}
        for _ in range(self._number("the number of entries", least=1)):
            name = self._text()
            calls, count = self._number("a number of calls"), self._number(f"the size of {name!r}", least=1)
            sums = np.frombuffer(self._data, "<f4", count, self._take(4 * count, f"the values of {name!r}"))
            if name in entries:
                raise self._bad(f"{name!r} stands twice")
            entries[name] = Importance(sums, np.array([max(calls, 1)], np.float32))
        at_end = self._pos == len(self._data)  # the oldest files end here
        chunks = 0 if at_end else self._number("the number of chunks")
        dataset = "" if at_end else self._text()
        return ImportanceMatrix(self._path.name, entries, (dataset,) if dataset else (), max(chunks, 0))

    def _number(self, what: str, least: int = -(2**31)) -> int:
        at = self._take(4, what)
        number = int.from_bytes(self._data[at : at + 4], "little", signed=True)
        if number < least:
            raise self._bad(f"{what} is {number}")
        return number

    def _text(self) -> str:
        length = self._number("the length of a name", least=0)
        at = self._take(length, "a name")
        return self._data[at : at + length].decode("utf-8", "replace")

    def _take(self, nbytes: int, what: str) -> int:
        """The position of the next `nbytes`, which are there."""
        at = self._pos
        if nbytes > len(self._data) - at:
            raise self._bad(f"it ends inside {what}")
        self._pos = at + nbytes
        return at

    def _bad(self, what: str) -> UnusableInputError:
        return UnusableInputError(f"{self._path}: not a sound importance matrix: {what}", "compute or get it again")


def save_imatrix(
    path: Path, entries: Mapping[str, Importance], datasets: Sequence[str], chunk_count: int, chunk_size: int
) -> None:
    """Write a matrix as llama-imatrix does: sorted by name, `in_sum2` of shape `[row length, matrices]`."""
    tensors = []
    for name, entry in sorted(entries.items()):
        n_matrices = entry.counts.size
        for suffix, values in ((_SUMS, entry.sums), (_COUNTS, entry.counts)):
            row_length = values.size // n_matrices
            shape = (row_length, n_matrices) if n_matrices > 1 else (row_length,)
            data = values.astype("<f4").tobytes()
            tensors.append(TensorPlan(name + suffix, shape, GGMLType.F32, (), constant=data))
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(map(_as_text, datasets)),
        "imatrix.chunk_count": chunk_count,
        "imatrix.chunk_size": chunk_size,
    }
    with open(path, "xb") as file:
        file.write(encode_header(metadata, tensors))
        for tensor in tensors:
            file.write(tensor.constant + bytes(padding(tensor.nbytes)))
