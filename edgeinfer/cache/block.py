"""A block of the prefix cache: the KV state of a run of tokens, the tokens, and what they follow, in one file.

Blocks form chains: a block's key hashes its parent's key, its tokens and the fingerprint of model and options, so a key
stands for everything that its state depends on. Every block but a chain's last has `BLOCK_TOKENS` tokens.

    magic | parent's key | key | tokens | payload's bytes || token ids (int32) || payload || SHA-256 of all before it
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edgeinfer.types import Tokens

BLOCK_TOKENS = 128
"""Smaller ones are more files to flush, larger ones keep more twice where texts part; reading costs the same."""
MIN_TOKENS = 4
"""The shortest block: fewer tokens are computed along with the one that always is, at hardly any cost."""
MAX_PAYLOAD_NBYTES = 1 << 30
SUFFIX = ".kv"

_MAGIC = b"edgekv1\n"
_HEADER = struct.Struct("<8s32s32sIQ")
_TOKEN = np.dtype("<i4")
_KEY_DIGITS, _HEAD_DIGITS = 32, 8


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a block belongs: `tokens` at positions `[p0, p1)`, after the chain that `parent` stands for."""

    parent: bytes
    key: bytes
    tokens: Tokens
    p0: int

    @property
    def p1(self) -> int:
        """The position after the last."""
        return self.p0 + len(self.tokens)

    @property
    def name(self) -> str:
        """The file's name: siblings that begin alike have the same `siblings_prefix`."""
        return f"{siblings_prefix(self.parent, self.tokens)}{self.key.hex()[:_KEY_DIGITS]}{SUFFIX}"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A place and its KV state."""

    place: Place
    payload: bytes
    used_ns: int = 0
    """When its text was used, in nanoseconds since the epoch."""

    @property
    def nbytes(self) -> int:
        """The size of its file."""
        return file_nbytes(len(self.place.tokens), len(self.payload))


def root_key(fingerprint: bytes) -> bytes:
    """What the first block of every chain follows."""
    return hashlib.sha256(b"edgeinfer prefix cache" + fingerprint).digest()


def child_key(parent: bytes, tokens: Tokens, fingerprint: bytes) -> bytes:
    """The key of `tokens` after the chain that `parent` stands for."""
    return hashlib.sha256(parent + _raw(tokens) + fingerprint).digest()


def chain(tokens: Tokens, fingerprint: bytes) -> Iterator[Place]:
    """The places of a text's blocks, in order; a rest that is too short for a block has none."""
    parent = root_key(fingerprint)
    for p0 in range(0, len(tokens) - MIN_TOKENS + 1, BLOCK_TOKENS):
        part = tokens[p0 : p0 + BLOCK_TOKENS]
        key = child_key(parent, part, fingerprint)
        yield Place(parent, key, part, p0)
        parent = key


def siblings_prefix(parent: bytes, tokens: Tokens) -> str:
    """How the names of all blocks after `parent` begin whose first `MIN_TOKENS` tokens are those of `tokens`."""
    head = hashlib.sha256(_raw(tokens[:MIN_TOKENS])).hexdigest()[:_HEAD_DIGITS]
    return f"{parent.hex()[:_KEY_DIGITS]}-{head}-"


def file_nbytes(n_tokens: int, payload_nbytes: int) -> int:
    """The size of a block's file."""
    return _HEADER.size + _TOKEN.itemsize * n_tokens + payload_nbytes + hashlib.sha256().digest_size


def write_block(file: BinaryIO, block: Block) -> None:
    """Write a block. Raises OSError."""
    place = block.place
    head = _HEADER.pack(_MAGIC, place.parent, place.key, len(place.tokens), len(block.payload)) + _raw(place.tokens)
    checksum = hashlib.sha256(head)
    checksum.update(block.payload)
    for part in (head, block.payload, checksum.digest()):
        file.write(part)


def read_block(path: Path, parent: bytes, fingerprint: bytes) -> Block | None:
    """The block of a file, of whatever tokens; None unless it is whole and follows `parent` under `fingerprint`.

    Raises FileNotFoundError, and other OSErrors when it cannot be read.
    """
    with open_file(path, READING) as file:
        head, payload_nbytes = _read_head(file)
        if head is None:
            return None
        payload = file.read(payload_nbytes)
        rest = file.read(hashlib.sha256().digest_size + 1)
    checksum = hashlib.sha256(head)
    checksum.update(payload)
    if len(payload) != payload_nbytes or rest != checksum.digest():
        return None
    _, found_parent, key, _, _ = _HEADER.unpack_from(head)
    tokens = _tokens_of(head)
    if found_parent != parent or key != child_key(parent, tokens, fingerprint):
        return None
    return Block(Place(parent, key, tokens, 0), payload)


def read_tokens(path: Path) -> Tokens | None:
    """The tokens that a file says it holds, unverified; None for what is no block. Raises OSError."""
    with open_file(path, READING) as file:
        head, _ = _read_head(file)
    return None if head is None else _tokens_of(head)


def agreement(a: Tokens, b: Tokens) -> int:
    """How many tokens two texts have in common at their beginning."""
    most = min(len(a), len(b))
    differs = a[:most] != b[:most]
    return int(differs.argmax()) if differs.any() else most


_NEVER_LINKS_OR_WAITS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
READING = os.O_RDONLY | _NEVER_LINKS_OR_WAITS
WRITING = os.O_WRONLY | os.O_CREAT | _NEVER_LINKS_OR_WAITS


def open_file(path: Path, flags: int) -> BinaryIO:
    """Open with READING (unbuffered) or WRITING: never what a link names, never waiting for a pipe's other end.

    A new file is its owner's only. Raises OSError.
    """
    descriptor = os.open(path, flags, 0o600)
    try:
        return open(descriptor, "wb") if flags & os.O_WRONLY else open(descriptor, "rb", buffering=0)
    except OSError:  # a directory: `open` does not close it
        os.close(descriptor)
        raise


def _read_head(file: BinaryIO) -> tuple[bytes | None, int]:
    """Header and tokens, and the payload's size; None where the header does not fit the file's size."""
    status = os.fstat(file.fileno())
    head = file.read(_HEADER.size) if stat.S_ISREG(status.st_mode) else b""
    if len(head) != _HEADER.size:
        return None, 0
    magic, _, _, n_tokens, payload_nbytes = _HEADER.unpack(head)
    is_sound = magic == _MAGIC and 0 < n_tokens <= BLOCK_TOKENS and payload_nbytes <= MAX_PAYLOAD_NBYTES
    if not is_sound or status.st_size != file_nbytes(n_tokens, payload_nbytes):
        return None, 0
    tokens = file.read(_TOKEN.itemsize * n_tokens)
    return (head + tokens, payload_nbytes) if len(tokens) == _TOKEN.itemsize * n_tokens else (None, 0)


def _tokens_of(head: bytes) -> Tokens:
    return np.frombuffer(head, _TOKEN, offset=_HEADER.size).astype(np.int32)


def _raw(tokens: Tokens) -> bytes:
    return tokens.astype(_TOKEN).tobytes()
