"""RWKV's "World" tokenizer: a list of byte strings, of which the longest that fits is taken each time.

Retold as a tokenizer.json: WordPiece without a prefix takes the longest piece too, of a text that is spelled byte by
byte and never cut into words.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.convert.json_file import read_file
from edgeinfer.convert.tokenizer.bpe import byte_texts
from edgeinfer.convert.tokenizer.vocabulary import TokenType
from edgeinfer.errors import UnusableInputError

FILE_NAME = "rwkv_vocab_v20230424.txt"
END = "<s>"
"""Token 0, which the list leaves out: it ends texts, and no text is it."""
_MAX_NBYTES = 16 << 20
_LINE = re.compile(r"(\d{1,7}) (b?(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")) (\d{1,6})")
_TURN = b"\n\n"


def tokenizer_of_world(path: Path) -> dict[str, Any]:
    """The tokenizer.json that splits text as the list does. Raises UnusableInputError for another kind of file."""
    spelled = byte_texts()
    vocab = {"".join(spelled[byte] for byte in text): token for token, text in _read(path).items()}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": END, "special": True, **flags}],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": {
            "type": "WordPiece",
            "unk_token": END,
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 1 << 32,
            "vocab": {END: 0, **vocab},
        },
    }


def world_vocabulary(path: Path, vocab_size: int) -> dict[str, Any]:
    """The vocabulary keys of llama.cpp's `rwkv` tokenizer: bytes as Python would write them, and what ends texts."""
    texts, types = [END], [TokenType.CONTROL]
    by_token = _read(path)
    if (last := max(by_token)) >= vocab_size:
        raise UnusableInputError(
            f"{path}: token {last} lies beyond the model's {vocab_size} embeddings (vocab_size in config.json)",
            "tokenizer and weights are of different versions",
        )
    for token in range(1, vocab_size):
        is_there = token in by_token
        texts.append(repr(by_token[token])[2:-1] if is_there else f"[PAD{token}]")
        types.append(TokenType.NORMAL if is_there else TokenType.UNUSED)
    turns = [token for token, text in by_token.items() if text == _TURN]
    return {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        # An empty line ends a turn, as llama.cpp's script has it.
        **({"tokenizer.ggml.eot_token_id": turns[0]} if turns else {}),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def _read(path: Path) -> dict[int, bytes]:
    """The byte strings by token; each line is a number, a Python literal and its length in bytes."""
    try:
        lines = read_file(path, _MAX_NBYTES).decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError:
        raise _unknown(path, "is no text") from None
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        token, text = (int(match[1]), _literal(match[2])) if match else (0, b"")
        if match is None or not token or token in tokens or len(text) != int(match[3]):
            raise _unknown(path, f"has no token in line {number}")
        tokens[token] = text
    texts = set(tokens.values())
    if len(texts) != len(tokens) or END.encode() in texts:
        raise _unknown(path, "has a token twice")
    if lacking := [byte for byte in range(256) if bytes([byte]) not in texts]:
        raise _unknown(path, f"has no token for byte {lacking[0]}")
    return tokens


def _literal(source: str) -> bytes:
    try:
        value = ast.literal_eval(source)
        return value if isinstance(value, bytes) else str(value).encode()
    except (ValueError, SyntaxError):
        return b""


def _unknown(path: Path, what: str) -> UnusableInputError:
    return UnusableInputError(f"{path}: {what}", "get the original of RWKV's World tokenizer")
