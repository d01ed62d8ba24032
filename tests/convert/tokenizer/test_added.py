"""Added tokens that stand beside a tokenizer.model, and a tokenizer.json whose class in transformers overrules it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_level_tokenizer, llama_config, sentencepiece_tokenizer, write_checkpoint
from tokenizer_files import sentencepiece_model

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.api.vocabulary import tokenize
from edgeinfer.errors import UnusableInputError
from edgeinfer.options import ConvertOptions

VOCAB: dict[str, int] = json.loads(sentencepiece_tokenizer())["model"]["vocab"]
LAST_PIECE = len(VOCAB) - 1


def _checkpoint(folder: Path, settings: dict[str, Any], by_text: dict[str, Any] | None = None) -> Path:
    checkpoint = write_checkpoint(
        folder / "model", llama_config(vocab_size=512), tokenizer=sentencepiece_tokenizer(), settings=settings
    )
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.model").write_bytes(sentencepiece_model())
    if by_text is not None:
        (checkpoint / "added_tokens.json").write_text(json.dumps(by_text), "utf-8")
    return checkpoint


def test_added_tokens_take_the_place_of_pieces_and_follow_them(tmp_path: Path) -> None:
    decoder = {
        str(LAST_PIECE): {"content": "<|im_start|>", "special": True},
        str(LAST_PIECE + 1): {"content": "<|im_end|>", "special": True},
        str(LAST_PIECE + 2): {"content": "<tool>", "special": False},
    }
    checkpoint = _checkpoint(tmp_path, {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"})
    output = tmp_path / "out.gguf"
    convert(checkpoint, output, ConvertOptions(type="Q8_0"))  # which compares the tokens of many texts
    tokens = [token.id for token in tokenize(output, "<|im_start|>the<tool><|im_end|>", add_special=False)]
    assert tokens[0] == LAST_PIECE
    assert tokens[-2:] == [LAST_PIECE + 2, LAST_PIECE + 1]
    metadata = plan_conversion(checkpoint).plan.metadata
    assert metadata["tokenizer.ggml.eos_token_id"] == LAST_PIECE + 1
    assert metadata["tokenizer.ggml.token_type"][LAST_PIECE : LAST_PIECE + 4].tolist() == [3, 3, 4, 5]


def test_the_list_by_numbers_goes_before_the_one_by_texts(tmp_path: Path) -> None:
    by_number = {str(LAST_PIECE + 1): {"content": "<new>"}}
    checkpoint = _checkpoint(
        tmp_path, {"added_tokens_decoder": by_number}, {"<old>": LAST_PIECE + 1, "<|x|>": LAST_PIECE + 2}
    )
    texts = plan_conversion(checkpoint).plan.metadata["tokenizer.ggml.tokens"]
    assert texts[LAST_PIECE + 1 : LAST_PIECE + 3] == ["<new>", "<|x|>"]


@pytest.mark.parametrize(
    ("settings", "by_text"),
    [
        ({"added_tokens_decoder": {str(LAST_PIECE + 2): {"content": "<x>"}}}, None),
        ({"added_tokens_decoder": {"-1": {"content": "<x>"}}}, None),
        ({"added_tokens_decoder": {"9" * 30: {"content": "<x>"}}}, None),
        ({"added_tokens_decoder": {"4": {"content": ""}}}, None),
        ({"added_tokens_decoder": {"4": {}}}, None),
        ({"added_tokens_decoder": {"4": "<x>"}}, None),
        ({"added_tokens_decoder": [1]}, None),
        ({"added_tokens_decoder": {str(LAST_PIECE): {"content": "<0x41>"}}}, None),
        ({}, {"<x>": "a"}),
        ({}, {"<x>": None}),
        ({}, {"": 4}),
    ],
    ids=str,
)
def test_a_senseless_list_is_refused(settings: dict[str, Any], by_text: dict[str, Any] | None, tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError):
        plan_conversion(_checkpoint(tmp_path, settings, by_text))


def test_a_piece_that_is_a_zero_byte_becomes_a_hole(tmp_path: Path) -> None:
    document = json.loads(sentencepiece_tokenizer())
    document["model"]["vocab"]["\0"] = len(VOCAB)
    checkpoint = write_checkpoint(
        tmp_path / "model", llama_config(vocab_size=512), tokenizer=json.dumps(document), settings={}
    )
    convert(checkpoint, tmp_path / "out.gguf", ConvertOptions(type="Q8_0"))
    metadata = plan_conversion(checkpoint).plan.metadata
    assert metadata["tokenizer.ggml.tokens"][len(VOCAB)] == f"[PAD{len(VOCAB)}]"
    assert metadata["tokenizer.ggml.token_type"][len(VOCAB)] == 5


@pytest.mark.parametrize("tokenizer_class", ["CohereTokenizer", "CohereTokenizerFast", "PreTrainedTokenizerFast"])
def test_cohere_ends_no_prompt_whatever_the_post_processor_says(tokenizer_class: str, tmp_path: Path) -> None:
    document = json.loads(byte_level_tokenizer())
    begin, turn, end = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
    vocab = document["model"]["vocab"]
    ids = {text: {"id": text, "ids": [vocab[text]], "tokens": [text]} for text in (begin, turn, end)}
    pieces = [{"SpecialToken": {"id": text, "type_id": 0}} for text in (begin, turn, end)]
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [pieces[0], sequence, *pieces[1:]],
        "pair": [pieces[0], sequence, {"Sequence": {"id": "B", "type_id": 1}}, *pieces[1:]],
        "special_tokens": ids,
    }
    settings = {"tokenizer_class": tokenizer_class, "bos_token": begin, "eos_token": turn, "add_bos_token": True}
    checkpoint = write_checkpoint(tmp_path / "model", tokenizer=json.dumps(document), settings=settings)
    metadata = plan_conversion(checkpoint).plan.metadata
    is_cohere = tokenizer_class.startswith("Cohere")
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.add_eos_token"] is not is_cohere
    assert metadata["tokenizer.ggml.eos_token_id"] == vocab[turn if is_cohere else end]
