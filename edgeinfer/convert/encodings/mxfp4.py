"""MXFP4 as gpt-oss and compressed-tensors store it: a tensor of 4-bit numbers, one of scales, in blocks of 32 elements.

A byte of the first holds two neighbours, the low half first. A scale is an exponent (E8M0): the block's elements are
E2M1 numbers times 2^(scale - 127) (Open Compute Project, Microscaling Formats 1.0; openai/gpt-oss, weights.py). ggml
puts a block's scale in front of it and pairs each element with the one 16 further on (ggml/src/ggml-common.h,
block_mxfp4), so that the bytes change and the numbers don't.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.checkpoint import Checkpoint, Reader, TensorSpec
from edgeinfer.convert.encodings.base import Parts, check, check_matrix, misfit, with_decoded
from edgeinfer.convert.reader import broken
from edgeinfer.ggml_types import GGMLType

BLOCK_LENGTH = 32
PACKED_NBYTES = BLOCK_LENGTH // 2
"""Bytes of a block without its scale."""
MAX_SCALE = 252
"""From 253 on the largest element times the scale is infinite in F32; 255 is NaN."""

Bytes = NDArray[np.uint8]

_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_SIGNED = np.concatenate([_NUMBERS, 0 - _NUMBERS])  # one zero, as ggml has it
_PAIRS = np.stack([np.tile(_SIGNED, 16), np.repeat(_SIGNED, 16)], axis=1).view(np.uint64)
"""The bits of the two elements of a byte, shape `(256, 1)`."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A tensor in MXFP4."""

    packed: TensorSpec
    scales: TensorSpec
    n_blocks: int
    """Blocks of a row."""

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The numbers and their scales."""
        return self.packed, self.scales

    @property
    def type(self) -> GGMLType:
        """The same format."""
        return GGMLType.MXFP4

    def dequantize(self, reader: Reader, row0: int, out: NDArray[np.float32]) -> None:
        """See checkpoint.Encoding."""
        dequantize(*self._read(reader, row0, len(out)), out)

    def repack(self, reader: Reader, row0: int, n_rows: int) -> Bytes:
        """See checkpoint.Encoding."""
        return repack(*self._read(reader, row0, n_rows))

    def _read(self, reader: Reader, row0: int, n_rows: int) -> tuple[Bytes, Bytes]:
        n = self.n_blocks
        packed = reader.read(self.packed, row0 * n * PACKED_NBYTES, n_rows * n * PACKED_NBYTES).reshape(n_rows, -1)
        scales = reader.read(self.scales, row0 * n, n_rows * n).reshape(n_rows, n)
        if int(scales.max(initial=0)) > MAX_SCALE:
            row = int((scales > MAX_SCALE).any(axis=1).argmax())
            raise broken(self.scales, f"an infinite scale in row {row0 + row}")
        return packed, scales


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensors that `NAME_blocks` and `NAME_scales` stand for."""
    return with_decoded(checkpoint, "_blocks", ["_scales"], [], _decode)


def _decode(parts: Parts) -> tuple[tuple[int, ...], Mxfp4]:
    packed, scales = parts["_blocks"], parts["_scales"]
    check(packed, ["U8"])
    if len(packed.shape) < 3 or not packed.n_elements or packed.shape[-1] != PACKED_NBYTES:
        raise misfit(packed, f"has the shape {list(packed.shape)}, expected [..., {PACKED_NBYTES}]")
    check(scales, ["U8"], packed.shape[:-1])
    return _encoding(packed, scales)


def decode_matrix(packed: TensorSpec, scales: TensorSpec) -> tuple[tuple[int, ...], Mxfp4]:
    """The same of a matrix of packed bytes, as compressed-tensors has it. Raises UnusableInputError."""
    check(packed, ["U8"])
    check_matrix(packed)
    check(scales, ["U8", "F8_E8M0"], (*packed.shape[:-1], packed.shape[-1] // PACKED_NBYTES))
    if packed.shape[-1] % PACKED_NBYTES:
        raise misfit(packed, f"has rows of {packed.shape[-1]} bytes, which are no blocks of {PACKED_NBYTES}")
    return _encoding(packed, scales)


def _encoding(packed: TensorSpec, scales: TensorSpec) -> tuple[tuple[int, ...], Mxfp4]:
    n_blocks = scales.shape[-1]
    return (*scales.shape[:-1], n_blocks * BLOCK_LENGTH), Mxfp4(packed, scales, n_blocks)


def repack(packed: Bytes, scales: Bytes) -> Bytes:
    """The same blocks as ggml has them.

    `packed` has shape `(rows, 16 × blocks)`, `scales` `(rows, blocks)`; the result `(rows, 17 × blocks)`.
    """
    out = np.empty((*scales.shape, 1 + PACKED_NBYTES), np.uint8)
    out[..., 0] = scales
    out[..., 1:] = half_a_block_apart(packed.reshape(*scales.shape, PACKED_NBYTES))
    return out.reshape(len(scales), -1)


def half_a_block_apart(blocks: Bytes) -> Bytes:
    """Bytes of two elements half a block apart, of bytes of two neighbours; a block is the last dimension."""
    first, second = np.split(blocks, 2, axis=-1)
    out = np.empty_like(blocks)
    out[..., 0::2] = first & 0x0F | second << 4
    out[..., 1::2] = first >> 4 | second & 0xF0
    return out


def dequantize(packed: Bytes, scales: Bytes, out: NDArray[np.float32]) -> None:
    """The numbers, exactly, into `out` of shape `(rows, 32 × blocks)`; the other shapes are those of `repack`."""
    unpack(packed, out)
    blocks = out.reshape(*scales.shape, BLOCK_LENGTH)
    blocks *= np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]


def unpack(packed: Bytes, out: NDArray[np.float32]) -> None:
    """The numbers without their scales, two of each byte, into `out` of twice as many columns."""
    np.take(_PAIRS, packed, out=out.view(np.uint64), mode="clip")
