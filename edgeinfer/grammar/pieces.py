"""The bytes of a whole vocabulary as a tree, so that a grammar is asked once for what tokens share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_PIECE_NBYTES = 1024
"""A token that stands for more is never allowed where a mask decides."""
_SHORT_NBYTES = 32  # of nearly all tokens; the others are compared one by one

Parts = tuple[NDArray[np.intp], NDArray[np.intp]]


class PieceTree:
    """Texts that tokens begin with, level by level, each level in order; node 0 is the empty text.

    Tokens that stand for nothing are nowhere in it.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        order = sorted((i for i, p in enumerate(pieces) if 0 < len(p) <= MAX_PIECE_NBYTES), key=pieces.__getitem__)
        ordered = [pieces[i] for i in order]
        lengths = np.array([len(p) for p in ordered], np.int32)
        shared = _shared_lengths(ordered, lengths)
        joined = np.frombuffer(b"".join(ordered), np.uint8)
        starts, tokens = np.cumsum(lengths) - lengths, np.array(order, np.int32)
        at = np.zeros(len(order), np.int32)  # the node of what is read of each token
        parents, read, ended, ends = [], [np.zeros(1, np.uint8)], [], []
        n_nodes = 1
        for depth in range(int(lengths.max(initial=0))):
            is_new = shared <= depth
            parents.append(at[is_new])
            read.append(joined[starts[is_new] + depth])
            at = np.cumsum(is_new, dtype=np.int32) + np.int32(n_nodes - 1)
            n_nodes += len(parents[-1])
            is_end, goes_on = lengths == depth + 1, lengths > depth + 1
            ended.append(tokens[is_end])
            ends.append(at[is_end])
            at, lengths, shared, starts, tokens = (a[goes_on] for a in (at, lengths, shared, starts, tokens))
        self.n_tokens = len(pieces)
        self.byte: NDArray[np.uint8] = np.concatenate(read)
        """The last one of every node's text."""
        self._tokens: NDArray[np.int32] = np.concatenate([*ended, np.zeros(0, np.int32)])
        """In the order of their nodes."""
        self._first_child = _firsts(parents, n_nodes) + 1
        self._first_token = _firsts(ends, n_nodes)

    def children(self, nodes: NDArray[np.intp]) -> Parts:
        """The children of nodes, and for each the index of its parent in `nodes`."""
        return _ranges(self._first_child, nodes)

    def tokens(self, nodes: NDArray[np.intp]) -> NDArray[np.int32]:
        """The tokens that stand for exactly the texts of nodes."""
        return self._tokens[_ranges(self._first_token, nodes)[0]]


def _firsts(owners: list[NDArray[np.int32]], n_nodes: int) -> NDArray[np.intp]:
    """Of things in the order of the nodes that they belong to, where those of each node begin; one more for the end."""
    counts = np.bincount(np.concatenate([*owners, np.zeros(0, np.int32)]), minlength=n_nodes)
    return np.concatenate([np.zeros(1, np.intp), np.cumsum(counts)])


def _ranges(firsts: NDArray[np.intp], nodes: NDArray[np.intp]) -> Parts:
    """What belongs to nodes, and for each of it the index in `nodes`."""
    starts = firsts[nodes]
    counts = firsts[nodes + 1] - starts
    ends = np.cumsum(counts)
    sources = np.repeat(np.arange(len(nodes)), counts)
    return np.arange(len(sources)) + (starts - ends + counts)[sources], sources


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
