"""SentencePiece BPE as `tokenizer.json` has it (Llama 1 and 2, Mistral): llama.cpp's `llama` tokenizer.

llama.cpp merges by score, highest first; `tokenizer.json` by rank in the list of merges. A piece's score is
therefore minus the rank of the merge that makes it, which is also how SentencePiece numbers its BPE models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.convert.tokenizer.vocabulary import TokenType, merge_pairs, token_table
from edgeinfer.errors import UnusableInputError

_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_ADDED_SCORE = -1000.0


def is_sentencepiece_like(parsed: dict[str, Any]) -> bool:
    """Whether a BPE tokenizer falls back to `<0xNN>` bytes, as those made from a SentencePiece model do."""
    return bool(parsed["model"].get("byte_fallback"))


def sentencepiece_vocabulary(
    path: Path, parsed: dict[str, Any], settings: dict[str, Any], vocab_size: int
) -> dict[str, Any]:
    """The vocabulary keys of a SentencePiece-like tokenizer. Raises UnusableInputError."""
    texts, types = token_table(path, parsed, vocab_size)
    missing = _BYTES.difference(texts)
    if missing:
        # The library ends the process when it needs one of them.
        raise UnusableInputError(
            f"{path}: byte fallback without {len(missing)} of its 256 tokens, such as {min(missing)}",
            "the tokenizer was edited or merged wrongly: get the original",
        )
    scores = np.full(vocab_size, _ADDED_SCORE, dtype=np.float32)
    vocab: dict[str, int] = parsed["model"]["vocab"]
    # What no merge makes (single characters) never competes: SentencePiece puts it behind all merges.
    pairs = merge_pairs(path, parsed)
    unmerged = float(len(pairs))
    for text, token in vocab.items():
        if types[token] == TokenType.NORMAL:
            scores[token] = -unmerged
            if text in _BYTES:
                types[token], scores[token] = TokenType.BYTE, 0.0
    for rank, (left, right) in reversed(list(enumerate(pairs))):
        made = vocab.get(left + right)
        if made is not None and types[made] == TokenType.NORMAL:
            scores[made] = -float(rank)
    unknown = vocab.get(parsed["model"].get("unk_token") or "")
    if unknown is not None:
        types[unknown], scores[unknown] = TokenType.UNKNOWN, 0.0
    return {
        "tokenizer.ggml.add_space_prefix": _adds_space_prefix(parsed, settings),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
    }


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
