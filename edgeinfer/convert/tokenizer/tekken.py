"""Mistral's tekken.json, retold as a tokenizer.json, so that one way leads on from there.

The file lists byte strings by rank, and the special tokens that stand before them (mistral-common,
tokens/tokenizers/tekken.py).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgeinfer.convert.json_file import read_object
from edgeinfer.convert.tokenizer.bpe import byte_texts, split_then_bytes
from edgeinfer.errors import UnusableInputError

MAX_TOKEN_NBYTES = 1024
MAX_TOKENS = 1 << 21
SETTINGS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# What files of the first versions, which don't list them, begin with.
_FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def tokenizer_of_tekken(path: Path) -> dict[str, Any]:
    """The tokenizer.json that does what a tekken.json says. Raises UnusableInputError when it is malformed."""
    parsed = read_object(path)
    try:
        config = parsed["config"]
        pattern, n_special = str(config["pattern"]), int(config["default_num_special_tokens"])
        n_tokens = int(config["default_vocab_size"])
        if not 3 <= n_special < n_tokens <= MAX_TOKENS:
            raise ValueError(f"{n_special} special tokens of {n_tokens}")
        ranks = _ranks(parsed["vocab"], n_tokens - n_special)
        special = _special_texts(parsed.get("special_tokens"), n_special)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UnusableInputError(f"{path}: not a usable tekken file ({error!r})", "download the file again") from None
    spell = byte_texts()
    texts = {data: "".join(map(spell.__getitem__, data)) for data in ranks}
    # A text has one id only: bytes that spell a special token are left to be put together from others.
    specials = frozenset(special)
    texts = {data: text for data, text in texts.items() if text not in specials}
    return {
        "added_tokens": [_added_token(token, text) for token, text in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": split_then_bytes(pattern),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [special.index("<s>")], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {
                **{text: token for token, text in enumerate(special)},
                **{text: n_special + ranks[data] for data, text in texts.items()},
            },
            "merges": [[texts[left], texts[right]] for left, right in merges(texts, ranks)],
        },
    }


def _ranks(entries: Any, n_tokens: int) -> dict[bytes, int]:
    """The first `n_tokens` byte strings, which the model has embeddings for; every single byte is among them."""
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:n_tokens]):
        data = base64.b64decode(entry["token_bytes"], validate=True)
        if entry["rank"] != rank or data in ranks or not 0 < len(data) <= MAX_TOKEN_NBYTES:
            raise ValueError(f"token {rank} is out of order, empty, too long or stands twice")
        ranks[data] = rank
    if len(ranks) < n_tokens or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("tokens are missing")
    return ranks


def merges(tokens: Mapping[bytes, str], ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every way to put a token together from two, in the order of the tokens."""
    for token in tokens:
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(ranks[a], ranks[b], a, b) for a, b in splits if a in tokens and b in tokens]
        yield from ((left, right) for *_, left, right in sorted(known))


def _special_texts(entries: Any, n_special: int) -> list[str]:
    texts = (
        {int(entry["rank"]): str(entry["token_str"]) for entry in entries}
        if entries
        else dict(enumerate(_FIRST_SPECIAL))
    )
    return [texts.get(token, f"<SPECIAL_{token}>") for token in range(n_special)]


def _added_token(token: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": text, **flags}
