"""NVFP4: 4-bit numbers in blocks of 16, an FP8 scale for each block, and one number for the whole tensor.

The numbers and their order are those of MXFP4 (convert.encodings.mxfp4). modelopt multiplies by the tensor's number
(`weight_scale_2`), compressed-tensors divides by it (`weight_global_scale`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.checkpoint import Reader, TensorSpec
from edgeinfer.convert.encodings.base import FLOATS, Floats, OnlyFloats, check, check_matrix, misfit, numbers
from edgeinfer.convert.encodings.mxfp4 import half_a_block_apart, unpack
from edgeinfer.convert.reader import broken
from edgeinfer.ggml_types import GGMLType

BLOCK_LENGTH = 16
MAX_SCALE = 0x7E
"""What follows is NaN and what is negative, neither of which ggml's blocks have."""


@dataclass(frozen=True, slots=True)
class Nvfp4:
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

    @property
    def type(self) -> GGMLType:
        """The same format, where its larger blocks fit; the factor then stands beside it (convert.kept_nvfp4)."""
        n_blocks = self.scales.shape[-1]
        return GGMLType.F32 if n_blocks * BLOCK_LENGTH % GGMLType.NVFP4.block_length else GGMLType.NVFP4

    def repack(self, reader: Reader, row0: int, n_rows: int) -> NDArray[np.uint8]:
        """See checkpoint.Encoding; without the factor."""
        n_blocks = self.scales.shape[-1]
        scales = reader.read(self.scales, row0 * n_blocks, n_rows * n_blocks).reshape(n_rows, -1, 4)
        if int(scales.max()) > MAX_SCALE:
            row = int((scales > MAX_SCALE).any(axis=(1, 2)).argmax())
            raise broken(self.scales, f"a scale that is negative or NaN in row {row0 + row}")
        nbytes = BLOCK_LENGTH // 2
        blocks = reader.read(self.packed, row0 * n_blocks * nbytes, n_rows * n_blocks * nbytes)
        out = np.empty((*scales.shape[:2], GGMLType.NVFP4.block_nbytes), np.uint8)
        out[..., :4] = scales
        out[..., 4:] = half_a_block_apart(blocks.reshape(*scales.shape, nbytes)).reshape(*scales.shape[:2], -1)
        return out.reshape(n_rows, -1)

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        n_rows, length = out.shape
        n_blocks = length // BLOCK_LENGTH
        unpack(reader.read(self.packed, row0 * length // 2, n_rows * length // 2).reshape(n_rows, -1), out)
        scales = numbers("F8_E4M3", reader.read(self.scales, row0 * n_blocks, n_rows * n_blocks)).reshape(n_rows, -1)
        if self.factor:
            factors = numbers(self.factor.dtype, reader.read(self.factor, 0, self.factor.nbytes)).reshape(-1)
            if self.factor.n_elements > 1:
                factors = factors[np.arange(row0, row0 + n_rows) // self.matrix_rows, None]
            scales = scales / factors if self.is_divisor else scales * factors
        blocks = out.reshape(n_rows, n_blocks, BLOCK_LENGTH)
        blocks *= scales[..., None]


@dataclass(frozen=True, slots=True)
class Factors(OnlyFloats):
    """The numbers for whole tensors alone, to multiply by: a column."""

    spec: TensorSpec
    is_divisor: bool

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """Them."""
        return (self.spec,)

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        factors = numbers(self.spec.dtype, reader.read(self.spec, 0, self.spec.nbytes)).reshape(-1, 1)
        np.copyto(out, factors[row0 : row0 + len(out)])
        if self.is_divisor:
            np.reciprocal(out, out=out)


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
