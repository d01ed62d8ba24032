"""Shares the tensors out among the files of the output, as llama.cpp's tools/gguf-split does."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.convert.writer import data_nbytes, encode_header, padding
from edgeinfer.errors import UsageError
from edgeinfer.gguf_file.metadata import ValueType
from edgeinfer.gguf_file.shards import MAX_SHARDS


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file: what its header says and the tensors in it."""

    metadata: Mapping[str, Any]
    tensors: tuple[TensorPlan, ...]

    @property
    def header(self) -> bytes:
        """The bytes before the tensor data."""
        return encode_header(self.metadata, self.tensors)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + data_nbytes(self.tensors)


def share_out(
    metadata: Mapping[str, Any], tensors: Sequence[TensorPlan], max_nbytes: int | None
) -> tuple[OutputFile, ...]:
    """One file, or shards with at most `max_nbytes` of tensors each; a larger tensor is alone in its shard.

    All metadata is in the first shard. Raises UsageError when that would make more shards than can be numbered.
    """
    if max_nbytes is None:
        return (OutputFile(metadata, tuple(tensors)),)
    groups: list[list[TensorPlan]] = [[]]
    filled = 0
    for tensor in tensors:
        nbytes = tensor.nbytes + padding(tensor.nbytes)
        if groups[-1] and filled + nbytes > max_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += nbytes
    if len(groups) > MAX_SHARDS:
        raise UsageError(f"--split-max-size {max_nbytes} makes {len(groups)} files", "give a larger size")
    return tuple(
        OutputFile({**(metadata if i == 0 else {}), **_split_keys(i, len(groups), len(tensors))}, tuple(group))
        for i, group in enumerate(groups)
    )


def _split_keys(number: int, count: int, n_tensors: int) -> dict[str, bytes]:
    return {
        "split.no": struct.pack("<IH", ValueType.UINT16, number),
        "split.tensors.count": struct.pack("<Ii", ValueType.INT32, n_tensors),
        "split.count": struct.pack("<IH", ValueType.UINT16, count),
    }
