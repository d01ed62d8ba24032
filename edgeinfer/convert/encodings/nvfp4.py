"""NVFP4: 4-bit numbers in blocks of 16, an FP8 scale for each block, and one number for the whole tensor.

The numbers and their order are those of MXFP4 (convert.encodings.mxfp4). modelopt multiplies by the tensor's number
(`weight_scale_2`), compressed-tensors divides by it (`weight_global_scale`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeinfer.convert.checkpoint import Reader, TensorSpec
from edgeinfer.convert.encodings.base import FLOATS, Floats, OnlyFloats, check, check_matrix, misfit, numbers
from edgeinfer.convert.encodings.mxfp4 import unpack

BLOCK_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Nvfp4(OnlyFloats):
    """`numbers * scales * factor`, or divided by it."""

    packed: TensorSpec
    scales: TensorSpec
    factor: TensorSpec | None
    is_divisor: bool
    matrix_rows: int
    """Rows that share a factor."""

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The packed numbers, their scales and the tensor's number."""
        return (self.packed, self.scales, *((self.factor,) if self.factor else ()))

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        n_rows, length = out.shape
        n_blocks = length // BLOCK_LENGTH
        unpack(reader.read(self.packed, row0 * length // 2, n_rows * length // 2).reshape(n_rows, -1), out)
        scales = numbers("F8_E4M3", reader.read(self.scales, row0 * n_blocks, n_rows * n_blocks)).reshape(n_rows, -1)
        if self.factor:
            factors = numbers(self.factor.dtype, reader.read(self.factor, 0, self.factor.nbytes))
            if self.factor.n_elements > 1:
                factors = factors.reshape(-1)[np.arange(row0, row0 + n_rows) // self.matrix_rows, None]
            scales = scales / factors if self.is_divisor else scales * factors
        blocks = out.reshape(n_rows, n_blocks, BLOCK_LENGTH)
        blocks *= scales[..., None]


def decode(
    packed: TensorSpec, scales: TensorSpec, factor: TensorSpec | None, *, is_divisor: bool = False
) -> tuple[tuple[int, ...], Nvfp4]:
    """The logical shape and the encoding. Raises UnusableInputError for tensors that do not fit together."""
    check(packed, ["U8"])
    check_matrix(packed)
    length = 2 * packed.shape[-1]
    check(scales, ["F8_E4M3"], (*packed.shape[:-1], length // BLOCK_LENGTH))
    if length % BLOCK_LENGTH:
        raise misfit(packed, f"has rows of {length} numbers, which are no blocks of {BLOCK_LENGTH}")
    n_matrices = packed.n_elements // (packed.shape[-2] * packed.shape[-1])
    if factor:
        check(factor, FLOATS)
        if factor.n_elements not in (1, n_matrices):
            raise misfit(factor, f"has the shape {list(factor.shape)}, expected one number for a matrix")
    return (*packed.shape[:-1], length), Nvfp4(packed, scales, factor, is_divisor, packed.shape[-2])
