"""The bytes of a whole vocabulary as a tree, level by level, so that a grammar is asked once for what tokens share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

MAX_PIECE_NBYTES = 1024
"""A token that stands for more is never allowed where a mask decides."""
_SHORT_NBYTES = 32  # of nearly all tokens; the others are compared one by one


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """What texts of one length tokens begin with, in order. `byte` is the last of it."""

    byte: NDArray[np.uint8]
    first_child: NDArray[np.int32]
    """In the next level; the children of a node end where those of the next node begin, so there is one more."""
    tokens: NDArray[np.int32]
    """The tokens that are exactly such a text, and in `nodes` which."""
    nodes: NDArray[np.int32]


class PieceTree:
    """Tokens by what they stand for; those that stand for nothing are in no level."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.n_tokens = len(pieces)
        order = sorted((i for i, p in enumerate(pieces) if 0 < len(p) <= MAX_PIECE_NBYTES), key=pieces.__getitem__)
        ordered = [pieces[i] for i in order]
        lengths = np.array([len(p) for p in ordered], np.int32)
        shared = _shared_lengths(ordered, lengths)
        joined = np.frombuffer(b"".join(ordered), np.uint8)
        starts = np.cumsum(lengths) - lengths
        tokens = np.array(order, np.int32)
        self.first = np.zeros(2, np.int32)
        """`first_child` of the root."""
        self.levels: list[Level] = []
        node_before = np.zeros(len(order), np.int32)  # of each token, in the level before
        n_before = 1
        for depth in range(int(lengths.max(initial=0))):
            inside = lengths > depth
            is_new = inside & (shared <= depth)
            node = np.cumsum(is_new, dtype=np.int32) - 1
            parents = node_before[is_new]
            first_child = np.searchsorted(parents, np.arange(n_before + 1)).astype(np.int32)
            if depth:
                self.levels[-1] = replace(self.levels[-1], first_child=first_child)
            else:
                self.first = first_child
            ends = lengths == depth + 1
            nothing = np.zeros(int(is_new.sum()) + 1, np.int32)
            self.levels.append(Level(joined[starts[is_new] + depth], nothing, tokens[ends], node[ends]))
            node_before, n_before = node, int(is_new.sum())


def _shared_lengths(ordered: list[bytes], lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """How many bytes each text shares with the one before it."""
    if not ordered:
        return np.zeros(0, np.int32)
    padded = np.array([p[:_SHORT_NBYTES] for p in ordered], f"S{_SHORT_NBYTES}")
    matrix = padded.view(np.uint8).reshape(len(ordered), _SHORT_NBYTES)
    differs = matrix[1:] != matrix[:-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), _SHORT_NBYTES)
    shared = np.zeros(len(ordered), np.int32)
    # Padding looks like NUL bytes: what is shared ends with the shorter of the two.
    shared[1:] = np.minimum(first, np.minimum(lengths[1:], lengths[:-1]))
    for i in np.flatnonzero(shared == _SHORT_NBYTES).tolist():
        a, b = ordered[i - 1], ordered[i]
        length = _SHORT_NBYTES
        while length < min(len(a), len(b)) and a[length] == b[length]:
            length += 1
        shared[i] = length
    return shared
