"""LoRA adapters beside a loaded model's weights.

The library computes an adapter where a model's graph multiplies by way of `build_lora_mm` (src/llama-graph.cpp), and
not everywhere does it: elsewhere an adapter would be left out without a word. So a graph is looked at before it counts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import ResourceError, UnusableInputError, listed
from edgeinfer.native import library
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.library import llama
from edgeinfer.native.model import NativeModel
from edgeinfer.native.tensors import prove_layout, tensor_at, weight_name
from edgeinfer.options import RuntimeOptions
from edgeinfer.types import Row

_SUFFIX = ".lora_a"
_CTX_SIZE = 8


def add_adapters(
    model: NativeModel, adapters: Sequence[tuple[Path, float]], names: Collection[str], options: RuntimeOptions
) -> None:
    """Load adapter files, each with its scale, for the contexts that are made of the model from now on.

    Their headers have been checked against the model's; `names` are the tensors that they are for. They are freed with
    the model. Raises UnusableInputError for one that doesn't load, or whose tensors the model computes without it,
    ResourceError.
    """
    model.adapters = tuple((_load(model, path), scale) for path, scale in adapters)
    if missed := set(names) - _used(model, names, options):
        raise UnusableInputError(
            f"{adapters[0][0]}: llama.cpp computes {len(missed)} of its tensors without adapters in this architecture: "
            f"{listed(sorted(missed))}",
            "merge it: `edgeinfer convert CHECKPOINT --lora ADAPTER_DIR`",
        )


def _load(model: NativeModel, path: Path) -> int:
    library.forget_errors()
    handle = llama.llama_adapter_lora_init(model.handle, os.fsencode(path))
    if not handle:
        reason = library.last_error() or "the library gives no reason"
        kind = ResourceError if "allocate" in reason else UnusableInputError
        raise kind(f"{path}: the adapter does not load: {reason}", "convert it again, or use another one")
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _used(model: NativeModel, names: Collection[str], options: RuntimeOptions) -> set[str]:
    """The tensors, of `names` all if possible, whose adapters are in the graph of a token."""
    small = RuntimeOptions(
        ctx_size=_CTX_SIZE, batch_size=1, ubatch_size=1, threads=options.threads, flash_attn=options.flash_attn
    )
    seen = _Seen()
    row = Row(0, np.zeros(1, np.int32), 0, 0)
    with NativeBackend(model, small, observer=seen) as backend:
        # The whole graph is looked at before its first operation, unless it is cut up for several devices.
        backend.abort()
        backend.forward([row])
        if not seen.names.issuperset(names):
            backend.clear_abort()
            backend.forward([row])
    return seen.names


class _Seen:
    """Collects whose factors occur in a graph."""

    def __init__(self) -> None:
        prove_layout()
        self.names: set[str] = set()
        self._failure: BaseException | None = None
        self.callback = llama.ggml_backend_sched_eval_callback(self._look)

    def check(self) -> None:
        """Raise what went wrong in the callback."""
        if self._failure is not None:
            raise self._failure

    def _look(self, address: int, ask: bool, _: Any) -> bool:
        try:
            source = tensor_at(address).src[0]
            name = weight_name(tensor_at(source)) if source else ""
            if name.endswith(_SUFFIX):
                self.names.add(name.removesuffix(_SUFFIX))
        except BaseException as error:  # an exception cannot pass through C; `check` raises it again
            self._failure = self._failure or error
        return False
