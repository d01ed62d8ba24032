"""What the C library takes for granted in a vocabulary: not to hold makes it end the process, hang or fill the memory.

Each kind of tokenizer (src/llama-vocab.cpp) takes other things. The kinds with few models are checked token by token;
of the others, with their hundreds of thousands of tokens, what is known without looking at each.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

import numpy as np

from edgeinfer.charsmap import is_sound_charsmap
from edgeinfer.gguf_file.metadata import Metadata

TOKENS_KEY = "tokenizer.ggml.tokens"
_CHARSMAP_KEY = "tokenizer.ggml.precompiled_charsmap"
MAX_SQUARES = 1 << 28
"""The squares of the lengths of all tokens; the largest known vocabularies have a tenth. No token is longer than 16 KiB
then, which tries walked by recursion must hold, and what is spelled out about odd tokens stays below 1 GiB."""
MAX_WORDPIECE_NBYTES = 512
"""At every letter of a word, pieces as long as the longest token are looked up."""
MAX_CUBES = 1 << 32
"""The cubes of the lengths of all tokens, for PLaMo's table of each token's endings and their beginnings."""
_RWKV_ESCAPE = re.compile(rb"\\(?:x(.{0,2})|(.?))", re.DOTALL)
_RWKV_LETTERS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def fault_in_vocabulary(metadata: Metadata) -> str:
    """What is wrong with a file's vocabulary, "" for nothing that the library does not report itself."""
    if metadata.squares(TOKENS_KEY) > MAX_SQUARES:
        return "has tokens of impossible lengths"
    check = _CHECKS.get(metadata.text("tokenizer.ggml.model"))
    if check is None or TOKENS_KEY not in metadata or not isinstance(metadata.head(TOKENS_KEY, 1), list):
        return ""
    return check(metadata)


def _bytes_fault(metadata: Metadata) -> str:
    """What no token stands for, SentencePiece spells in bytes; the library does not ask whether it can."""
    tokens = metadata.encoded(TOKENS_KEY)
    spellings = ((f"<0x{byte:02X}>".encode(), bytes([byte])) for byte in range(256))
    missing = [i for i, both in enumerate(spellings) if not any(struct.pack("<Q", len(s)) + s in tokens for s in both)]
    return f"has no token for {len(missing)} of the 256 bytes, the first of them {missing[0]}" if missing else ""


def _charsmap_fault(metadata: Metadata) -> str:
    table = metadata.get(_CHARSMAP_KEY)
    if not isinstance(table, np.ndarray) or table.dtype.itemsize != 1 or is_sound_charsmap(table.tobytes()):
        return ""
    return f"has a damaged {_CHARSMAP_KEY}"


def _wordpiece_fault(metadata: Metadata) -> str:
    longest = max(map(len, _tokens(metadata)), default=0)
    return f"has a token of {longest} bytes, more than {MAX_WORDPIECE_NBYTES}" if longest > MAX_WORDPIECE_NBYTES else ""


def _plamo_fault(metadata: Metadata) -> str:
    cubes = sum(len(token) ** 3 for token in _tokens(metadata))
    return "has tokens of impossible lengths" if cubes > MAX_CUBES else ""


def _rwkv_fault(metadata: Metadata) -> str:
    """A text that goes on as no token does is split at the last token on the way; with none, the library never ends."""
    tokens = {_RWKV_ESCAPE.sub(_unescaped, token) for token in _tokens(metadata)}
    stuck = {token[:1] for token in tokens} - tokens
    return f"has tokens that begin with byte {min(stuck)[0]}, and no token for that byte alone" if stuck else ""


def _unescaped(escape: re.Match[bytes]) -> bytes:
    if escape[1] is not None:  # cut off at the end of the token, it stands for nothing
        return (
            bytes([(_hex_digit(escape[1][0]) * 16 + _hex_digit(escape[1][1])) & 0xFF]) if len(escape[1]) == 2 else b""
        )
    return _RWKV_LETTERS.get(escape[2], escape[2])


def _hex_digit(character: int) -> int:
    """As the library reads one, whatever it is."""
    signed = character - 256 if character > 127 else character
    return signed - ord("a") + 10 if signed >= ord("a") else signed - ord("0")


def _tokens(metadata: Metadata) -> Iterator[bytes]:
    return (token.encode("utf-8", "surrogateescape") for token in metadata[TOKENS_KEY])


_CHECKS: dict[str, Callable[[Metadata], str]] = {
    "llama": _bytes_fault,
    "t5": _charsmap_fault,
    "bert": _wordpiece_fault,
    "plamo2": _plamo_fault,
    "rwkv": _rwkv_fault,
}
