"""Tokenizers of every kind for the tests, small, trained on the spot by the library itself."""

from __future__ import annotations

import base64
import json
import struct
from functools import cache
from typing import Any

import tokenizers
from checkpoints import SPECIAL, TEXT, byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNIGRAM_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def charsmap(replacement: bytes = b"a\0", *, root: int = 256 << 10, value: int = 0) -> bytes:
    """SentencePiece's table of characters to replace, with one entry: `A` becomes `a`."""
    units = [0] * 512
    units[0] = root  # the children of the root lie at 256 ^ label
    leaf = 256 ^ ord("A")
    units[leaf] = ord("A") | 1 << 8 | (leaf ^ 0x180) << 10  # its value lies at 0x180
    units[0x180] = 1 << 31 | value
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + replacement


@cache
def wordpiece_tokenizer() -> str:
    """tokenizer.json as BERT's: lower case, accents stripped, `##` in front of what continues a word."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=list(WORDPIECE_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer.to_str()


@cache
def unigram_tokenizer() -> str:
    """tokenizer.json as XLM-RoBERTa's: `▁` in front of words, pieces with log probabilities, characters replaced."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=list(UNIGRAM_SPECIAL), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    document = json.loads(tokenizer.to_str())
    encoded = base64.b64encode(charsmap()).decode()
    document["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": encoded}
    return json.dumps(document)


def tekken_file(pattern: str, n_special: int = 20) -> dict[str, Any]:
    """tekken.json with the words of the byte-level tokenizer: every byte, then what the merges make."""
    vocab = json.loads(byte_level_tokenizer())["model"]["vocab"]
    decode = tokenizers.decoders.ByteLevel().decode
    words = [decode([text]).encode() for text in sorted(vocab, key=vocab.__getitem__) if text not in SPECIAL]
    data = [*(bytes([byte]) for byte in range(256)), *(word for word in words if len(word) > 1 and b"\xef" not in word)]
    return {
        "config": {
            "pattern": pattern,
            "default_vocab_size": n_special + len(data),
            "default_num_special_tokens": n_special,
        },
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(part).decode()} for i, part in enumerate(data)],
    }


def sentencepiece_model(kind: int = 2) -> bytes:
    """tokenizer.model with the pieces of the SentencePiece-like tokenizer.json; a score is minus half the id."""
    vocab = json.loads(sentencepiece_tokenizer())["model"]["vocab"]
    merged = sorted(vocab, key=vocab.__getitem__)
    types = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(256)}}
    pieces = b"".join(_piece(text, -i / 2, types.get(text, 1)) for i, text in enumerate(merged))
    return pieces + _message(2, bytes([3 << 3, kind])) + _message(3, bytes([3 << 3, 1]))


def _piece(text: str, score: float, kind: int) -> bytes:
    return _message(1, _message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, kind]))


def _message(number: int, content: bytes) -> bytes:
    assert len(content) < 1 << 14
    return bytes([number << 3 | 2, len(content) & 0x7F | 0x80, len(content) >> 7]) + content
