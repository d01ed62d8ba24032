"""Whole numbers of a few bits each, packed into words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
"""Unsigned integers."""
WORDS: dict[str, np.dtype[Any]] = {
    "I8": np.dtype("u1"),
    "I16": np.dtype("<u2"),
    "I32": np.dtype("<u4"),
    "I64": np.dtype("<u8"),
}
"""The bits of packed words, by the type that they are stored as."""


def unpack(words: Words, bits: int, first: int, count: int, word_bits: int = 0) -> Words:
    """Numbers `[first, first + count)` of each row of `words`, which begins with number 0.

    Number `i` has the bits `[i × bits, (i + 1) × bits)` of the row, the lowest first, across the words' borders. Only
    the lowest `word_bits` bits of a word count, if that is stated.
    """
    word_bits = word_bits or 8 * words.itemsize
    word, shift = np.divmod(np.arange(first, first + count) * bits, word_bits)
    values = extract(words, word, shift, bits)
    across = shift + bits > word_bits
    if across.any():
        rest = words[:, word[across] + 1] << (word_bits - shift[across]).astype(words.dtype)
        values[:, across] |= rest & words.dtype.type((1 << bits) - 1)
    return values


def extract(words: Words, word: NDArray[Any], shift: NDArray[Any], bits: int) -> Words:
    """For each `i`, the `bits` bits of `words[:, word[i]]` from `shift[i]` on (or those that there are)."""
    values = np.take(words, word, axis=1)
    values >>= shift.astype(words.dtype)
    values &= words.dtype.type((1 << bits) - 1)
    return values


def words_with(first: int, count: int, bits: int, word_bits: int) -> tuple[int, int, int]:
    """The words `[begin, end)` with numbers `[first, first + count)` of a row, and which number `begin` begins with."""
    begin = first * bits // word_bits
    while begin * word_bits % bits:  # a word that begins with the rest of a number
        begin -= 1
    return begin, n_words(first + count, bits, word_bits), begin * word_bits // bits


def n_words(count: int, bits: int, word_bits: int) -> int:
    """Words that `count` numbers take."""
    return -(-count * bits // word_bits)
