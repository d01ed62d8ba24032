"""Bounds of yarn that a file states and the library does not read, for most architectures: a context is told them."""

from __future__ import annotations

import ctypes
import math

from edgeinfer.native.library import llama

_BOUNDS = ("beta_fast", "beta_slow")


def yarn_bounds(model_handle: int) -> dict[str, float]:
    """Parameters of a context by name; none where the file states none, and the library's 32 and 1 hold."""
    architecture = _text(model_handle, "general.architecture")
    if _text(model_handle, f"{architecture}.rope.scaling.type") != "yarn":
        return {}
    names = (f"yarn_{bound}" for bound in _BOUNDS)
    stated = {name: _number(_text(model_handle, f"{architecture}.rope.scaling.{name}")) for name in names}
    return {name: bound for name, bound in stated.items() if 0 < bound < math.inf}


def _text(model_handle: int, key: str) -> str:
    """A value of the file's header, "" where there is none."""
    buffer = ctypes.create_string_buffer(256)
    length = llama.llama_model_meta_val_str(model_handle, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if length >= 0 else ""


def _number(text: str) -> float:
    """NaN for a text that is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
