"""Checks SentencePiece's table of characters to replace, which the C library walks without a net.

Format (google/sentencepiece, normalizer.cc; src/llama-vocab.cpp): 4 bytes of length, that many bytes of a double-array
trie of 32-bit units, then the replacements, each ended by a zero byte. A unit has its children's offset in bits 10 to
31 (bit 9 scales it by 256), its own label in bits 0 to 7, and in bit 8 whether a value hangs on it; a value has bit 31.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

MAX_TRIE_NBYTES = 64 << 20
MAX_BASES_AT_ONCE = 4096
_LABELS = np.arange(1, 256, dtype=np.uint32)
_IS_VALUE = np.uint32(1 << 31)


def is_sound_charsmap(charsmap: bytes) -> bool:
    """Whether no text can lead the C library out of the trie or out of the replacements."""
    if len(charsmap) < 8 or charsmap[-1] != 0:
        return False
    (trie_nbytes,) = struct.unpack_from("<I", charsmap)
    if not 0 < trie_nbytes <= min(len(charsmap) - 5, MAX_TRIE_NBYTES) or trie_nbytes % 4:
        return False
    trie = np.frombuffer(charsmap, "<u4", trie_nbytes // 4, 4)
    n_replacement_bytes = len(charsmap) - 4 - trie_nbytes
    seen = np.zeros(len(trie), bool)
    pending = [_offsets(trie[:1])]
    while pending:
        bases = pending.pop()
        if len(bases) > MAX_BASES_AT_ONCE:
            pending += np.array_split(bases, -(-len(bases) // MAX_BASES_AT_ONCE))
            continue
        if len(bases) and int(bases.max()) | 0xFF >= len(trie):
            return False
        children = _children(trie, bases)
        children = children[~seen[children]]
        seen[children] = True
        if len(children):
            pending.append(children ^ _offsets(trie[children]))
            valued = pending[-1][(trie[children] >> np.uint32(8) & np.uint32(1)).astype(bool)]
            if np.any(valued >= len(trie)) or np.any((trie[valued] & ~_IS_VALUE) >= n_replacement_bytes):
                return False
    return True


def _children(trie: NDArray[np.uint32], bases: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The nodes below those whose children lie at `bases`: the units whose label is the way that led there."""
    there = bases[:, None] ^ _LABELS
    found: NDArray[np.uint32] = np.unique(there[(trie[there] & (_IS_VALUE | np.uint32(0xFF))) == _LABELS])
    return found


def _offsets(units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))
