"""`edgeinfer tokenize` as a shell script sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from checkpoints import QWEN2_SPLIT, byte_level_tokenizer, llama_config, write_checkpoint
from processes import PATIENCE_S

from edgeinfer.api.convert import convert
from edgeinfer.options import ConvertOptions

TEXT = "Hello, schöner Tag<|im_end|> again🚀"
BOS = 0


@pytest.fixture(scope="module", params=["split by the C library", "split by the original"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenize")
    document = json.loads(byte_level_tokenizer(QWEN2_SPLIT))
    if request.param == "split by the original":
        document["normalizer"] = {"type": "NFC"}
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "add_bos_token": True}
    checkpoint = write_checkpoint(folder / "model", llama_config(), tokenizer=json.dumps(document), settings=settings)
    convert(checkpoint, folder / "m.gguf", ConvertOptions(type="Q8_0"))
    return folder / "m.gguf"


def _run(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "edgeinfer", "tokenize", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return tokenizers.Tokenizer.from_str(byte_level_tokenizer(QWEN2_SPLIT)).encode(TEXT).ids


def test_ids_on_one_line_after_the_begin_token(model: Path, expected: list[int]) -> None:
    done = _run(model, TEXT)
    assert done.stdout.decode() == " ".join(map(str, [BOS, *expected])) + "\n"
    assert done.stderr == b""


def test_standard_input_is_taken_as_it_is(model: Path, expected: list[int]) -> None:
    assert _run(model, "--no-special", stdin=TEXT.encode()).stdout.split() == [str(t).encode() for t in expected]
    assert len(_run(model, "--no-special", stdin=b"a\n").stdout.split()) == 2


def test_count(model: Path, expected: list[int]) -> None:
    assert _run(model, TEXT, "--count").stdout.decode() == f"{len(expected) + 1}\n"
    assert _run(model, "", "--count", "--no-special").stdout.decode() == "0\n"


def test_pieces_put_together_are_the_text(model: Path, expected: list[int]) -> None:
    lines = _run(model, TEXT, "--pieces", "--no-special").stdout.decode().splitlines()
    ids, pieces = zip(*(line.split("\t") for line in lines), strict=True)
    assert [int(token) for token in ids] == expected
    parts = [json.loads(piece) for piece in pieces]
    assert any(isinstance(part, list) for part in parts)  # the emoji's bytes
    assert b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in parts).decode() == TEXT


def test_json(model: Path, expected: list[int]) -> None:
    document = json.loads(_run(model, TEXT, "--json").stdout)
    assert document["count"] == len(expected) + 1
    assert [token["id"] for token in document["tokens"]] == [BOS, *expected]
    assert document["tokens"][0]["piece"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        (["missing.gguf", "x"], b"", 3, "missing.gguf"),
        ([], b"", 2, "MODEL"),
        (["missing.gguf", "x", "--count", "--json"], b"", 2, "exclude each other"),
        (["missing.gguf"], b"\xff\xfe", 2, "standard input is not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], stdin: bytes, code: int, says: str) -> None:
    done = _run(*arguments, stdin=stdin)
    assert done.returncode == code
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    assert says in line
