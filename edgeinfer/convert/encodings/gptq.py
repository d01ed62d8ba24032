"""GPTQ: whole numbers of 2, 3, 4 or 8 bits, packed down the columns of the transposed matrix.

`qweight` has a column for each row of the matrix; its words hold the row's elements one after the other. `qzeros` and
`scales` have a row for each group of elements, `g_idx` (with activation order) says which group an element is in
(AutoGPTQ/AutoGPTQ, qlinear_cuda.py; ModelCloud/GPTQModel, qlinear). The first checkpoints store zero points less one;
`checkpoint_format` "gptq_v2" stores them as they are. Bits and groups show in the shapes, so that rules for single
modules (`dynamic`) need no reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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
from edgeinfer.convert.encodings.bits import WORDS, n_words, unpack, words_with
from edgeinfer.convert.encodings.grid import by_block, check_groups
from edgeinfer.errors import UnusableInputError

BITS = (2, 3, 4, 8)
_REQUIRED = (".qzeros", ".scales")


@dataclass(frozen=True, slots=True)
class Gptq(OnlyFloats):
    """`(codes - zeros of the group) * scale of the group`."""

    codes: TensorSpec
    zeros: TensorSpec
    scales: TensorSpec
    groups: TensorSpec | None
    """None where groups are equal parts of a row."""
    bits: int
    zero_offset: int
    """What is to be added to a stored zero point."""

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """Codes, zero points, scales and, where there is one, the order of groups."""
        return (self.codes, self.zeros, self.scales, *((self.groups,) if self.groups else ()))

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        n_rows, length = out.shape
        word = WORDS[self.codes.dtype]
        words = reader.columns(self.codes, row0 * word.itemsize, n_rows * word.itemsize).view(word)
        np.copyto(out, unpack(words.T, self.bits, 0, length))
        zeros, scales = self._zeros(reader, row0, n_rows), self._scales(reader, row0, n_rows)
        if self.groups is None:
            group_length = length // zeros.shape[1]
            by_block(np.subtract, out, zeros, group_length)
            by_block(np.multiply, out, scales, group_length)
        else:
            groups = self._groups(reader)
            out -= np.take(zeros, groups, axis=1)
            out *= np.take(scales, groups, axis=1)

    def _zeros(self, reader: Reader, row0: int, n_rows: int) -> Floats:
        """Shape `(n_rows, groups)`."""
        word = WORDS[self.zeros.dtype]
        begin, end, first = words_with(row0, n_rows, self.bits, 8 * word.itemsize)
        raw = reader.columns(self.zeros, begin * word.itemsize, (end - begin) * word.itemsize)
        zeros = unpack(raw.view(word), self.bits, row0 - first, n_rows)
        return zeros.T.astype(np.float32) + np.float32(self.zero_offset)

    def _scales(self, reader: Reader, row0: int, n_rows: int) -> Floats:
        """Shape `(n_rows, groups)`."""
        nbytes = self.scales.row_nbytes(1)
        return numbers(self.scales.dtype, reader.columns(self.scales, row0 * nbytes, n_rows * nbytes)).T

    def _groups(self, reader: Reader) -> NDArray[np.int32]:
        assert self.groups
        groups = reader.read(self.groups, 0, self.groups.nbytes).view("<i4")
        check_groups(self.groups, groups, self.scales.shape[0])
        return groups


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensors that `qweight`, `qzeros`, `scales` and perhaps `g_idx` stand for."""
    settings = checkpoint.config.quantization
    form = settings.get("checkpoint_format") or settings.get("format")
    if form not in (None, "gptq", "gptq_v2"):
        raise UnusableInputError(
            f"{settings.path}: 'checkpoint_format' is {form!r:.40}, known are 'gptq' and 'gptq_v2'",
            "convert the checkpoint that it was made from",
        )
    stated = settings.get("bits")
    likely = [bits for bits in BITS if bits == stated] + [bits for bits in BITS if bits != stated]
    decode = partial(_decode, likely=likely, zero_offset=0 if form == "gptq_v2" else 1)
    return with_decoded(checkpoint, ".qweight", _REQUIRED, [".g_idx"], decode, ".weight")


def _decode(parts: Parts, *, likely: Sequence[int], zero_offset: int) -> tuple[tuple[int, int], Gptq]:
    codes, zeros, scales = (parts[suffix] for suffix in (".qweight", *_REQUIRED))
    groups = parts.get(".g_idx")
    for spec, dtypes in ((codes, tuple(WORDS)), (zeros, (codes.dtype,)), (scales, FLOATS)):
        check(spec, dtypes)
        check_matrix(spec)
    (n_code_words, n_rows), n_groups = codes.shape[-2:], scales.shape[0]
    word_bits = 8 * WORDS[codes.dtype].itemsize
    length = groups.n_elements if groups else 0

    def fits(bits: int) -> bool:
        """Whether the numbers can have this size; modules may have other sizes than the config states."""
        codes_fit = not groups or n_code_words == n_words(length, bits, word_bits)
        return codes_fit and zeros.shape == (n_groups, n_words(n_rows, bits, word_bits))

    bits = next(filter(fits, likely), None)
    if bits is None or len(codes.shape) > 2 or scales.shape != (n_groups, n_rows):
        raise misfit(
            zeros,
            f"has the shape {list(zeros.shape)}, which does not go with codes of {list(codes.shape)} and scales of "
            f"{list(scales.shape)}",
        )
    if groups:
        check(groups, ["I32"], (length,))
    else:
        length = n_code_words * word_bits // bits
        if length % n_groups:
            raise misfit(scales, f"has {n_groups} groups in rows of {length}")
    return (n_rows, length), Gptq(codes, zeros, scales, groups, bits, zero_offset)
