"""Reads a SentencePiece `tokenizer.model`: as much of protocol buffers, and of that file, as a vocabulary needs.

Field numbers: google/sentencepiece, src/sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from edgeinfer.convert.json_file import read_file
from edgeinfer.errors import UnusableInputError

MAX_MODEL_NBYTES = 64 << 20
_UNIGRAM, _BPE = 1, 2
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE = 3
_ADD_DUMMY_PREFIX = 3


class PieceType(IntEnum):
    """What a piece is to SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of the vocabulary."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A SentencePiece BPE model: the pieces in the order of their ids."""

    pieces: tuple[Piece, ...]
    adds_space_prefix: bool


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read a BPE model. Raises UnusableInputError for a damaged file and for a model of another kind."""
    data = read_file(path, MAX_MODEL_NBYTES)
    pieces: list[Piece] = []
    kind, adds_space_prefix = _UNIGRAM, True
    try:
        for number, value in _fields(data):
            if number == _PIECES:
                pieces.append(_piece(value))
            elif number == _TRAINER:
                kind = dict(_fields(value)).get(_MODEL_TYPE, _UNIGRAM)
            elif number == _NORMALIZER:
                adds_space_prefix = bool(dict(_fields(value)).get(_ADD_DUMMY_PREFIX, 1))
    except (ValueError, TypeError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise UnusableInputError(
            f"{path}: not a SentencePiece model ({error})", "the file is damaged: download it again"
        ) from None
    if kind != _BPE or not pieces:
        raise UnusableInputError(f"{path}: not a SentencePiece BPE model", "add the tokenizer.json that belongs to it")
    return SentencePieceModel(tuple(pieces), adds_space_prefix)


def tokenizer_of_model(model: SentencePieceModel) -> dict[str, Any]:
    """The tokenizer.json that does what a SentencePiece model does, but for the tokens around a text."""
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if model.adds_space_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
    unknown = next((piece.text for piece in model.pieces if piece.type == PieceType.UNKNOWN), None)
    return {
        "added_tokens": [
            _added_token(token, piece)
            for token, piece in enumerate(model.pieces)
            if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece.text: token for token, piece in enumerate(model.pieces)},
            "merges": _merges(model),
        },
    }


def _merges(model: SentencePieceModel) -> list[list[str]]:
    """Every way to put a piece together from two, the highest score first."""
    ids = {piece.text: token for token, piece in enumerate(model.pieces) if piece.type != PieceType.CONTROL}
    found = []
    for piece in model.pieces:
        if piece.type != PieceType.NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in ids and right in ids:
                found.append((-piece.score, ids[left], ids[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def _added_token(token: int, piece: Piece) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": piece.text, **flags, "special": piece.type != PieceType.USER_DEFINED}


def _piece(data: Any) -> Piece:
    fields = dict(_fields(data))
    text = bytes(fields.get(_TEXT, b"")).decode("utf-8")
    (score,) = struct.unpack("<f", fields.get(_SCORE, b"\0\0\0\0"))
    if not -1e30 < score < 1e30:
        raise ValueError(f"the piece {text!r} has the score {score}")
    return Piece(text, score, int(fields.get(_TYPE, PieceType.NORMAL)))


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers of varints, bytes of everything else."""
    if not isinstance(data, bytes):
        raise ValueError("a number where a message should be")
    pos = 0
    while pos < len(data):
        tag, pos = _varint(data, pos)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, pos = _varint(data, pos)
            yield number, value
            continue
        if wire == 2:
            length, pos = _varint(data, pos)
        else:
            length = {1: 8, 5: 4}.get(wire, len(data))
        if length > len(data) - pos:
            raise ValueError(f"a field ends behind the end, at byte {pos}")
        yield number, data[pos : pos + length]
        pos += length


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
    raise ValueError(f"a number without end, at byte {pos}")
