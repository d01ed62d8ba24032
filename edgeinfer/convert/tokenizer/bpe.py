"""Byte-level BPE: llama.cpp's `gpt2` tokenizer with the pre-tokenizer that the file's own rules call for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.convert.tokenizer.vocabulary import merge_entries, token_table


def bpe_vocabulary(
    path: Path, parsed: dict[str, Any], settings: dict[str, Any], vocab_size: int, pre: str
) -> dict[str, Any]:
    """The vocabulary keys of a byte-level BPE tokenizer with llama.cpp's pre-tokenizer `pre`. UnusableInputError."""
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
            entry if isinstance(entry, str) else " ".join(part.replace(" ", "Ġ") for part in entry)
            for entry in merge_entries(path, parsed)
        ],
    }


def byte_texts() -> list[str]:
    """How byte-level BPE spells each byte: printable Latin-1 as it is, the others as letters from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


def split_then_bytes(pattern: str) -> dict[str, Any]:
    """The pre-tokenizer of a tokenizer.json that cuts text by a regular expression and then spells its bytes."""
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
