"""Vocabularies that the C library would hang over, or be ended by, are found out; what is sound is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizer_files import charsmap

from edgeinfer.gguf_file.header import read_header
from edgeinfer.gguf_file.vocabulary import fault_in_vocabulary

TABLE = "tokenizer.ggml.precompiled_charsmap"
RWKV = [*(f"\\x{byte:02x}" for byte in range(256)), "ab", "\\n", "\\x"]


def _fault(folder: Path, model: str, tokens: list[Any], **more: Any) -> str:
    writer = gguf.GGUFWriter(folder / "a.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in more.items():
        writer.add_array(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return fault_in_vocabulary(read_header(folder / "a.gguf").metadata)


@pytest.mark.parametrize(
    ("model", "tokens", "expected"),
    [
        ("llama", ["<0x00>", "a"], "254 of the 256 bytes"),
        ("rwkv", ["ab", "b"], "begin with byte 97, and no token for that byte alone"),
        ("rwkv", ["\\x61b", "b"], "byte 97"),
        ("rwkv", ["\\nb", "b"], "byte 10"),
        ("bert", ["a", "x" * 600], "a token of 600 bytes"),
        ("plamo2", ["x" * 1700], "impossible lengths"),
        ("t5", ["x" * 17_000], "impossible lengths"),
        ("gpt2", ["x" * 17_000], "impossible lengths"),
        ("gpt2", ["x" * 1000] * 300, "impossible lengths"),
    ],
)
def test_what_the_library_takes_for_granted_is_checked(
    model: str, tokens: list[str], expected: str, tmp_path: Path
) -> None:
    assert expected in _fault(tmp_path, model, tokens)


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("rwkv", RWKV), ("bert", ["a", "x" * 100]), ("plamo2", ["x" * 100]), ("gpt2", ["x" * 1024, "ab"]), ("t5", ["a"])],
)
def test_a_sound_one(model: str, tokens: list[str], tmp_path: Path) -> None:
    assert _fault(tmp_path, model, tokens) == ""


def test_a_table_of_characters_that_leads_astray(tmp_path: Path) -> None:
    assert _fault(tmp_path, "t5", ["a"], **{TABLE.replace(".", "__"): charsmap()}) == ""
    assert TABLE in _fault(tmp_path, "t5", ["a"], **{TABLE.replace(".", "__"): charsmap(root=0xFFFFFC00)})


def test_a_vocabulary_of_numbers_is_left_to_the_library(tmp_path: Path) -> None:
    assert _fault(tmp_path, "rwkv", [1, 2]) == ""
