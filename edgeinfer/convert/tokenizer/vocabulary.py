"""The token table that all tokenizer models share: texts and types, holes filled, added tokens typed."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

from edgeinfer.errors import UnusableInputError


class TokenType(IntEnum):
    """What a token is to llama.cpp (include/llama.h, llama_token_type)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def token_table(path: Path, parsed: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types of tokens `0 … vocab_size - 1`; a hole becomes `[PADi]`, UNUSED.

    Added tokens are CONTROL when the tokenizer calls them special or when they look it, else USER_DEFINED.
    """
    texts = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    vocab = parsed["model"].get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise UnusableInputError(f"{path}: the tokenizer has no vocabulary", "download the file again")
    added = added_tokens(path, parsed)
    largest = max([*vocab.values(), *added])
    if largest >= vocab_size:
        raise UnusableInputError(
            f"{path}: token {largest} lies beyond the model's {vocab_size} embeddings (vocab_size in config.json)",
            "tokenizer and weights are of different versions",
        )
    for text, token in vocab.items():
        texts[token], types[token] = text, TokenType.NORMAL
    for token, entry in added.items():
        text = entry["content"]
        if entry.get("special") or looks_special(text):
            texts[token], types[token] = text, TokenType.CONTROL
        else:
            # llama.cpp matches these against text in which spaces are still spaces.
            texts[token], types[token] = text.replace("▁", " "), TokenType.USER_DEFINED
    return texts, types


def added_tokens(path: Path, parsed: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The added tokens by id."""
    entries = parsed.get("added_tokens") or []
    try:
        return {int(entry["id"]): entry for entry in entries if isinstance(entry["content"], str)}
    except (TypeError, KeyError, ValueError):
        raise UnusableInputError(f"{path}: added_tokens is malformed", "download the file again") from None


def looks_special(text: str) -> bool:
    """Whether a token that isn't called special is one all the same (as deepseek-coder, gemma, command-r have)."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )
