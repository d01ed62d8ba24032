"""The adapters that a model is loaded with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.options import Adapters, RuntimeOptions

if TYPE_CHECKING:
    from edgeinfer.native.model import NativeModel


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A checked adapter file, what it is multiplied with, and the model's tensors that it is for."""

    header: Header
    scale: float
    names: frozenset[str]


def open_adapters(model: Header, lora: Adapters) -> tuple[LoadedAdapter, ...]:
    """Read and check the adapters for a model; those whose scale is 0 are then left out.

    Raises NotFoundError, UnusableInputError for one that is damaged, no LoRA adapter, or another model's.
    """
    from edgeinfer.gguf_file.adapter import check_finite, check_fits, read_adapter  # every start imports this module

    shards, opened = read_shards(model), []
    for path, scale in lora:
        if Path(path).is_dir():
            raise UnusableInputError(f"{path}: a directory", "`edgeinfer convert` makes a .gguf of a PEFT adapter")
        adapter = read_adapter(Path(path))
        check_fits(adapter, shards)
        check_finite(adapter)
        if _as_f32(scale):
            opened.append(LoadedAdapter(adapter.header, scale, frozenset(pair.name for pair in adapter.pairs)))
    return tuple(opened)


def _as_f32(scale: float) -> float:
    """What the library gets. Of one that is too small for F32 it gets 0, and leaves the adapter out."""
    rounded: float = struct.unpack("f", struct.pack("f", scale))[0]
    return rounded


def add_to(native: NativeModel, adapters: Sequence[LoadedAdapter], options: RuntimeOptions) -> None:
    """Give a loaded model its adapters; raises what `native.adapters.add_adapters` raises."""
    from edgeinfer.native.adapters import add_adapters

    names = frozenset[str]().union(*(adapter.names for adapter in adapters))
    add_adapters(native, [(adapter.header.path, adapter.scale) for adapter in adapters], names, options)
