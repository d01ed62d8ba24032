"""A tokenizer.json is not trusted: what it can make of a text is known before a text goes through it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Any

import pytest
from checkpoints import byte_level_tokenizer
from processes import PATIENCE_S

from edgeinfer.errors import UnusableInputError
from edgeinfer.tokenizer_json import decode_each, encode_all, load_tokenizer_json

GROWING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee" * 100}
WORDS_APART = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 1000}
BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    "a chain": ("normalizer", {"type": "Sequence", "normalizers": [GROWING] * 4}),
    "a nested chain": (
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [GROWING] * 2}] * 2},
    ),
    "between any two characters": ("normalizer", WORDS_APART),
    "in front, then each": (
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "ee" * 9}, GROWING]},
    ),
    "a chain of decoders": ("decoder", {"type": "Sequence", "decoders": [GROWING] * 2}),
    "the text again and again": (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1001,
            "pair": [],
            "special_tokens": {},
        },
    ),
}


def _tokenizer(**sections: Any) -> str:
    return json.dumps({**json.loads(byte_level_tokenizer()), **sections})


@pytest.mark.parametrize(("section", "value"), BOMBS.values(), ids=BOMBS)
def test_what_could_fill_the_memory_is_refused(section: str, value: dict[str, Any]) -> None:
    with pytest.raises(UnusableInputError) as caught:
        load_tokenizer_json(_tokenizer(**{section: value}), "model.gguf", "convert it again")
    assert caught.value.message.startswith("model.gguf: ")
    assert caught.value.hint == "convert it again"


def test_a_table_of_characters_counts_by_its_longest_text() -> None:
    def table(text: bytes) -> dict[str, str]:
        trie = bytes(4 * 256)
        blob = len(trie).to_bytes(4, "little") + trie + b"short\0" + text + b"\0"
        return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}

    assert load_tokenizer_json(_tokenizer(normalizer=table(b"x" * 33)), "a", "b")
    with pytest.raises(UnusableInputError):
        load_tokenizer_json(_tokenizer(normalizer=table(b"x" * 2000)), "a", "b")


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Lowercase"}]},
    ],
    ids=str,
)
def test_what_real_tokenizers_have_passes(normalizer: Any) -> None:
    tokenizer = load_tokenizer_json(_tokenizer(normalizer=normalizer), "a", "b")
    assert encode_all(tokenizer, ["Text of any kind"])[0]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"model": 1}', "x" * 10], ids=str)
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(UnusableInputError, match="not a usable tokenizer"):
        load_tokenizer_json(text, "a", "b")


TAKES_TOO_LONG = {"type": "Replace", "pattern": {"Regex": "(?:a|a)*b(?=c)"}, "content": "x"}
CUTS_TOO_MUCH = {"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63}


@pytest.mark.parametrize(("section", "value"), [("normalizer", TAKES_TOO_LONG), ("decoder", CUTS_TOO_MUCH)])
def test_a_bug_of_the_library_is_one_error_without_its_trace(
    section: str, value: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer.tokenizer_json.last_words", [print])  # as in the command's own process
    tokenizer = load_tokenizer_json(_tokenizer(**{section: value}), "a", "b")
    with pytest.raises(UnusableInputError, match="the tokenizer: not a usable tokenizer"):
        decode_each(tokenizer, encode_all(tokenizer, ["a" * 40 + " bc"])[0])
    assert capfd.readouterr() == ("", "")


MEANWHILE = """
import os, sys, threading
from edgeinfer.tokenizer_json import _without_panics
with _without_panics():
    os.write(2, b"thread panicked\\n")
    thread = threading.Thread(target=print, args=("from Python",), kwargs={"file": sys.stderr})
    thread.start()
    thread.join(60)
print("after it", file=sys.stderr)
os.write(2, b"at last\\n")
"""


def test_what_python_says_meanwhile_is_heard() -> None:
    done = subprocess.run([sys.executable, "-c", MEANWHILE], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stderr == "from Python\nafter it\nat last\n"
