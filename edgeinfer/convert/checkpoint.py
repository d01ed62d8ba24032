"""Opens a Hugging Face checkpoint directory: its config and where each tensor lies. Reads headers only.

The format of a safetensors file is 8 bytes of header length, a JSON header and the data, gapless
(https://github.com/huggingface/safetensors). Pickled weights (`.bin`, `.pt`) are never opened.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.config import Config
from edgeinfer.convert.json_file import check_regular, parse_object, read_object
from edgeinfer.errors import NotFoundError, UnusableInputError, listed
from edgeinfer.ggml_types import GGMLType

INDEX_NAME = "model.safetensors.index.json"
SOURCE_HINT = "give a checkpoint's directory, ORG/NAME on the Hugging Face Hub, or a .gguf file"
MAX_HEADER_NBYTES = 100_000_000  # the limit of the safetensors library
DTYPE_NBYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the source. `shape` is Hugging Face's order: the row length last."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it, or a ggml type; the names that both have mean the same."""
    path: Path
    offset: int
    """Bytes from the start of `path`."""
    nbytes: int
    encoding: Encoding | None = None
    """How the tensor is made of several stored ones; its rows are F32 then, and `offset` says nothing."""

    @property
    def n_elements(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors of the files that it is made of: itself, or those of its encoding."""
        return self.encoding.stored if self.encoding else (self,)

    def row_nbytes(self, length: int) -> int:
        """Bytes of `length` elements."""
        plain = DTYPE_NBYTES.get(self.dtype)
        return GGMLType[self.dtype].row_nbytes(length) if plain is None else plain * length


class Reader(Protocol):
    """What an encoding reads with. The arrays it gives are bytes in buffers that serve again for the next slab."""

    def read(self, spec: TensorSpec, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes `[offset, offset + nbytes)` of a stored tensor."""

    def columns(self, spec: TensorSpec, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes `[offset, offset + nbytes)` of every row of a stored tensor, shape `(its rows, nbytes)`."""

    def floats(self, spec: TensorSpec, row0: int, out: NDArray[np.float32]) -> None:
        """Fill `out`, shape `(n, row length)`, with rows `[row0, row0 + n)` of floats, stored or encoded."""


class Encoding(Protocol):
    """How one logical tensor lies in several stored ones. Rows are those of the logical shape, flattened to a matrix.

    Shapes and types of the stored tensors have been checked when there is an encoding. Both methods raise
    UnusableInputError for contents that cannot be; whether what `dequantize` gives is finite is checked by its caller.
    """

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The stored tensors, the largest first."""

    @property
    def type(self) -> GGMLType:
        """The type whose blocks can hold the rows without loss; F32 when only floats can."""

    def dequantize(self, reader: Reader, row0: int, out: NDArray[np.float32]) -> None:
        """Fill `out`, shape `(n, row length)`, with rows `[row0, row0 + n)`."""

    def repack(self, reader: Reader, row0: int, n_rows: int) -> NDArray[np.uint8]:
        """Rows `[row0, row0 + n_rows)` as blocks of `type`, shape `(n_rows, bytes of a row)`. Never asked of F32."""


def encoded(name: str, shape: tuple[int, ...], encoding: Encoding) -> TensorSpec:
    """The logical tensor that `encoding` makes; its bytes are those of all that is stored."""
    stored = encoding.stored
    return TensorSpec(name, shape, "F32", stored[0].path, 0, sum(spec.nbytes for spec in stored), encoding)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory: config and tensor table, no weights."""

    path: Path
    config: Config
    tensors: dict[str, TensorSpec]
    repository: str | None = None
    """`ORG/NAME` on the Hugging Face Hub, where it comes from there."""
    left_out: tuple[str, ...] = ()
    """What else the files hold, with the reason why it isn't in `tensors`."""

    def without(self, pattern: str, reason: str) -> Checkpoint:
        """The same without the tensors whose names begin as the regular expression says; `reason` "" needs no note."""
        kept = {name: spec for name, spec in self.tensors.items() if not re.match(pattern, name)}
        names = [name for name in self.tensors if name not in kept]
        if not names:
            return self
        note = f"{names[0]} ({reason})" if len(names) == 1 else f"{len(names)} tensors like {names[0]} ({reason})"
        return replace(self, tensors=kept, left_out=(*self.left_out, note) if reason else self.left_out)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of the checkpoint in directory `path`.

    Raises NotFoundError when there is no such directory; UnusableInputError when it is not a safetensors
    checkpoint, or when a header is truncated, lies, or disagrees with the index.
    """
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        kind = UnusableInputError if isinstance(error, PermissionError) else NotFoundError
        raise kind(f"{path}: {reason}", SOURCE_HINT) from None
    if not is_directory:
        raise UnusableInputError(f"{path}: not a directory", SOURCE_HINT)
    if not os.path.lexists(path / "config.json"):
        raise UnusableInputError(f"{path}: not a Hugging Face checkpoint (no config.json)", "is the download complete?")
    config = Config(path / "config.json", read_object(path / "config.json"))
    if os.path.lexists(path / INDEX_NAME):
        return Checkpoint(path, config, _tensors_by_index(path))
    return Checkpoint(path, config, _tensors_of_files(path))


def _tensors_by_index(path: Path) -> dict[str, TensorSpec]:
    """The tensors that the index names; files and tensors beside it are leftovers and don't count."""
    weight_map = read_object(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UnusableInputError(f"{path / INDEX_NAME}: has no weight_map", "download the file again")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UnusableInputError(
                f"{path / INDEX_NAME}: names {shard!r}, not a .safetensors file beside it", "download the file again"
            )
    missing = [shard for shard in shards if not os.path.exists(path / shard)]
    if missing:
        raise UnusableInputError(
            f"{path}: {len(missing)} of {len(shards)} shards are missing: {listed(missing)}", "download them"
        )
    by_shard = {shard: read_safetensors_header(path / shard) for shard in shards}
    stale = [name for name, shard in weight_map.items() if name not in by_shard[shard]]
    if stale:
        raise UnusableInputError(
            f"{path / INDEX_NAME}: {len(stale)} tensors are not in the shard it names: {listed(stale)}",
            "index and shards are of different versions: download both again",
        )
    return {name: by_shard[shard][name] for name, shard in weight_map.items()}


def _tensors_of_files(path: Path) -> dict[str, TensorSpec]:
    files = (
        [path / "model.safetensors"] if (path / "model.safetensors").exists() else sorted(path.glob("*.safetensors"))
    )
    if not files:
        pickles = [f.name for suffix in ("*.bin", "*.pt", "*.pth") for f in sorted(path.glob(suffix))]
        if pickles:
            raise UnusableInputError(
                f"{path}: has only pickled weights ({pickles[0]}), which could run code when opened",
                "get the safetensors version, or save it again with transformers' save_pretrained",
            )
        raise UnusableInputError(f"{path}: has no .safetensors file", "is the download complete?")
    tensors: dict[str, TensorSpec] = {}
    twice: list[str] = []
    for file in files:
        for name, spec in read_safetensors_header(file).items():
            if name in tensors:
                twice.append(f"{name} ({tensors[name].path.name} and {file.name})")
            tensors[name] = spec
    if twice:
        raise UnusableInputError(
            f"{path}: {len(twice)} tensors stand in two files: {listed(twice)}",
            f"remove the files that don't belong, or add {INDEX_NAME}",
        )
    return tensors


def read_safetensors_header(path: Path) -> dict[str, TensorSpec]:
    """The tensors of one safetensors file, checked against its size. Raises UnusableInputError."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_NBYTES):
                raise _damaged(path, f"its header claims {length} bytes, the file has {size}")
            header = parse_object(file.read(length), str(path))
    except OSError as error:
        raise UnusableInputError(f"{path}: cannot be read ({error.strerror})", "check the permissions") from None
    header.pop("__metadata__", None)
    data_start = 8 + length
    specs = {name: _spec(path, name, entry, data_start) for name, entry in header.items()}
    expected = data_start
    for spec in sorted(specs.values(), key=lambda spec: (spec.offset, spec.nbytes)):
        if spec.offset != expected:
            raise _damaged(path, f"tensor {spec.name} begins at byte {spec.offset}, expected {expected}")
        expected += spec.nbytes
    if expected != size:
        raise _damaged(path, f"its tensors end at byte {expected}, the file at {size}")
    return specs


def _spec(path: Path, name: str, entry: Any, data_start: int) -> TensorSpec:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole_numbers = all(type(n) is int and n >= 0 for n in [*shape, begin, end])
    except (TypeError, KeyError, ValueError):
        raise _damaged(path, f"the header entry of tensor {name} is malformed") from None
    if not whole_numbers or not isinstance(dtype, str) or dtype not in DTYPE_NBYTES:
        described = reprlib.repr((dtype, shape, begin, end))
        raise _damaged(path, f"tensor {name} has the impossible dtype, shape and offsets {described}")
    nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
    if end - begin != nbytes:
        raise _damaged(path, f"tensor {name} of shape {shape} in {dtype} needs {nbytes} bytes, has {end - begin}")
    return TensorSpec(name, tuple(shape), dtype, path, data_start + begin, nbytes)


def _damaged(path: Path, what: str) -> UnusableInputError:
    return UnusableInputError(f"{path}: {what}", "the file is damaged or incomplete: download it again")
