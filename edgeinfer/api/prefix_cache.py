"""The prefix cache of a model that is being loaded, and what `edgeinfer cache` shows of all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.api.adapters import LoadedAdapter
from edgeinfer.cache.fingerprint import WeightFile, digest, fingerprint
from edgeinfer.cache.folder import CacheFolder, ModelUsage
from edgeinfer.cache.prefix import DiskPrefixCache
from edgeinfer.errors import ResourceError, UsageError
from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.home import home
from edgeinfer.options import RuntimeOptions
from edgeinfer.types import Backend

BUDGET_VARIABLE = "EDGEINFER_PREFIX_CACHE_SIZE"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The prefix cache on disk; sizes in bytes."""

    path: str
    bytes: int
    budget_bytes: int
    blocks: int
    models: tuple[ModelUsage, ...]


def open_prefix_cache(
    header: Header, backend: Backend, options: RuntimeOptions, build: str, adapters: Sequence[LoadedAdapter] = ()
) -> DiskPrefixCache | None:
    """The blocks of a model under these options, run by the library `build`; None when its files cannot be read.

    Raises UsageError for a budget that is none.
    """
    folder = _folder()
    headers = (*read_shards(header), *(adapter.header for adapter in adapters))
    files = [WeightFile(h.path, h.data_offset, [(t.offset, t.nbytes) for t in h.tensors]) for h in headers]
    settings = _settings(header, backend, options, build)
    if adapters:
        settings["lora"] = " ".join(repr(adapter.scale) for adapter in adapters)
    try:
        found = fingerprint(map(digest, files), settings)
    except OSError:
        return None
    return DiskPrefixCache(folder, found, str(header.path.absolute()))


def _settings(
    header: Header, backend: Backend, options: RuntimeOptions, build: str
) -> dict[str, str | int | float | bool | None]:
    """Everything besides the weights that changes what a token leaves in the KV cache, or how it lies there."""
    trained = header.hyperparameter("context_length", 0)
    return {
        "build": build,
        "type_k": options.type_k,
        "type_v": options.type_v,
        "rotation": os.environ.get("LLAMA_ATTN_ROT_DISABLE"),  # of quantized K and V
        "flash_attn": options.flash_attn,
        # RoPE's other settings are the file's; a model with two sets of factors chooses by the context's size.
        "rope_long": backend.n_ctx > header.hyperparameter("rope.scaling.original_context_length", trained),
        "window": backend.capabilities.window,
    }


def cache_info() -> CacheInfo:
    """What is in the prefix cache. Raises ResourceError when its directory cannot be used."""
    folder = _folder()
    try:
        models = folder.usage()
        budget = folder.budget_nbytes()
    except OSError as error:
        raise _unusable(folder, error) from None
    nbytes, blocks = sum(m.bytes for m in models), sum(m.blocks for m in models)
    return CacheInfo(str(folder.root), nbytes, budget, blocks, tuple(models))


def clear_cache() -> int:
    """Delete the prefix cache; returns its size in bytes. Raises ResourceError when it cannot be deleted."""
    folder = _folder()
    try:
        return folder.clear()
    except OSError as error:
        raise _unusable(folder, error) from None


def _folder() -> CacheFolder:
    return CacheFolder(home() / "prefix-cache", _budget_nbytes())


def _budget_nbytes() -> int | None:
    """The budget that the environment sets; None for the default."""
    text = os.environ.get(BUDGET_VARIABLE, "")
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,15})([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{BUDGET_VARIABLE} is {text!r}", "give bytes, or a number with K, M, G or T")
    return int(match[1]) * _UNITS[match[2].upper()]


def _unusable(folder: CacheFolder, error: OSError) -> ResourceError:
    return ResourceError(f"{folder.root}: {error.strerror or error}", "check its permissions, or set EDGEINFER_HOME")
