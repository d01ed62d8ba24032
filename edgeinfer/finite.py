"""Whether the data of a tensor is free of NaN and infinity: in its floats, or in the factors of its blocks.

The C library has the same check (ggml_validate_row_data), which writes past every log to the standard error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.ggml_types import GGMLType

T = GGMLType

INFINITY: dict[GGMLType, np.unsignedinteger[Any]] = {
    T.F64: np.uint64(0x7FF0 << 48),
    T.F32: np.uint32(0x7F800000),
    T.F16: np.uint16(0x7C00),
    T.BF16: np.uint16(0x7F80),
}
"""The bits of a positive infinity. Without the sign, every NaN lies above it and every number below."""
_FACTORS_AT: dict[GGMLType, tuple[int, ...]] = {
    T.Q4_0: (0,), T.Q4_1: (0, 2), T.Q5_0: (0,), T.Q5_1: (0, 2), T.Q8_0: (0,), T.Q8_1: (0, 2), T.Q1_0: (0,),
    T.Q2_0: (0,), T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,), T.TQ1_0: (52,),
    T.TQ2_0: (64,), T.IQ1_S: (0,), T.IQ2_XXS: (0,), T.IQ2_XS: (0,), T.IQ2_S: (0,), T.IQ3_XXS: (0,), T.IQ3_S: (0,),
    T.IQ4_NL: (0,), T.IQ4_XS: (0,),
}  # fmt: skip
"""Where in a block its F16 factors lie, in bytes (ggml/src/ggml-common.h)."""
_E8M0_NAN = 0xFF


def is_finite(ggml_type: GGMLType, data: NDArray[np.uint8]) -> bool:
    """Whether whole blocks of `data`, a row of bytes, hold nothing that is NaN or infinite."""
    if ggml_type in INFINITY:
        return _are_finite(ggml_type, data)
    blocks = data.reshape(-1, ggml_type.block_nbytes)
    if ggml_type is T.MXFP4:
        return not bool((blocks[:, 0] == _E8M0_NAN).any())
    if ggml_type is T.Q8_K:
        return _are_finite(T.F32, blocks[:, :4])
    if ggml_type is T.IQ1_M:  # the factor is in the highest four bits of four words
        words = np.ascontiguousarray(blocks[:, -8:]).view("<u2") >> 12
        return _are_finite(T.F16, (words << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16))
    return all(_are_finite(T.F16, blocks[:, at : at + 2]) for at in _FACTORS_AT.get(ggml_type, ()))


def _are_finite(ggml_type: GGMLType, data: NDArray[Any]) -> bool:
    infinity = INFINITY[ggml_type]  # whose bits are those of the exponent
    bits = np.ascontiguousarray(data).view(infinity.dtype) & infinity
    return bool(bits.max(initial=0) < infinity)
