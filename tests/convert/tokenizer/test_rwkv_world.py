"""RWKV's World tokenizer: the list of byte strings that its checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import convert
from edgeinfer.api.vocabulary import tokenize
from edgeinfer.convert.checkpoint import open_checkpoint
from edgeinfer.convert.tokenizer import load_tokenizer
from edgeinfer.convert.tokenizer.rwkv_world import FILE_NAME
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions

WORDS = ["\n\n", "th", "the", "they", " th", "'\"\\\t", "ö", "好", b"\xe4\xbd", b"\xff\xfe"]
LINES = [*(bytes([byte]) if byte > 127 else chr(byte) for byte in range(256)), *WORDS]


def _listed(tokens: list[Any]) -> str:
    def nbytes(token: Any) -> int:
        return len(token if isinstance(token, bytes) else token.encode())

    return "".join(f"{i} {token!r} {nbytes(token)}\r\n" for i, token in enumerate(tokens, start=1))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = make_checkpoint(read_model("rwkv7"), PLAIN, tmp_path)
    (path / "tokenizer.json").unlink()
    settings = {
        "bos_token": "<|rwkv_tokenizer_end_of_text|>",
        "add_bos_token": False,
        "chat_template": "{{ messages }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / FILE_NAME).write_bytes(_listed(LINES).encode())
    return path


def _longest_first(text: bytes) -> list[int]:
    tokens = {token if isinstance(token, bytes) else token.encode(): i for i, token in enumerate(LINES, start=1)}
    found, at = [], 0
    while at < len(text):
        end = next(end for end in range(len(text), at, -1) if text[at:end] in tokens)
        found.append(tokens[text[at:end]])
        at = end
    return found


def test_the_longest_token_is_taken_each_time(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "out.gguf", ConvertOptions(type="BF16"))
    metadata = read_header(tmp_path / "out.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "rwkv"
    assert metadata["tokenizer.ggml.tokens"][257:263] == ["\\n\\n", "th", "the", "they", " th", "\\'\"\\\\\\t"]
    assert metadata["tokenizer.ggml.tokens"][265] == "\\xe4\\xbd"
    assert metadata["tokenizer.ggml.tokens"][300] == "[PAD300]"
    assert {kind: metadata[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "eot")} == {
        "bos": 0,
        "eos": 0,
        "eot": 257,
    }
    assert "tokenizer.huggingface.json" not in metadata
    for text in ("the they th, thy", "schön 你好好\n\n\nx", "'\"\\\t'\""):
        assert [token.id for token in tokenize(tmp_path / "out.gguf", text)] == _longest_first(text.encode())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b"\xff\xfe", "is no text"),
        (b"1 'a'", "no token in line 1"),
        (b"1 'a' 2\n", "no token in line 1"),
        (b"0 'a' 1\n", "no token in line 1"),
        (b"1 'a' 1\n1 'b' 1\n", "no token in line 2"),
        (b"1 'a' 1\n2 'a' 1\n", "a token twice"),
        (b"1 'a' 1\n", "no token for byte 0"),
        (b"1 " + b"(" * 100_000 + b" 1\n", "no token in line 1"),
        (b"1 ['a'] 1\n", "no token in line 1"),
        (b"", "no token for byte 0"),
        (_listed(LINES).encode() + b"400 'zz' 2\n", "beyond the model's 320"),
        (_listed([*LINES, "<s>"]).encode(), "a token twice"),
    ],
    ids=range(12),
)
def test_another_file_is_refused(checkpoint: Path, broken: bytes, message: str) -> None:
    (checkpoint / FILE_NAME).write_bytes(broken)
    with pytest.raises(UnusableInputError, match=message):
        load_tokenizer(open_checkpoint(checkpoint))
