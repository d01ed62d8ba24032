"""ggml's quantizers: F32 rows to the bytes of a tensor type and back (ggml/src/ggml-quants.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from edgeinfer.ggml_types import GGMLType


class TypeTraits(ctypes.Structure):
    """struct ggml_type_traits (ggml/include/ggml.h); a test holds it against the library's own functions."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_length", ctypes.c_int64),
        ("block_length_interleaved", ctypes.c_int64),
        ("block_nbytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float", ctypes.c_void_p),
    )


@cache
def type_traits(ggml_type: int) -> TypeTraits:
    """What the library knows of a type that has an id in `GGMLType`; any other id would read out of bounds."""
    traits: TypeTraits = _ggml().ggml_get_type_traits(GGMLType(ggml_type)).contents
    return traits


@cache
def _ggml() -> ctypes.CDLL:
    from edgeinfer.native.library import load_ggml_base  # loads the library: not before something is to be quantized

    library = load_ggml_base()
    library.ggml_quantize_init.argtypes = [ctypes.c_int]
    library.ggml_quantize_init.restype = None
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    library.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    return library


# Without, the library ends the process (ggml_quantize_requires_imatrix).
_NEED_WEIGHTS = (GGMLType.IQ2_XXS, GGMLType.IQ2_XS, GGMLType.IQ1_S)


class GGMLQuantizer:
    """Implements `types.Quantizer`. ctypes releases the GIL, so that threads run side by side."""

    def prepare(self, types: Iterable[int]) -> None:
        """Build the grids that the IQ types look up; not safe while other threads quantize."""
        for ggml_type in set(types):
            _ggml().ggml_quantize_init(ggml_type)

    def quantize(
        self,
        ggml_type: int,
        rows: NDArray[np.float32],
        out: NDArray[np.uint8],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Quantize `rows`, shape `(n, row length)`, into `out`; both C-contiguous, all values finite.

        `weights`, shape `(row length,)`, are finite and not negative.
        """
        n_rows, length = rows.shape
        expected = GGMLType(ggml_type).row_nbytes(length) * n_rows
        if not (rows.flags.c_contiguous and out.flags.c_contiguous and rows.dtype == np.float32):
            raise ValueError("the quantizer needs contiguous float32 rows")
        if out.nbytes != expected:
            raise ValueError(f"{n_rows} rows of {length} need {expected} bytes, not {out.nbytes}")
        if weights is not None and not (
            weights.shape == (length,) and weights.flags.c_contiguous and weights.dtype == np.float32
        ):
            raise ValueError(f"rows of {length} need {length} contiguous float32 weights")
        if weights is None and ggml_type in _NEED_WEIGHTS:
            raise ValueError(f"{GGMLType(ggml_type).name} cannot be quantized without weights")
        importance = None if weights is None else weights.ctypes.data
        _ggml().ggml_quantize_chunk(ggml_type, rows.ctypes.data, out.ctypes.data, 0, n_rows, length, importance)

    def dequantize(self, ggml_type: int, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Widen whole blocks of a type into `out`; both C-contiguous. ValueError for a type that cannot be widened."""
        expected = GGMLType(ggml_type).row_nbytes(out.size)
        if not (data.flags.c_contiguous and out.flags.c_contiguous and out.dtype == np.float32):
            raise ValueError("dequantizing needs contiguous bytes and contiguous float32 elements")
        if data.nbytes != expected:
            raise ValueError(f"{out.size} elements take {expected} bytes, not {data.nbytes}")
        to_float = type_traits(ggml_type).to_float
        if not to_float:
            raise ValueError(f"{GGMLType(ggml_type).name} has no way back to float")
        to_float(data.ctypes.data, out.ctypes.data, out.size)
