"""Kimi's tiktoken.model: what it does to text, and what of it is refused.

The forms of a word, and their joining by rank, were held against the tiktoken library on Llama 3's vocabulary.
"""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import LLAMA3_SPLIT, byte_level_tokenizer, llama_config, write_checkpoint
from tokenizer_files import tekken_file

from edgeinfer.api.convert import convert
from edgeinfer.api.vocabulary import tokenize
from edgeinfer.convert.token_check import check_texts
from edgeinfer.convert.tokenizer.tiktoken import tokenizer_of_tiktoken
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions

WORDS = [base64.b64decode(entry["token_bytes"]) for entry in tekken_file(LLAMA3_SPLIT)["vocab"]]
SETTINGS = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(len(WORDS)): {"content": "[BOS]"},
        str(len(WORDS) + 1): {"content": "[EOS]"},
        str(len(WORDS) + 5): {"content": "<|im_end|>"},
    },
}


def _lines(words: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(words))


def _write(folder: Path, content: bytes | None = None) -> Path:
    file = folder / "tiktoken.model"
    file.write_bytes(_lines(WORDS) if content is None else content)
    return file


def _by_ranks(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """What the file means: the pair whose union has the lowest rank is joined, until no union is known."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while unions := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


def test_text_is_cut_as_kimis_code_cuts_it_and_joined_by_rank(tmp_path: Path) -> None:
    document = tokenizer_of_tiktoken(_write(tmp_path), SETTINGS)
    original = tokenizers.Tokenizer.from_str(json.dumps(document))
    ranks = {word: rank for rank, word in enumerate(WORDS)}
    pieces = [
        "中文",
        "English",
        "混合",
        " over",
        " the",
        " Übungen",
        "ISN'T",
        "123",
        "45",
        "camel",
        "Case",
        "नमस्ते",
        "!?\n",
    ]
    expected = [token for piece in pieces for token in _by_ranks(piece.encode(), ranks)]
    assert original.encode("".join(pieces), add_special_tokens=False).ids == expected
    assert original.token_to_id(f"<|reserved_token_{len(WORDS) + 2}|>") == len(WORDS) + 2
    assert original.get_vocab_size() == len(WORDS) + 256


def test_a_converted_file_splits_text_as_the_original(tmp_path: Path) -> None:
    n_tokens = len(WORDS) + 256
    config = llama_config(vocab_size=n_tokens)
    checkpoint = write_checkpoint(tmp_path / "model", config, tokenizer=byte_level_tokenizer(), settings=SETTINGS)
    (checkpoint / "tokenizer.json").unlink()
    original = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of_tiktoken(_write(checkpoint), SETTINGS)))
    output = tmp_path / "out.gguf"
    convert(checkpoint, output, ConvertOptions(type="Q8_0"))
    for text in check_texts(original):
        expected = original.encode(text, add_special_tokens=False).ids
        assert [token.id for token in tokenize(output, text, add_special=False)] == expected
    metadata = read_header(output).metadata
    assert metadata.text("tokenizer.ggml.pre") == "kimi-k2"
    assert metadata["tokenizer.ggml.bos_token_id"] == len(WORDS)
    assert metadata["tokenizer.ggml.eos_token_id"] == len(WORDS) + 1
    assert metadata["tokenizer.ggml.token_type"][len(WORDS) + 5] == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"IQ== x\n",
        b"IQ==\n",
        b"!!! 0\n",
        b"IQ== 1\n",
        _lines(WORDS[1:]),
        _lines([*WORDS, WORDS[0]]),
        _lines([*WORDS, b""]),
        _lines([*WORDS, b"x" * 1025]),
        _lines([*WORDS, *(b"%04d" % i * 256 for i in range(65))]),
        b"\n" * (1 << 21),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UnusableInputError, match="not a usable tiktoken file"):
        tokenizer_of_tiktoken(_write(tmp_path, content), SETTINGS)


@pytest.mark.parametrize(
    "added",
    [
        "x",
        {"x": {}},
        {"600": {"content": ""}},
        {"600": "x"},
        {str(len(WORDS) + i): {"content": "twice"} for i in (0, 1)},
    ],
)
def test_damaged_special_tokens_are_refused(tmp_path: Path, added: Any) -> None:
    with pytest.raises(UnusableInputError, match="not a usable tiktoken file"):
        tokenizer_of_tiktoken(_write(tmp_path), {**SETTINGS, "added_tokens_decoder": added})


@pytest.mark.parametrize("name", [None, "QWenTokenizer", 7])
def test_code_of_another_name_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(UnusableInputError, match="TikTokenTokenizer"):
        tokenizer_of_tiktoken(_write(tmp_path), {**SETTINGS, "tokenizer_class": name})
