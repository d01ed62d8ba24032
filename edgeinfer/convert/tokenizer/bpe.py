"""Byte-level BPE: llama.cpp's `gpt2` tokenizer with the pre-tokenizer that the file's own rules call for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.convert.tokenizer.vocabulary import merge_pairs, token_table
from edgeinfer.errors import UnusableInputError


def bpe_vocabulary(path: Path, parsed: dict[str, Any], settings: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The vocabulary keys of a byte-level BPE tokenizer. Raises UnusableInputError."""
    pre = pre_tokenizer(path, parsed)
    texts, types = token_table(path, parsed, vocab_size)
    metadata: dict[str, Any] = {}
    if isinstance(settings.get("add_prefix_space"), bool):
        metadata["tokenizer.ggml.add_space_prefix"] = settings["add_prefix_space"]
    return {
        **metadata,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        # A space inside a part is written as byte-level BPE writes it.
        "tokenizer.ggml.merges": [
            f"{left.replace(' ', 'Ġ')} {right.replace(' ', 'Ġ')}" for left, right in merge_pairs(path, parsed)
        ],
    }


_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS_AND_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS_AND_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACE}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    ("byte-level words",): "gpt-2",
    ("single digits", "byte-level words"): "smollm",
    (_LLAMA3, "bytes"): "llama-bpe",
    (_QWEN2, "bytes"): "qwen2",
    (_TEKKEN, "bytes"): "tekken",
}


def pre_tokenizer(path: Path, parsed: dict[str, Any]) -> str:
    """llama.cpp's name for the file's pre-tokenizing rules (src/llama-vocab.cpp).

    Raises UnusableInputError for rules that it has no name for: another rule would change the tokens silently.
    """
    section = parsed.get("pre_tokenizer")
    steps = (
        section.get("pretokenizers") if isinstance(section, dict) and section.get("type") == "Sequence" else [section]
    )
    described = tuple(_describe(step) for step in steps if isinstance(step, dict)) if isinstance(steps, list) else ()
    name = _PRE_TOKENIZERS.get(described)
    if name is None:
        raise UnusableInputError(
            f"{path}: unknown pre-tokenizer {' + '.join(described) or section!r}",
            f"known are those of {', '.join(_PRE_TOKENIZERS.values())}",
        )
    return name


def _describe(step: dict[str, Any]) -> str:
    match step:
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
            return regex
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
            return "bytes"
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "byte-level words"
        case {"type": "Digits", "individual_digits": True}:
            return "single digits"
    return json.dumps(step, ensure_ascii=False, sort_keys=True)
