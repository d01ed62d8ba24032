"""Weights of one byte each, FP8 or whole numbers, and their scales.

DeepSeek-V3 and Qwen have scales for blocks of 128 x 128, in `weight_scale_inv`, which is the factor all the same
(deepseek-ai/DeepSeek-V3, inference/kernel.py, weight_dequant); Llama's are for rows, Mistral's for whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer.convert.checkpoint import Checkpoint, Encoding, Reader, TensorSpec
from edgeinfer.convert.config import Config
from edgeinfer.convert.encodings import nvfp4
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
from edgeinfer.convert.encodings.grid import Block, Grid, fit
from edgeinfer.errors import UnusableInputError

CODES = ("F8_E4M3", "F8_E5M2", "I8")


@dataclass(frozen=True, slots=True)
class Scaled(OnlyFloats):
    """`(codes - zeros) * scales`."""

    codes: TensorSpec
    scales: TensorSpec
    zeros: TensorSpec | None
    grid: Grid

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """Codes, scales and, where there are any, zero points."""
        return (self.codes, self.scales, *((self.zeros,) if self.zeros else ()))

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        n_rows, length = out.shape
        codes = reader.read(self.codes, row0 * length, n_rows * length)
        np.copyto(out, numbers(self.codes.dtype, codes).reshape(out.shape))
        if self.zeros:
            self.grid.apply(np.subtract, out, self.grid.read(reader, self.zeros, self.zeros.dtype, row0, n_rows))
        dtype = "F8_E8M0" if self.scales.dtype == "U8" else self.scales.dtype
        self.grid.apply(np.multiply, out, self.grid.read(reader, self.scales, dtype, row0, n_rows))


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its FP8 weights: `weight` beside `weight_scale_inv` or `weight_scale`."""
    blocks = block_candidates(checkpoint.config.quantization, "weight_block_size")
    checkpoint = with_scaled(without_activation_scales(checkpoint), blocks, "_scale_inv")
    return with_scaled(checkpoint, blocks)


def without_activation_scales(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without what is for activations and for the key-value cache, which are not quantized here."""
    names = "(input|activation|output|k|v|q|kv)_(scale|scale_ub|global_scale|zero_point)"
    return checkpoint.without(rf".*[._]{names}$", "for quantized activations")


def with_scaled(checkpoint: Checkpoint, blocks: Sequence[Block], suffix: str = "_scale") -> Checkpoint:
    """The checkpoint in which each tensor `NAME` of codes and its scales `NAME + suffix` are one."""

    def decode(parts: Parts) -> tuple[tuple[int, ...], Encoding]:
        codes, scales, zeros = parts[""], parts[suffix], parts.get("_zero_point")
        if codes.dtype == "U8":
            return nvfp4.decode(codes, scales, parts.get("_scale_2"))
        if "_scale_2" in parts:
            raise misfit(codes, f"is {codes.dtype}, but has scales of scales")
        check(codes, CODES)
        check_matrix(codes)
        check(scales, (*FLOATS, "F8_E8M0", "U8"))
        grid = fit(codes.shape, scales, blocks)
        if zeros:
            check(zeros, (codes.dtype, "I8"), scales.shape)
        return codes.shape, Scaled(codes, scales, zeros, grid)

    return with_decoded(checkpoint, suffix, [""], ["_zero_point", "_scale_2"], decode)


def block_candidates(settings: Config, key: str) -> list[Block]:
    """The block that a section of the config states, as rows and columns. Raises UnusableInputError for nonsense."""
    block = settings.get(key)
    if block is None:
        return []
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in block):
        raise UnusableInputError(
            f"{settings.path}: {key!r} is {block!r:.60}, expected two whole numbers", "is this file complete?"
        )
    return [(block[0], block[1])]
