"""bitsandbytes: 4-bit indices into a table of 16 numbers, or whole numbers of 8 bits.

4 bits (QLoRA, arXiv 2305.14314): the elements of all rows in one run, two in a byte, the first in the high half; a
factor (`absmax`) for each block of the run. With double quantization the factors are themselves indices into a table,
in blocks with a factor each, around an offset. 8 bits (LLM.int8, arXiv 2208.07339): the largest magnitude of each row
(`SCB`) stands for 127 (bitsandbytes-foundation/bitsandbytes, functional.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.convert.checkpoint import Checkpoint, Reader, TensorSpec
from edgeinfer.convert.encodings.base import (
    FLOATS,
    Floats,
    OnlyFloats,
    Parts,
    check,
    check_matrix,
    contents,
    misfit,
    numbers,
    with_decoded,
)
from edgeinfer.convert.json_file import parse_object

MAX_STATE_NBYTES = 1 << 16
_OF_127 = np.float32(1 / 127)
_NESTED = (".nested_absmax", ".nested_quant_map")


@dataclass(frozen=True, slots=True)
class Factors:
    """A factor for each block of a run of elements."""

    spec: TensorSpec
    block_length: int
    table: TensorSpec | None = None
    """Double quantization: what `spec` indexes …"""
    outer: TensorSpec | None = None
    """… the factors of blocks of factors …"""
    outer_length: int = 1
    """… how many factors those have …"""
    offset: float = 0.0
    """… and what is added."""

    def read(self, reader: Reader, first: int, end: int) -> Floats:
        """The factors of blocks `[first, end)`."""
        nbytes = self.spec.row_nbytes(1)
        raw = reader.read(self.spec, first * nbytes, (end - first) * nbytes)
        if self.table is None or self.outer is None:
            return numbers(self.spec.dtype, raw)
        factors = _table(reader, self.table)[raw]
        first_outer, end_outer = first // self.outer_length, -(-end // self.outer_length)
        outer = reader.read(self.outer, 4 * first_outer, 4 * (end_outer - first_outer)).view("<f4")
        factors *= outer[np.arange(first, end) // self.outer_length - first_outer]
        factors += np.float32(self.offset)
        return factors


@dataclass(frozen=True, slots=True)
class FourBit(OnlyFloats):
    """`table[indices] * factors`."""

    indices: TensorSpec
    table: TensorSpec
    factors: Factors

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The indices, the table and the factors."""
        optional = (self.factors.table, self.factors.outer)
        return (self.indices, self.factors.spec, self.table, *(spec for spec in optional if spec))

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        begin, end = row0 * out.shape[1], row0 * out.shape[1] + out.size
        first_byte, block_length = begin // 2, self.factors.block_length
        table = _table(reader, self.table)
        # For each byte its two elements.
        pairs = np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)
        elements = pairs[reader.read(self.indices, first_byte, -(-end // 2) - first_byte)].reshape(-1)
        np.copyto(out, elements[begin % 2 : begin % 2 + out.size].reshape(out.shape))
        first_block = begin // block_length
        factors = self.factors.read(reader, first_block, -(-end // block_length))
        skipped = begin - first_block * block_length
        flat = out.reshape(-1)
        flat *= np.repeat(factors, block_length)[skipped : skipped + out.size]


@dataclass(frozen=True, slots=True)
class EightBit(OnlyFloats):
    """`codes * largest / 127`."""

    codes: TensorSpec
    largest: TensorSpec

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The codes and the largest magnitudes of the rows."""
        return self.codes, self.largest

    def dequantize(self, reader: Reader, row0: int, out: Floats) -> None:
        """See checkpoint.Encoding."""
        n_rows, length = out.shape
        np.copyto(out, reader.read(self.codes, row0 * length, n_rows * length).view(np.int8).reshape(out.shape))
        out *= reader.read(self.largest, 4 * row0, 4 * n_rows).view("<f4")[:, None]
        out *= _OF_127


def _table(reader: Reader, spec: TensorSpec) -> Floats:
    return reader.read(spec, 0, spec.nbytes).view("<f4").astype(np.float32)


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its weights of 4 bits (`weight.quant_state.…`) and 8 bits (`SCB`)."""
    for kind in ("nf4", "fp4"):
        key = f".quant_state.bitsandbytes__{kind}"
        checkpoint = with_decoded(checkpoint, key, ["", ".absmax", ".quant_map"], _NESTED, _four_bit)
    return with_decoded(checkpoint, ".SCB", [".weight"], [".weight_format"], _eight_bit, ".weight")


def _four_bit(parts: Parts) -> tuple[tuple[int, ...], FourBit]:
    spec = next(spec for suffix, spec in parts.items() if suffix.startswith(".quant_state."))
    state = parse_object(contents(spec, MAX_STATE_NBYTES), f"{spec.path}: tensor {spec.name}")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) < 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
        raise misfit(spec, f"states the shape {shape!r:.60}, expected that of a matrix")
    indices, table = parts[""], parts[".quant_map"]
    n_elements = math.prod(shape)
    # FSDP wants the bytes dressed up as numbers, of which the last may not be full.
    surplus = indices.nbytes - -(-n_elements // 2)
    if not 0 <= surplus < indices.row_nbytes(1):
        raise misfit(indices, f"has {indices.nbytes} bytes, which are not {n_elements} elements of 4 bits")
    check(table, ["F32"], (16,))
    return tuple(shape), FourBit(indices, table, _factors(spec, state, parts, n_elements))


def _factors(spec: TensorSpec, state: dict[str, Any], parts: Parts, n_elements: int) -> Factors:
    length = _length(spec, state, "blocksize")
    factors, n_factors = parts[".absmax"], -(-n_elements // length)
    if ".nested_absmax" not in parts:
        check(factors, FLOATS, (n_factors,))
        return Factors(factors, length)
    if ".nested_quant_map" not in parts:
        raise misfit(factors, "comes without .nested_quant_map")
    outer, table = (parts[suffix] for suffix in _NESTED)
    outer_length, offset = _length(spec, state, "nested_blocksize"), state.get("nested_offset")
    check(factors, ["U8"], (n_factors,))
    check(outer, ["F32"], (-(-n_factors // outer_length),))
    check(table, ["F32"], (256,))
    if not isinstance(offset, int | float) or not abs(offset) < 1e30:
        raise misfit(spec, f"states the offset {offset!r:.40}, expected a number")
    return Factors(factors, length, table, outer, outer_length, float(offset))


def _length(spec: TensorSpec, state: dict[str, Any], key: str) -> int:
    length = state.get(key)
    if type(length) is not int or not 0 < length <= 1 << 20:
        raise misfit(spec, f"states the {key} {length!r:.40}, expected a number of elements")
    return length


def _eight_bit(parts: Parts) -> tuple[tuple[int, ...], EightBit]:
    codes, largest, form = parts[".weight"], parts[".SCB"], parts.get(".weight_format")
    check(codes, ["I8"])
    check_matrix(codes)
    if len(codes.shape) > 2:
        raise misfit(codes, f"has the shape {list(codes.shape)}, expected a matrix")
    check(largest, ["F32"], codes.shape[:1])
    if form and any(contents(form, 8)):
        raise misfit(form, "states a layout for one kind of processor, expected rows")
    return codes.shape, EightBit(codes, largest)
