"""MXFP4 as checkpoints store it: a tensor of 4-bit numbers and one of scales, in blocks of 32 elements.

A byte of the first holds two neighbours, the low half first. A scale is an exponent (E8M0): the block's elements are
E2M1 numbers times 2^(scale - 127) (Open Compute Project, Microscaling Formats 1.0; openai/gpt-oss, weights.py). ggml
puts a block's scale in front of it and pairs each element with the one 16 further on (ggml/src/ggml-common.h,
block_mxfp4), so that the bytes change and the numbers don't.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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


def repack(packed: Bytes, scales: Bytes) -> Bytes:
    """The same blocks as ggml has them.

    `packed` has shape `(rows, 16 × blocks)`, `scales` `(rows, blocks)`; the result `(rows, 17 × blocks)`.
    """
    blocks = packed.reshape(*scales.shape, PACKED_NBYTES)
    first, second = blocks[..., : PACKED_NBYTES // 2], blocks[..., PACKED_NBYTES // 2 :]
    out = np.empty((*scales.shape, 1 + PACKED_NBYTES), np.uint8)
    out[..., 0] = scales
    out[..., 1::2] = first & 0x0F | second << 4
    out[..., 2::2] = first >> 4 | second & 0xF0
    return out.reshape(len(scales), -1)


def dequantize(packed: Bytes, scales: Bytes, out: NDArray[np.float32]) -> None:
    """The numbers, exactly, into `out` of shape `(rows, 32 × blocks)`; the other shapes are those of `repack`."""
    np.take(_PAIRS, packed, out=out.view(np.uint64), mode="clip")
    blocks = out.reshape(*scales.shape, BLOCK_LENGTH)
    blocks *= np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
