"""SentencePiece BPE (Llama 1 and 2, Mistral, Gemma): llama.cpp's `llama` tokenizer.

llama.cpp merges by score, highest first; `tokenizer.json` by rank in the list of merges. Without the `tokenizer.model`
that has the scores, a piece's is minus the rank of the merge that makes it, which is also how SentencePiece numbers its
BPE models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.tokenizer.sentencepiece_model import SentencePieceModel
from edgeinfer.convert.tokenizer.vocabulary import TokenType, merge_pairs, token_table
from edgeinfer.errors import UnusableInputError

_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_GEMMA4_VISIBLE = frozenset((
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
))  # fmt: skip
_ADDED_SCORE = -1000.0
_HOLE_SCORE = -10000.0


def is_sentencepiece_like(parsed: dict[str, Any]) -> bool:
    """Whether a BPE tokenizer falls back to `<0xNN>` bytes, as those made from a SentencePiece model do."""
    return bool(parsed["model"].get("byte_fallback"))


def sentencepiece_vocabulary(
    path: Path,
    parsed: dict[str, Any],
    settings: dict[str, Any],
    vocab_size: int,
    model: SentencePieceModel | None = None,
) -> dict[str, Any]:
    """The vocabulary keys of a SentencePiece-like tokenizer; with the scores of `model`, where there is one.

    Raises UnusableInputError.
    """
    texts, types = _table(path, parsed, vocab_size)
    scores = _rebuilt_scores(path, parsed, types) if model is None else _scores_of(path, model, texts, types)
    return {
        "tokenizer.ggml.add_space_prefix": _adds_space_prefix(parsed, settings),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
    }


def gemma4_vocabulary(path: Path, parsed: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The same for Gemma 4, for which llama.cpp has a tokenizer that merges by rank. Raises UnusableInputError.

    What stands around thoughts and calls of tools is visible, for those who take answers apart.
    """
    texts, types = _table(path, parsed, vocab_size)
    for token, text in enumerate(texts):
        if types[token] == TokenType.CONTROL and text in _GEMMA4_VISIBLE:
            types[token] = TokenType.USER_DEFINED
    return {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merge_pairs(path, parsed)],
    }


def _table(path: Path, parsed: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens, those for bytes and for the unknown too."""
    texts, types = token_table(path, _without_zero(parsed), vocab_size)
    missing = _BYTES.difference(texts)
    if missing:
        # The library ends the process when it needs one of them.
        raise UnusableInputError(
            f"{path}: byte fallback without {len(missing)} of its 256 tokens, such as {min(missing)}",
            "the tokenizer was edited or merged wrongly: get the original",
        )
    for token, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind == TokenType.NORMAL and text in _BYTES:
            types[token] = TokenType.BYTE
    unknown = parsed["model"]["vocab"].get(parsed["model"].get("unk_token") or "")
    if unknown is not None:
        types[unknown] = TokenType.UNKNOWN
    return texts, types


def _without_zero(parsed: dict[str, Any]) -> dict[str, Any]:
    """Without the piece that is a zero byte (InternLM2 has one), for the library reads no text beyond one.

    Its place becomes a hole, and the byte what any byte without a piece becomes.
    """
    vocab = parsed["model"]["vocab"]
    if "\0" not in vocab:
        return parsed
    kept = {text: token for text, token in vocab.items() if text != "\0"}
    return {**parsed, "model": {**parsed["model"], "vocab": kept}}


def _rebuilt_scores(path: Path, parsed: dict[str, Any], types: list[int]) -> NDArray[np.float32]:
    """Scores that lead to the same merges as the ranks do.

    What no merge makes (single characters) never competes: SentencePiece puts it behind all merges.
    """
    scores = np.full(len(types), _ADDED_SCORE, dtype=np.float32)
    vocab: dict[str, int] = parsed["model"]["vocab"]
    pairs = merge_pairs(path, parsed)
    for token, kind in enumerate(types):
        if kind in (TokenType.NORMAL, TokenType.BYTE, TokenType.UNKNOWN):
            scores[token] = -float(len(pairs)) if kind == TokenType.NORMAL else 0.0
    for rank, (left, right) in reversed(list(enumerate(pairs))):
        made = vocab.get(left + right)
        if made is not None and types[made] == TokenType.NORMAL:
            scores[made] = -float(rank)
    return scores


def _scores_of(path: Path, model: SentencePieceModel, texts: list[str], types: list[int]) -> NDArray[np.float32]:
    """The model's own scores. Raises UnusableInputError when it is not the one that tokenizer.json was made from."""
    scores = np.full(len(types), _HOLE_SCORE, dtype=np.float32)
    for token, (text, kind) in enumerate(zip(texts, types, strict=True)):
        piece = model.pieces[token] if token < len(model.pieces) else None
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            scores[token] = _ADDED_SCORE
        elif piece is not None and kind != TokenType.UNUSED:
            if piece.text != text:
                raise UnusableInputError(
                    f"{path}: token {token} is {text!r}, but tokenizer.model says {piece.text!r}",
                    "one of them is of another version: download both again",
                )
            scores[token] = piece.score
    return scores


def _adds_space_prefix(parsed: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether text gets a space in front: what the tokenizer's own rules do, else what the settings say."""
    rules = [parsed.get("normalizer"), parsed.get("pre_tokenizer")]
    while rules:
        match rules.pop():
            case {"type": "Prepend", "prepend": "▁"}:
                return True
            case {"type": "Metaspace", **options}:
                return options.get("prepend_scheme", "always") != "never"
            case {"normalizers": list(nested)} | {"pretokenizers": list(nested)}:
                rules.extend(nested)
    return bool(settings.get("add_prefix_space", False))
