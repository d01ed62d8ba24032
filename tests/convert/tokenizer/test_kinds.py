"""Every kind of tokenizer becomes a GGUF vocabulary that splits text as the original does."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from checkpoints import LLAMA3_SPLIT, byte_level_tokenizer, llama_config, sentencepiece_tokenizer, write_checkpoint
from tokenizer_files import sentencepiece_model, tekken_file, unigram_tokenizer, wordpiece_tokenizer

from edgeinfer.api.convert import convert
from edgeinfer.api.vocabulary import tokenize
from edgeinfer.convert.token_check import ORIGINAL_KEY, check_texts
from edgeinfer.convert.tokenizer.tekken import tokenizer_of_tekken
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import Metadata, read_header
from edgeinfer.options import ConvertOptions

BERT_SETTINGS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
XLMR_SETTINGS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _checkpoint(folder: Path, tokenizer: str, settings: dict[str, Any] | None = None, **config: Any) -> Path:
    size = config.pop("vocab_size", 512)
    return write_checkpoint(
        folder / "model", llama_config(vocab_size=size, **config), tokenizer=tokenizer, settings=settings or {}
    )


def _converted(checkpoint: Path, *texts: str, original: tokenizers.Tokenizer) -> Metadata:
    """Convert, which checks for itself; hold what `tokenize` gives against the original too."""
    output = checkpoint.parent / "out.gguf"
    convert(checkpoint, output, ConvertOptions(type="Q8_0"))
    for text in [*check_texts(original), *texts]:
        expected = original.encode(text, add_special_tokens=False).ids
        assert [token.id for token in tokenize(output, text, add_special=False)] == expected
    return read_header(output).metadata


def test_wordpiece(tmp_path: Path) -> None:
    original = tokenizers.Tokenizer.from_str(wordpiece_tokenizer())
    checkpoint = _checkpoint(tmp_path, wordpiece_tokenizer(), BERT_SETTINGS, type_vocab_size=2)
    metadata = _converted(checkpoint, "The dog's FOX, schön!", original=original)
    assert metadata.text("tokenizer.ggml.model") == "bert"
    assert metadata["tokenizer.ggml.token_type_count"] == 2
    assert metadata["tokenizer.ggml.bos_token_id"] == metadata["tokenizer.ggml.cls_token_id"] == 2
    assert metadata["tokenizer.ggml.eos_token_id"] == metadata["tokenizer.ggml.seperator_token_id"] == 3
    assert metadata["tokenizer.ggml.normalizer.lowercase"] is True
    vocab = original.get_vocab()
    texts = metadata["tokenizer.ggml.tokens"]
    assert texts[vocab["[CLS]"]] == "[CLS]"
    assert texts[vocab["dog"]] == "▁dog"
    assert texts[vocab["##s"]] == "s"
    whole = [token.id for token in tokenize(tmp_path / "out.gguf", "the dog")]
    assert whole == original.encode("the dog").ids


def test_unigram(tmp_path: Path) -> None:
    original = tokenizers.Tokenizer.from_str(unigram_tokenizer())
    checkpoint = _checkpoint(tmp_path, unigram_tokenizer(), XLMR_SETTINGS)
    metadata = _converted(checkpoint, "AAA dogs,  A fox", original=original)
    assert metadata.text("tokenizer.ggml.model") == "t5"
    assert metadata["tokenizer.ggml.add_space_prefix"] is True
    assert metadata["tokenizer.ggml.remove_extra_whitespaces"] is True
    pieces = json.loads(unigram_tokenizer())["model"]["vocab"]
    np.testing.assert_array_equal(
        metadata["tokenizer.ggml.scores"][: len(pieces)], np.array([score for _, score in pieces], np.float32)
    )
    assert set(metadata["tokenizer.ggml.scores"][len(pieces) :]) == {-10000.0}
    unknown = json.loads(unigram_tokenizer())["model"]["unk_id"]
    assert metadata["tokenizer.ggml.token_type"][unknown] == 2


def test_a_damaged_table_of_characters_is_refused(tmp_path: Path) -> None:
    document = json.loads(unigram_tokenizer())
    document["normalizer"]["precompiled_charsmap"] = "AAAA"
    with pytest.raises(UnusableInputError):
        convert(_checkpoint(tmp_path, json.dumps(document), XLMR_SETTINGS), tmp_path / "out.gguf")


def test_a_sentencepiece_model_alone(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, sentencepiece_tokenizer())
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.model").write_bytes(sentencepiece_model())
    original = tokenizers.Tokenizer.from_str(sentencepiece_tokenizer())
    metadata = _converted(checkpoint, "the dog sleeps  over there", original=original)
    assert metadata.text("tokenizer.ggml.model") == "llama"
    assert ORIGINAL_KEY not in metadata
    types = metadata["tokenizer.ggml.token_type"]
    assert types[:4].tolist() == [2, 3, 3, 6]


def test_a_sentencepiece_model_gives_its_scores_beside_a_tokenizer_json(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, sentencepiece_tokenizer())
    (checkpoint / "tokenizer.model").write_bytes(sentencepiece_model())
    original = tokenizers.Tokenizer.from_str(sentencepiece_tokenizer())
    metadata = _converted(checkpoint, original=original)
    scores = metadata["tokenizer.ggml.scores"]
    assert scores[[3, 300, 399]].tolist() == [-1.5, -150.0, -199.5]
    assert scores[1] == -1000.0
    assert set(scores[400:]) == {-10000.0}


def test_a_sentencepiece_model_of_another_version_is_refused(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, sentencepiece_tokenizer())
    (checkpoint / "tokenizer.model").write_bytes(sentencepiece_model().replace("▁the".encode(), "▁tha".encode()))
    with pytest.raises(UnusableInputError, match=r"tokenizer\.model says '▁tha"):
        convert(checkpoint, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 30,
        sentencepiece_model()[:-9],
        sentencepiece_model()[:1000],
        sentencepiece_model(kind=1),
        b"\x0a\x05",
    ],
)
def test_a_damaged_sentencepiece_model_is_refused(tmp_path: Path, data: bytes) -> None:
    checkpoint = _checkpoint(tmp_path, sentencepiece_tokenizer())
    (checkpoint / "tokenizer.model").write_bytes(data)
    with pytest.raises(UnusableInputError, match=r"tokenizer\.model: not a SentencePiece"):
        convert(checkpoint, tmp_path / "out.gguf")


def test_tekken(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, byte_level_tokenizer())
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    file = checkpoint / "tekken.json"
    file.write_text(json.dumps(tekken_file(LLAMA3_SPLIT)), "utf-8")
    original = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of_tekken(file)))
    metadata = _converted(checkpoint, original=original)
    assert metadata.text("tokenizer.ggml.pre") == "llama-bpe"
    assert metadata["tokenizer.ggml.bos_token_id"] == 1
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.tokens"][3] == "[INST]"
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in tekken_file(LLAMA3_SPLIT)["vocab"]}
    words = [" over", " the", " Übungen", " again", "123"]
    expected = [20 + rank for word in words for rank in _by_ranks(word.encode(), ranks)]
    assert [token.id for token in tokenize(tmp_path / "out.gguf", "".join(words), add_special=False)] == expected


def _by_ranks(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """What the file means: the pair whose union has the lowest rank is joined, until no union is known."""
    parts = [bytes([byte]) for byte in word]
    while True:
        unions = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not unions:
            return [ranks[part] for part in parts]
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize(
    "change",
    [
        {"config": {}},
        {"vocab": []},
        {"vocab": [{"rank": 0, "token_bytes": "!"}]},
        {"config": {"pattern": "x", "default_vocab_size": 1 << 40, "default_num_special_tokens": 20}},
    ],
)
def test_a_damaged_tekken_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "tekken.json"
    file.write_text(json.dumps({**tekken_file(LLAMA3_SPLIT), **change}), "utf-8")
    with pytest.raises(UnusableInputError, match="tekken"):
        tokenizer_of_tekken(file)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, byte_level_tokenizer())
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(UnusableInputError, match="neither tokenizer"):
        convert(checkpoint, tmp_path / "out.gguf")
