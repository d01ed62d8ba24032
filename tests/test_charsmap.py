"""A table of characters that could lead the C library astray is found out."""

from __future__ import annotations

import struct

import pytest
from tokenizer_files import charsmap

from edgeinfer.charsmap import is_sound_charsmap


def test_a_sound_one() -> None:
    assert is_sound_charsmap(charsmap())
    assert is_sound_charsmap(charsmap(b"\0a\0", value=1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        charsmap()[:100],
        charsmap(b"a"),
        charsmap(b""),
        charsmap(value=2),
        charsmap(root=512 << 10),
        charsmap(root=0xFFFFFC00),
        struct.pack("<I", 4 * 512 + 3) + charsmap()[4:],
        struct.pack("<I", 2**32 - 4) + charsmap()[4:],
    ],
)
def test_a_damaged_one(data: bytes) -> None:
    assert not is_sound_charsmap(data)
