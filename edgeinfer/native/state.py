"""The KV state of a range of positions as bytes, and back.

The library saves whole sequences, so a spare one that shares the range's cells stands in for the range. What it reads
back is checked here first: cell by cell, to the last byte.

A blob is a row of pieces, each with its size in front. Within a piece nothing is older than the sliding window, or in
another chunk of chunked attention, seen from the piece's end: the library leaves such cells out of what it saves.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.native import library
from edgeinfer.native.library import llama

if TYPE_CHECKING:
    from edgeinfer.native.kernels import Kernels

# The layout that src/llama-kv-cache.cpp (state_write) and src/llama-context.cpp write, in the machine's byte order.
_MAGIC = 0xAF143CD8
_HEAD = struct.Struct("=Ii")  # magic, sequence
_CACHE = struct.Struct("=II")  # streams, cells
_CELL = np.dtype([("position", np.int32), ("n_sequences", np.uint32), ("sequence", np.int32)])
# Of a model whose rope has positions of several kinds: those of an image's height and width, and the token.
_PLACED_CELL = np.dtype(
    [("position", np.int32), ("n_sequences", np.uint32), ("place", np.int32, 3), ("sequence", np.int32)]
)
_PLACED = (llama.LLAMA_ROPE_TYPE_MROPE, llama.LLAMA_ROPE_TYPE_IMROPE)
_LAYERS = struct.Struct("=II")  # whether V is transposed, layers
_ROWS = struct.Struct("=iQ")  # type, bytes of a cell's row
_COLUMNS = struct.Struct("=iII")  # type, bytes of an element, elements of a cell: V transposed
_SIZE = struct.Struct("=Q")

StateCheck = Callable[[memoryview, int, int], bool]
"""Whether what a library saved has every cell of the positions `[p0, p1)`, once, and nothing else."""


class RangeState:
    """Saves and restores ranges of one context's sequences, by way of the sequence `spare`, which nobody else uses."""

    def __init__(self, kernels: Kernels, context: int, memory: int, spare: int, window: int | None) -> None:
        self._lib = kernels.lib
        self._is_whole = kernels.state_check(context)
        self._context = context
        self._memory = memory
        self._spare = spare
        self._window = window

    def save(self, seq: int, p0: int, p1: int) -> bytes | None:
        """The blob of `[p0, p1)`; None when the library does not save every cell in the layout known here.

        Raises ValueError when the sequence has no such range.
        """
        if not 0 <= p0 < p1 <= self._length(seq):
            raise ValueError(f"sequence {seq} holds {self._length(seq)} tokens, not [{p0}, {p1})")
        parts: list[bytes | memoryview] = []
        for start, end in self._pieces(p0, p1):
            piece = self._save_piece(seq, start, end)
            if not self._is_whole(piece, start, end):
                return None
            parts += [_SIZE.pack(len(piece)), piece]
        return b"".join(parts)

    def load(self, seq: int, p0: int, p1: int, data: bytes, until: int) -> int:
        """Append a blob of `[p0, p1)`, as far as `until`, to a sequence that ends before that; its new length.

        The sequence gets no cell that would have to be taken off again: those that left its window meanwhile can be
        lost, so that it could not go on from there. For the same reason a piece that fails ends it where it is.
        Raises ValueError when the sequence does not end in `[p0, until)`.
        """
        length = self._length(seq)
        if not 0 <= p0 <= length < until <= p1:
            raise ValueError(f"sequence {seq} holds {length} tokens, the range is [{p0}, {p1}), wanted until {until}")
        library.forget_errors()
        for start, end, piece in self._split(data, p0, p1):
            if start <= length < min(end, until):
                if not self._load_piece(seq, start, end, length, min(end, until), piece):
                    break
                length = min(end, until)
        return length

    def _length(self, seq: int) -> int:
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq)) + 1

    def _pieces(self, p0: int, p1: int) -> Iterator[tuple[int, int]]:
        if self._window is None:
            yield p0, p1
            return
        while p0 < p1:
            end = min(p1, (p0 // self._window + 1) * self._window)
            yield p0, end
            p0 = end

    def _save_piece(self, seq: int, p0: int, p1: int) -> memoryview:
        self._lib.llama_memory_seq_cp(self._memory, seq, self._spare, p0, p1)
        try:
            size = int(self._lib.llama_state_seq_get_size_ext(self._context, self._spare, 0))
            buffer = np.empty(size, np.uint8)
            pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            written = int(self._lib.llama_state_seq_get_data_ext(self._context, pointer, size, self._spare, 0))
        finally:
            self._lib.llama_memory_seq_rm(self._memory, self._spare, -1, -1)
        return buffer[:written].data

    def _load_piece(self, seq: int, p0: int, p1: int, since: int, until: int, piece: memoryview) -> bool:
        """Read the piece into the spare sequence, and let `seq` share its cells of positions `[since, until)`."""
        source = np.frombuffer(piece, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        try:
            read = int(self._lib.llama_state_seq_set_data_ext(self._context, source, len(piece), self._spare, 0))
            first = int(self._lib.llama_memory_seq_pos_min(self._memory, self._spare))
            if (read, first, self._length(self._spare)) != (len(piece), p0, p1):
                return False
            self._lib.llama_memory_seq_cp(self._memory, self._spare, seq, since, until)
        finally:
            self._lib.llama_memory_seq_rm(self._memory, self._spare, -1, -1)
        return True

    def _split(self, data: bytes, p0: int, p1: int) -> list[tuple[int, int, memoryview]]:
        """The pieces of a blob; none unless they are whole and all there is."""
        view, offset, pieces = memoryview(data), 0, []
        for start, end in self._pieces(p0, p1):
            if offset + _SIZE.size > len(view):
                return []
            (size,) = _SIZE.unpack_from(view, offset)
            offset += _SIZE.size + size
            piece = view[offset - size : offset]
            if len(piece) != size or not self._is_whole(piece, start, end):
                return []
            pieces.append((start, end, piece))
        return pieces if offset == len(view) else []


def state_check(context: int) -> StateCheck:
    """`is_whole` for what llama.cpp saves of a context's sequences."""
    rope_type = llama.llama_model_rope_type(llama.llama_get_model(context))
    return partial(is_whole, cell=_PLACED_CELL if rope_type in _PLACED else _CELL)


def is_whole(piece: memoryview, p0: int, p1: int, cell: np.dtype[Any]) -> bool:
    """Whether each KV cache in what the library saved has every cell of `[p0, p1)`, once, and nothing else follows."""
    try:
        magic, _ = _HEAD.unpack_from(piece)
        offset = _HEAD.size
        while offset < len(piece):
            offset = _end_of_cache(piece, offset, p0, p1, cell)
    except (ValueError, OverflowError, struct.error):
        return False
    return magic == _MAGIC and offset == len(piece) > _HEAD.size


def _end_of_cache(piece: memoryview, offset: int, p0: int, p1: int, cell: np.dtype[Any]) -> int:
    """Where the cache that begins at `offset` ends; ValueError, OverflowError, struct.error for another layout."""
    n_streams, n_cells = _CACHE.unpack_from(piece, offset)
    if (n_streams, n_cells) != (1, p1 - p0):
        raise ValueError("not the cells of this range")
    offset += _CACHE.size
    cells = np.frombuffer(piece, cell, n_cells, offset)
    if (cells["n_sequences"] != 1).any() or (np.sort(cells["position"]) != np.arange(p0, p1)).any():
        raise ValueError("not the positions of this range")
    offset += cells.nbytes
    is_transposed, n_layers = _LAYERS.unpack_from(piece, offset)
    offset += _LAYERS.size
    for _ in range(n_layers):
        offset = end_of_rows(piece, offset, n_cells)
    if offset == len(piece):  # a latent cache has no V
        return offset
    for _ in range(n_layers):
        offset = end_of_columns(piece, offset, n_cells) if is_transposed else end_of_rows(piece, offset, n_cells)
    return offset


def end_of_rows(piece: memoryview, offset: int, n_cells: int) -> int:
    """Where a layer's K, or its V, ends that begins at `offset`, a row for each cell."""
    _, row_nbytes = _ROWS.unpack_from(piece, offset)
    return offset + _ROWS.size + n_cells * int(row_nbytes)


def end_of_columns(piece: memoryview, offset: int, n_cells: int) -> int:
    """The same of V that is transposed."""
    _, element_nbytes, n_elements = _COLUMNS.unpack_from(piece, offset)
    return offset + _COLUMNS.size + n_cells * int(element_nbytes) * int(n_elements)
