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
    Raises UnusableInputError for a token beyond `vocab_size`, and for texts or ids that stand twice.
    """
    texts = [f"[PAD{i}]" for i in range(vocab_size)]
    unused, normal = int(TokenType.UNUSED), int(TokenType.NORMAL)  # looked up a hundred thousand times
    types = [unused] * vocab_size
    vocab = ids_by_text(path, parsed)
    added = added_tokens(path, parsed)
    largest = max([*vocab.values(), *added])
    if largest >= vocab_size:
        raise UnusableInputError(
            f"{path}: token {largest} lies beyond the model's {vocab_size} embeddings (vocab_size in config.json)",
            "tokenizer and weights are of different versions",
        )
    for text, token in vocab.items():
        if types[token] != unused:
            raise _ambiguous(path, f"{texts[token]!r} and {text!r} are both token {token}")
        texts[token], types[token] = text, normal
    for token, entry in added.items():
        text = entry["content"]
        if types[token] != TokenType.UNUSED and texts[token] != text:
            raise _ambiguous(path, f"{texts[token]!r} and {text!r} are both token {token}")
        if entry.get("special") or looks_special(text):
            texts[token], types[token] = text, TokenType.CONTROL
        else:
            # llama.cpp matches these against text in which spaces are still spaces.
            texts[token], types[token] = text.replace("▁", " "), TokenType.USER_DEFINED
    _check_texts(path, texts)
    return texts, types


def without_unembedded(document: dict[str, Any], vocab_size: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tokenizer without the added tokens that lie beyond the embedding, and their texts.

    A model never saw them: Gemma 3's text models have a tokenizer with a token for images. Nothing else may refer to
    them, or the tokenizers library does not load what is left.
    """
    entries = document.get("added_tokens")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and type(e.get("id")) is int for e in entries):
        return document, ()
    surplus = tuple(str(entry.get("content")) for entry in entries if entry["id"] >= vocab_size)
    if not surplus:
        return document, ()
    kept = [entry for entry in entries if entry["id"] < vocab_size]
    match document.get("model"):
        case {"vocab": dict(vocab), **model} if any(text in vocab for text in surplus):
            embedded = {text: token for text, token in vocab.items() if text not in surplus}
            return {**document, "added_tokens": kept, "model": {**model, "vocab": embedded}}, surplus
    return {**document, "added_tokens": kept}, surplus


def ids_by_text(path: Path, parsed: dict[str, Any]) -> dict[str, int]:
    """The vocabulary without the added tokens; a Unigram model lists its pieces in the order of their ids."""
    vocab = parsed["model"].get("vocab")
    if isinstance(vocab, list):
        ids = {str(entry[0]): token for token, entry in enumerate(vocab)}
        if len(ids) != len(vocab):
            raise _ambiguous(path, "a piece stands twice in the vocabulary")
        vocab = ids
    if not isinstance(vocab, dict) or not vocab:
        raise UnusableInputError(f"{path}: the tokenizer has no vocabulary", "download the file again")
    return vocab


def _check_texts(path: Path, texts: list[str]) -> None:
    """The library ends the process over a text that stands twice, and reads no further than a zero byte."""
    if len(set(texts)) == len(texts) and not any("\0" in text for text in texts):
        return
    seen: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text in seen or "\0" in text:
            what = f"is token {seen[text]} too" if text in seen else "has a zero byte"
            raise _ambiguous(path, f"token {token}, {text!r}, {what}")
        seen[text] = token


def _ambiguous(path: Path, what: str) -> UnusableInputError:
    return UnusableInputError(f"{path}: {what}", "the tokenizer was edited or merged wrongly: get the original")


def added_tokens(path: Path, parsed: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The added tokens by id; the tokenizers library has checked their form."""
    entries = parsed.get("added_tokens") or []
    by_id = {int(entry["id"]): entry for entry in entries}
    if len(by_id) != len(entries):
        raise _ambiguous(path, "two added tokens have the same id")
    return by_id


def merge_entries(path: Path, parsed: dict[str, Any]) -> list[Any]:
    """The merges, most important first, as the file has them: `"left right"` (old) or `["left", "right"]` (new).

    The tokenizers library has checked their form, but accepts a file without any.
    """
    entries: list[Any] | None = parsed["model"].get("merges")
    if not entries:
        raise UnusableInputError(f"{path}: the tokenizer has no merges", "download the file again")
    return entries


def merge_pairs(path: Path, parsed: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of both forms as pairs."""
    entries = merge_entries(path, parsed)
    pairs = (entry.split(" ") if isinstance(entry, str) else entry for entry in entries)
    return [(left, right) for left, right in pairs]


def looks_special(text: str) -> bool:
    """Whether a token that isn't called special is one all the same (as deepseek-coder, gemma, command-r have)."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )
