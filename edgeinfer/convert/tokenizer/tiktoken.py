"""Kimi's tiktoken.model, retold as a tokenizer.json, so that one way leads on from there.

The file has a byte string in base64 and its rank on each line (https://github.com/openai/tiktoken, tiktoken/load.py).
How text is cut before, and which special tokens follow, stands in the code that comes with such a file; that of Kimi
and Moonlight (tokenization_kimi.py, whose class is TikTokenTokenizer) is known here, and no other.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from edgeinfer.convert.json_file import MAX_JSON_NBYTES, read_file
from edgeinfer.convert.tokenizer.bpe import byte_texts, split_then_bytes
from edgeinfer.convert.tokenizer.pre_tokenizer import KIMI
from edgeinfer.convert.tokenizer.tekken import MAX_TOKEN_NBYTES, MAX_TOKENS, merges
from edgeinfer.errors import UnusableInputError

KNOWN_CLASS = "TikTokenTokenizer"
N_SPECIAL = 256
MAX_SQUARES = 1 << 26
"""The squares of the lengths of all tokens; Kimi's have a fifth."""


def tokenizer_of_tiktoken(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json that does what the file does with `settings`, those of tokenizer_config.json.

    Raises UnusableInputError when it is malformed, or for code of another name.
    """
    if settings.get("tokenizer_class") != KNOWN_CLASS:
        raise UnusableInputError(
            f"{path}: tokenizer_config.json does not say that it is a {KNOWN_CLASS}, and no other one is known",
            "get the model's tokenizer.json",
        )
    try:
        ranks = _ranks(read_file(path, MAX_JSON_NBYTES))
        special = _special_texts(settings.get("added_tokens_decoder"), len(ranks))
    except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UnusableInputError(f"{path}: not a usable tiktoken file ({error})", "download the file again") from None
    spell = byte_texts()
    texts = {data: "".join(map(spell.__getitem__, data)) for data in ranks}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "added_tokens": [{"id": token, "content": text, **flags} for token, text in special.items()],
        "normalizer": None,
        "pre_tokenizer": split_then_bytes(KIMI),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {texts[data]: rank for data, rank in ranks.items()},
            "merges": [[texts[left], texts[right]] for left, right in merges(texts, ranks)],
        },
    }


def _ranks(content: bytes) -> dict[bytes, int]:
    """The byte strings in the order of their ranks, which have no gaps; every single byte is among them."""
    lines = content.split(b"\n")
    if len(lines) > MAX_TOKENS:
        raise ValueError(f"{len(lines)} lines")
    ranks: dict[bytes, int] = {}
    for line in filter(None, map(bytes.strip, lines)):
        encoded, rank = line.split()
        data = base64.b64decode(encoded, validate=True)
        if int(rank) != len(ranks) or data in ranks or not 0 < len(data) <= MAX_TOKEN_NBYTES:
            raise ValueError(f"token {len(ranks)} is out of order, empty, too long or stands twice")
        ranks[data] = len(ranks)
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("tokens are missing")
    if sum(len(data) ** 2 for data in ranks) > MAX_SQUARES:
        raise ValueError("tokens of impossible lengths")
    return ranks


def _special_texts(stated: Any, n_tokens: int) -> dict[int, str]:
    """The special tokens by their ids; those without a name of their own are reserved."""
    named = {int(token): entry["content"] for token, entry in (stated or {}).items()}
    if not all(isinstance(text, str) and text for text in named.values()):
        raise ValueError("added_tokens_decoder has a token without text")
    texts = {token: named.get(token, f"<|reserved_token_{token}|>") for token in range(n_tokens, n_tokens + N_SPECIAL)}
    if len(set(texts.values())) < N_SPECIAL:
        raise ValueError("added_tokens_decoder has a text twice")
    return texts
