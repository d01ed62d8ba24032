"""Unigram (XLM-RoBERTa, T5 and the like): llama.cpp's `t5` tokenizer, with the pieces' log probabilities."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.charsmap import is_sound_charsmap
from edgeinfer.convert.tokenizer.vocabulary import TokenType, token_table
from edgeinfer.errors import UnusableInputError

_HOLE_SCORE = -10000.0


def unigram_vocabulary(path: Path, parsed: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The vocabulary keys of a Unigram tokenizer. Raises UnusableInputError for a damaged table of characters."""
    texts, types = token_table(path, parsed, vocab_size)
    pieces = parsed["model"]["vocab"]
    scores = np.full(vocab_size, _HOLE_SCORE, dtype=np.float32)
    scores[: len(pieces)] = [score for _, score in pieces]
    unknown = parsed["model"].get("unk_id")
    if type(unknown) is int and 0 <= unknown < vocab_size:
        types[unknown] = TokenType.UNKNOWN
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.add_space_prefix": any(map(_prepends_space, _steps(parsed))),
        "tokenizer.ggml.remove_extra_whitespaces": any(map(_merges_spaces, _steps(parsed))),
    }
    charsmap = _charsmap(path, parsed)
    if charsmap:
        metadata["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(charsmap, np.uint8)
    return metadata


def _charsmap(path: Path, parsed: dict[str, Any]) -> bytes:
    """SentencePiece's table of characters to replace, checked: the library ends the process over a damaged one."""
    encoded = next(
        (step.get("precompiled_charsmap") for step in _steps(parsed) if step.get("type") == "Precompiled"), None
    )
    try:
        charsmap = base64.b64decode(encoded or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        charsmap = b"damaged"
    if charsmap and not is_sound_charsmap(charsmap):
        raise UnusableInputError(f"{path}: the table of characters to replace is damaged", "download the file again")
    return charsmap


def _steps(parsed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of normalizer and pre-tokenizer, sequences flattened."""
    sections = [parsed.get("pre_tokenizer"), parsed.get("normalizer")]
    while sections:
        match sections.pop():
            case {"normalizers": [*nested]} | {"pretokenizers": [*nested]}:
                sections += reversed(nested)
            case dict(step):
                yield step


def _prepends_space(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Metaspace", **options}:
            return options.get("prepend_scheme", "always") != "never" and options.get("add_prefix_space") is not False
        case {"type": "Prepend"}:
            return True
    return False


def _merges_spaces(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "WhitespaceSplit"} | {"type": "Replace", "pattern": {"Regex": " {2,}"}}:
            return True
    return False
