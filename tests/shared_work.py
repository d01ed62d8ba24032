"""For tests that convert one checkpoint to many types: what is the same every time is computed once.

That is what its tokenizer becomes, and the library's bytes for the same rows in the same type, which many mixtures
share (quantizing is a function of its arguments). Every file is still planned, written and read back as ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.convert import pipeline
from edgeinfer.ggml_types import GGMLType
from edgeinfer.native.quantize import GGMLQuantizer


@contextmanager
def shared_by_conversions() -> Iterator[None]:
    """Within it conversions share what they can, best one checkpoint's after the other."""
    quantizer = _RememberingQuantizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "load_tokenizer", _once(pipeline.load_tokenizer, lambda checkpoint, _: checkpoint.path))
        patch.setattr(pipeline, "settle", _once(pipeline.settle, lambda metadata, tokenizer, _: id(tokenizer)))
        patch.setattr("edgeinfer.api.convert.GGMLQuantizer", lambda: quantizer)
        yield


def _once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def call(*arguments: Any) -> Any:
        if (what := key(*arguments)) not in known:
            known.clear()  # another checkpoint's turn
            known[what] = function(*arguments), arguments  # kept, so that no other object can have their identity
        return known[what][0]

    return call


class _RememberingQuantizer(GGMLQuantizer):
    """Asks the library only for what it has not been asked for yet."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...], bytes], NDArray[np.uint8]] = {}

    def quantize(
        self,
        ggml_type: int,
        rows: NDArray[np.float32],
        out: NDArray[np.uint8],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        if weights is not None or not GGMLType(ggml_type).is_quantized:
            super().quantize(ggml_type, rows, out, weights)
            return
        key = ggml_type, rows.shape, hashlib.sha256(rows.data).digest()
        if key in self._known:
            out[:] = self._known[key]
            return
        super().quantize(ggml_type, rows, out)
        self._known[key] = out.copy()
