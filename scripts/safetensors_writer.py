"""Writes safetensors files (one, or shards with an index) as a stream: no tensor is ever whole in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = {
    "BF16": np.dtype("<u2"),
    **dict.fromkeys(("U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), np.dtype("u1")),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
"""What an array of each type is here; floats that numpy does not know are bits."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write: its name, its shape in PyTorch's order, and where its slabs of bits come from."""

    name: str
    shape: tuple[int, ...]
    slabs: Callable[[], Iterable[NDArray[Any]]]
    dtype: str = "BF16"

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of finite F32 values as BF16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def write_weights(folder: Path, tensors: list[TensorSource], max_shard_nbytes: int) -> None:
    """Write `model.safetensors`, or numbered shards and `model.safetensors.index.json`, into `folder`."""
    shards = _cut(tensors, max_shard_nbytes)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _cut(tensors: list[TensorSource], max_shard_nbytes: int) -> list[list[TensorSource]]:
    """Whole tensors in order; a shard exceeds the limit only when it holds a single tensor."""
    shards: list[list[TensorSource]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if shards[-1] and nbytes + tensor.nbytes > max_shard_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(tensor)
        nbytes += tensor.nbytes
    return shards


def _write_file(path: Path, tensors: list[TensorSource]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        data_offset = file.tell()
        for tensor in tensors:
            for slab in tensor.slabs():
                file.write(np.ascontiguousarray(slab, DTYPES[tensor.dtype]).data)
        assert file.tell() == data_offset + end, f"{path}: slabs and shapes disagree"
