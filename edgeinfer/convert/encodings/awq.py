"""AWQ: whole numbers of 4 bits, packed along the rows of the transposed matrix in an order of their own.

`qweight` has a row for each column of the matrix and a word for each eight of its rows, `qzeros` and `scales` have a
row for each group of columns (mit-han-lab/llm-awq and casper-hansen/AutoAWQ, awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.checkpoint import Checkpoint, Reader, TensorSpec
from edgeinfer.convert.encodings.base import (
    FLOATS,
    Floats,
    OnlyFloats,
    Parts,
    check,
    check_matrix,
    misfit,
    numbers,
    with_decoded,
)
from edgeinfer.convert.encodings.bits import extract
from edgeinfer.convert.encodings.grid import by_block
from edgeinfer.errors import UnusableInputError

BITS = 4
PER_WORD = 8
_SHIFTS = BITS * np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in its word the number of each of eight rows is."""


@dataclass(frozen=True, slots=True)
class Awq(OnlyFloats):
    """`(codes - zeros of the group) * scale of the group`."""

    codes: TensorSpec
    scales: TensorSpec
    zeros: TensorSpec | None
    """None: the middle of what 4 bits can say."""

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """Codes, scales and, where there are any, zero points."""
        return (self.codes, self.scales, *((self.zeros,) if self.zeros else ()))

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        n_rows, length = out.shape
        group_length = length // self.scales.shape[0]
        np.copyto(out, _unpack(reader, self.codes, row0, n_rows))
        if self.zeros:
            by_block(np.subtract, out, _unpack(reader, self.zeros, row0, n_rows).astype(np.float32), group_length)
        else:
            out -= 1 << (BITS - 1)
        nbytes = self.scales.row_nbytes(1)
        scales = numbers(self.scales.dtype, reader.columns(self.scales, row0 * nbytes, n_rows * nbytes))
        by_block(np.multiply, out, scales.T, group_length)


def _unpack(reader: Reader, spec: TensorSpec, row0: int, n_rows: int) -> NDArray[np.uint32]:
    """The numbers of rows of the matrix, shape `(n_rows, rows of spec)`."""
    first, end = row0 // PER_WORD, -(-(row0 + n_rows) // PER_WORD)
    words = reader.columns(spec, 4 * first, 4 * (end - first)).view("<u4")
    word, at = np.divmod(np.arange(row0, row0 + n_rows), PER_WORD)
    return extract(words, word - first, _SHIFTS[at], BITS).T


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensors that `qweight`, `scales` and `qzeros` stand for.

    Raises UnusableInputError for another layout than GEMM's and for other sizes than 4 bits.
    """
    settings = checkpoint.config.quantization
    for key, known in (("version", "gemm"), ("bits", BITS), ("w_bit", BITS)):
        value = settings.get(key)
        if value is not None and (value.lower() if isinstance(value, str) else value) != known:
            raise UnusableInputError(
                f"{settings.path}: the weights are AWQ with {key!r} {value!r:.40}, known is {known!r}",
                "convert the checkpoint that it was made from",
            )
    return with_decoded(checkpoint, ".qweight", [".scales"], [".qzeros"], _decode, ".weight")


def _decode(parts: Parts) -> tuple[tuple[int, int], Awq]:
    codes, scales, zeros = parts[".qweight"], parts[".scales"], parts.get(".qzeros")
    for spec, dtype in ((codes, ("I32",)), (scales, FLOATS)):
        check(spec, dtype)
        check_matrix(spec)
    (length, n_code_words), (n_groups, n_rows) = codes.shape[-2:], scales.shape[-2:]
    if len(codes.shape) > 2 or len(scales.shape) > 2 or n_rows != PER_WORD * n_code_words or length % n_groups:
        raise misfit(scales, f"has the shape {list(scales.shape)}, beside codes of {list(codes.shape)}")
    if zeros:
        check(zeros, ["I32"], (n_groups, n_code_words))
    return (n_rows, length), Awq(codes, scales, zeros)
