"""Which pre-tokenizer of llama.cpp a tokenizer gets: by its rules, by its hash, by --pre; never by default."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import (
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    byte_level_tokenizer,
    llama_config,
    sentencepiece_tokenizer,
    write_checkpoint,
)

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.convert.token_check import ORIGINAL_KEY
from edgeinfer.convert.tokenizer import pre_tokenizer as module
from edgeinfer.convert.tokenizer.hashes import CHECK_TEXT
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions

UNKNOWN_SPLIT = r"\p{L}+|\p{N}+|[^\p{L}\p{N}]"


def _plan(folder: Path, tokenizer: str, pre: str | None = None, **settings: Any) -> dict[str, Any]:
    checkpoint = write_checkpoint(
        folder / "model", llama_config(vocab_size=512), tokenizer=tokenizer, settings=settings
    )
    return plan_conversion(checkpoint, options=ConvertOptions(type="Q8_0", pre=pre)).plan.metadata


def _with(tokenizer: str, **model: Any) -> str:
    document = json.loads(tokenizer)
    document["model"] |= model
    return json.dumps(document)


def _falcon() -> str:
    """Falcon's steps: runs of punctuation, words, digits in threes."""
    document = json.loads(byte_level_tokenizer())
    threes = {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Punctuation", "behavior": "Contiguous"},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            {"type": "Digits", "individual_digits": False},
            threes,
        ],
    }
    return json.dumps(document)


def _hash(tokenizer: str, begin: list[int]) -> str:
    ids = tokenizers.Tokenizer.from_str(tokenizer).encode(CHECK_TEXT).ids
    return hashlib.sha256(str([*begin, *ids]).encode()).hexdigest()


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (byte_level_tokenizer(), "gpt-2"),
        (byte_level_tokenizer(QWEN2_SPLIT), "qwen2"),
        (byte_level_tokenizer(LLAMA3_SPLIT), "dbrx"),
        (_with(byte_level_tokenizer(LLAMA3_SPLIT), ignore_merges=True), "llama-bpe"),
        (_with(byte_level_tokenizer(QWEN2_SPLIT), ignore_merges=True), "qwen2"),
    ],
)
def test_the_rules_decide(tmp_path: Path, tokenizer: str, name: str) -> None:
    metadata = _plan(tmp_path, tokenizer)
    assert metadata["tokenizer.ggml.pre"] == name
    assert ORIGINAL_KEY not in metadata


def test_rules_that_the_library_follows_roughly_are_carried_along(tmp_path: Path) -> None:
    metadata = _plan(tmp_path, _falcon())
    assert metadata["tokenizer.ggml.pre"] == "falcon"
    assert ORIGINAL_KEY in metadata


def test_the_hash_tells_names_of_the_same_rules_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer()
    monkeypatch.setitem(module.PRE_TOKENIZER_BY_HASH, _hash(tokenizer, []), "olmo")
    assert _plan(tmp_path, tokenizer)["tokenizer.ggml.pre"] == "olmo"


def test_the_hash_does_not_overrule_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer(QWEN2_SPLIT)
    monkeypatch.setitem(module.PRE_TOKENIZER_BY_HASH, _hash(tokenizer, []), "bloom")
    assert _plan(tmp_path, tokenizer)["tokenizer.ggml.pre"] == "qwen2"


def test_the_hash_counts_the_begin_token_where_the_settings_add_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_level_tokenizer()
    monkeypatch.setitem(module.PRE_TOKENIZER_BY_HASH, _hash(tokenizer, []), "olmo")
    monkeypatch.setitem(module.PRE_TOKENIZER_BY_HASH, _hash(tokenizer, [0]), "phi-2")
    metadata = _plan(tmp_path, tokenizer, bos_token="<|endoftext|>", add_bos_token=True)
    assert metadata["tokenizer.ggml.pre"] == "phi-2"


def test_unknown_rules_are_refused_and_shown(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError) as caught:
        _plan(tmp_path, byte_level_tokenizer(UNKNOWN_SPLIT))
    assert UNKNOWN_SPLIT in caught.value.message
    assert "--pre" in caught.value.hint


def test_unknown_rules_with_a_known_hash_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer(UNKNOWN_SPLIT)
    monkeypatch.setitem(module.PRE_TOKENIZER_BY_HASH, _hash(tokenizer, []), "bloom")
    assert _plan(tmp_path, tokenizer)["tokenizer.ggml.pre"] == "bloom"


def test_rules_that_only_the_user_knows_are_carried_along(tmp_path: Path) -> None:
    metadata = _plan(tmp_path, byte_level_tokenizer(UNKNOWN_SPLIT), "gpt-2")
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert "pre_tokenizer" in json.loads(metadata[ORIGINAL_KEY])


def test_what_the_user_names_holds_while_an_importance_matrix_is_computed(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(UNKNOWN_SPLIT)
    checkpoint = write_checkpoint(tmp_path / "model", llama_config(vocab_size=512), tokenizer=tokenizer)
    (text := tmp_path / "text.txt").write_text("The quick brown fox. " * 200, "utf-8")
    options = ConvertOptions(type="Q4_0", pre="gpt-2", calibrate=text, verify=False)
    convert(checkpoint, tmp_path / "out.gguf", options)
    assert read_header(tmp_path / "out.gguf").metadata["tokenizer.ggml.pre"] == "gpt-2"


def test_what_the_user_names_and_the_rules_confirm_needs_nothing_more(tmp_path: Path) -> None:
    metadata = _plan(tmp_path, byte_level_tokenizer(QWEN2_SPLIT), "stablelm2")
    assert metadata["tokenizer.ggml.pre"] == "stablelm2"
    assert ORIGINAL_KEY not in metadata


def test_a_name_that_the_library_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(
        UnusableInputError, match="take the tokenizer: unknown pre-tokenizer type: 'nonsense'"
    ) as caught:
        _plan(tmp_path, byte_level_tokenizer(), "nonsense")
    assert "--pre" in caught.value.hint


def test_naming_one_has_no_effect_on_another_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--pre"):
        _plan(tmp_path, sentencepiece_tokenizer(), "gpt-2")
