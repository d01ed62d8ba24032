"""The original tokenizer splits, the vocabulary in the file does everything else."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest
from checkpoints import byte_level_tokenizer
from tokenizer_files import UNIGRAM_SPECIAL, unigram_tokenizer

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.runtime.fake import BOS, N_VOCAB, FakeVocabulary
from edgeinfer.runtime.vocabulary import MAX_CHARS, OriginalVocabulary, load_original


def _document(tokens_of: int = 2) -> str:
    """A tokenizer of two words; `<|end|>` is special."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocab = {"<unk>": 0, "a": 1, "b": tokens_of, "<|end|>": tokens_of + 1}
    return json.dumps(
        {
            "added_tokens": [{"id": tokens_of + 1, "content": "<|end|>", "special": True, **flags}],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        }
    )


def _vocabulary(document: str | None = None) -> OriginalVocabulary:
    return OriginalVocabulary(FakeVocabulary(), lambda: load_original(document or _document(), "m.gguf"), "m.gguf")


def test_the_original_splits_and_the_file_says_what_stands_in_front() -> None:
    vocabulary = _vocabulary()
    assert vocabulary.tokenize("a b", add_special=False, parse_special=True).tolist() == [1, 2]
    assert vocabulary.tokenize("a b", add_special=True, parse_special=True).tolist() == [BOS, 1, 2]
    assert vocabulary.tokenize("", add_special=True, parse_special=True).tolist() == [BOS]


def test_spelled_out_control_tokens_are_text_unless_asked_for() -> None:
    vocabulary = _vocabulary()
    assert vocabulary.tokenize("a <|end|>", add_special=False, parse_special=True).tolist() == [1, 3]
    assert 3 not in vocabulary.tokenize("a <|end|>", add_special=False, parse_special=False)
    assert vocabulary.tokenize("a <|end|>", add_special=False, parse_special=True).tolist() == [1, 3]


@pytest.mark.parametrize("text", ["</s>", "a </s> b", "x<s>", "</s></s>", "<unk></s><s>x</s>", "<<s>s></s"])
def test_a_piece_of_the_model_that_is_spelled_as_a_control_token_is_none(text: str) -> None:
    """Unigram's pieces are such, and the likeliest of all."""
    vocabulary, control = _vocabulary(unigram_tokenizer()), set(range(len(UNIGRAM_SPECIAL)))
    parsed = set(vocabulary.tokenize(text, add_special=False, parse_special=True).tolist())
    assert parsed & control
    as_text = vocabulary.tokenize(text, add_special=False, parse_special=False).tolist()
    assert set(as_text) & control <= {UNIGRAM_SPECIAL.index("<unk>")}
    assert len(as_text) > len(text) / 2
    plain = ["another", "word"]
    same = [
        vocabulary.tokenize(word, add_special=False, parse_special=flag).tolist() for word in plain for flag in (0, 1)
    ]
    assert same[::2] == same[1::2]


def test_a_text_full_of_such_pieces_takes_no_longer_each() -> None:
    vocabulary = _vocabulary(unigram_tokenizer())
    assert len(vocabulary.tokenize("</s>" * 50_000, add_special=False, parse_special=False)) > 100_000


def test_everything_else_is_the_file_s() -> None:
    vocabulary, base = _vocabulary(), FakeVocabulary()
    assert (vocabulary.n_tokens, vocabulary.bos, vocabulary.eos) == (N_VOCAB, base.bos, base.eos)
    assert vocabulary.adds_bos
    assert vocabulary.piece(65) == b"A"
    assert vocabulary.piece(BOS, special=True) == base.piece(BOS, special=True)
    assert vocabulary.text(BOS) == "<bos>"
    assert base.eos in vocabulary.end_tokens


def test_the_original_is_not_asked_for_before_it_is_needed() -> None:
    def get() -> NoReturn:
        pytest.fail("asked for")

    assert OriginalVocabulary(FakeVocabulary(), get, "m.gguf").piece(65) == b"A"


@pytest.mark.parametrize("document", ["{}", "no JSON", '{"model": null}'])
def test_what_is_no_tokenizer_is_refused_by_the_key_s_name(document: str) -> None:
    with pytest.raises(UnusableInputError, match=r"m\.gguf: tokenizer\.huggingface\.json: not a usable tokenizer"):
        _vocabulary(document).tokenize("a", add_special=False, parse_special=True)


def test_tokens_beyond_the_vocabulary_never_reach_the_model() -> None:
    with pytest.raises(UnusableInputError, match="gives token 5000, the vocabulary has"):
        _vocabulary(_document(5000)).tokenize("b", add_special=False, parse_special=True)


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(UsageError):
        _vocabulary(byte_level_tokenizer()).tokenize("\ud800", add_special=False, parse_special=True)


def test_a_text_that_a_normalizer_makes_too_long_is_refused() -> None:
    document = json.loads(_document())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee" * 450}
    vocabulary = _vocabulary(json.dumps(document))
    assert len(vocabulary.tokenize("a " * 50_000, add_special=False, parse_special=True)) == 50_000
    with pytest.raises(UsageError, match=f"becomes longer than the {MAX_CHARS} characters"):
        vocabulary.tokenize("e" * 50_000, add_special=False, parse_special=True)


def test_a_text_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(UsageError, match=f"has {MAX_CHARS + 1} characters, .* takes {MAX_CHARS} at once"):
        _vocabulary().tokenize("a" * (MAX_CHARS + 1), add_special=False, parse_special=True)
