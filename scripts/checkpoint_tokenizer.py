"""The tokenizer files of a Hugging Face checkpoint, rebuilt from the vocabulary in a GGUF header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.errors import UnusableInputError

# The values of tokenizer.ggml.token_type (llama.h, enum llama_token_type).
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool, trim_offsets: bool, add_prefix_space: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": trim_offsets,
        "use_regex": use_regex,
    }


# What `tokenizer.ggml.pre` stands for: everything in tokenizer.json but the tokens.
_PIPELINES: dict[str, dict[str, Any]] = {
    "smollm": {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                _byte_level(use_regex=True, trim_offsets=True),
            ],
        },
        "post_processor": None,
        "decoder": _byte_level(use_regex=True, trim_offsets=True, add_prefix_space=True),
    },
    "qwen2": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN2_SPLIT}, "behavior": "Isolated", "invert": False},
                _byte_level(use_regex=False, trim_offsets=False),
            ],
        },
        "post_processor": _byte_level(use_regex=False, trim_offsets=False),
        "decoder": _byte_level(use_regex=False, trim_offsets=False),
    },
}
_CLASSES = {"smollm": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer"}


def write_tokenizer(folder: Path, metadata: Mapping[str, Any], context_length: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, where the model has one, `chat_template.jinja`."""
    pre = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pre not in _PIPELINES:
        raise UnusableInputError(
            f"the tokenizer {metadata.get('tokenizer.ggml.model')!r} with pre-tokenizer {pre!r} cannot be turned back",
            f"known are byte-level BPE with {', '.join(_PIPELINES)}",
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    added = _added_tokens(tokens, types)
    # tokenizers numbers added tokens that are not in the model's vocabulary after its end.
    n_model = 1 + max(i for i, kind in enumerate(types) if kind == NORMAL)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **_PIPELINES[pre],
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens[:n_model])},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    write_json(folder / "tokenizer.json", document)
    write_json(folder / "tokenizer_config.json", _config(metadata, tokens, added, context_length, _CLASSES[pre]))
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, "utf-8")


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": tokens[i], **flags, "special": kind == CONTROL}
        for i, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _config(
    metadata: Mapping[str, Any], tokens: list[str], added: list[dict[str, Any]], context_length: int, class_name: str
) -> dict[str, Any]:
    def token(kind: str) -> str | None:
        number = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return None if number is None else tokens[number]

    return {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": metadata.get("tokenizer.ggml.add_space_prefix", False),
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        "bos_token": token("bos"),
        "clean_up_tokenization_spaces": False,
        "eos_token": token("eos"),
        "model_max_length": context_length,
        "pad_token": token("padding"),
        "tokenizer_class": class_name,
        "unk_token": token("unknown"),
    }


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as Hugging Face's libraries do."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
