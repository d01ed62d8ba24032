"""Special tokens, end tokens, templates, and tokens that the model has no embedding for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_level_tokenizer, llama_config, write_checkpoint, write_json

from edgeinfer.api.convert import plan_conversion
from edgeinfer.api.vocabulary import open_vocabulary
from edgeinfer.convert.pipeline import Planned
from edgeinfer.convert.token_check import ORIGINAL_KEY
from edgeinfer.convert.writer import encode_header
from edgeinfer.errors import UnusableInputError
from edgeinfer.options import ConvertOptions

ENDS = ("<|eot_id|>", "<|eom_id|>", "<|user|>", "<|observation|>", "<|stop|>")


def _tokenizer(*added: str, **flags: Any) -> str:
    document = json.loads(byte_level_tokenizer())
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}
    document["added_tokens"] += [{"id": 320 + i, "content": text, **entry} for i, text in enumerate(added)]
    return json.dumps(document)


def _checkpoint(folder: Path, tokenizer: str, config: dict[str, Any] | None = None, **settings: Any) -> Path:
    config = {"vocab_size": 330, **(config or {})}
    return write_checkpoint(folder / "model", llama_config(**config), tokenizer=tokenizer, settings=settings)


def _plan(checkpoint: Path) -> Planned:
    return plan_conversion(checkpoint, options=ConvertOptions(type="Q8_0"))


@pytest.mark.parametrize(
    ("eos", "listed", "keys"),
    [
        ("<|endoftext|>", [320, 321], {"eos": 0, "eot": 320, "eom": 321}),
        ("<|eot_id|>", [0, 320, 321], {"eos": 320, "eom": 321}),
        ("<|endoftext|>", [0, 322, 323], {"eos": 0, "eot": 322, "eom": 323}),
        ("<|endoftext|>", [324], {"eos": 0, "eot": 324}),
        (None, [324, 322], {"eos": 324, "eot": 322}),
    ],
)
def test_several_end_tokens_are_kept(tmp_path: Path, eos: str | None, listed: list[int], keys: dict[str, int]) -> None:
    checkpoint = _checkpoint(tmp_path, _tokenizer(*ENDS), {"eos_token_id": listed}, eos_token=eos)
    planned = _plan(checkpoint)
    written = {kind: planned.plan.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    assert {kind: token for kind, token in written.items() if token is not None} == keys
    file = tmp_path / "vocabulary.gguf"
    file.write_bytes(encode_header(planned.plan.metadata, ()))
    with open_vocabulary(file) as vocabulary:
        assert all(token in vocabulary.end_tokens for token in listed)
    assert planned.notes == ()


def test_end_tokens_of_the_generation_config_count_too(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, _tokenizer(*ENDS), {"eos_token_id": 0})
    write_json(checkpoint / "generation_config.json", {"eos_token_id": [0, 324]})
    assert _plan(checkpoint).plan.metadata["tokenizer.ggml.eot_token_id"] == 324


def test_more_end_tokens_than_the_format_has_places_for_are_told(tmp_path: Path) -> None:
    added = ("<|a|>", "<|b|>", "<|c|>", "<|d|>")
    (note,) = _plan(_checkpoint(tmp_path, _tokenizer(*added), {"eos_token_id": [320, 321, 322, 323]})).notes
    assert "token 323 ends a text too" in note


def test_added_tokens_without_an_embedding_are_left_out_and_told(tmp_path: Path) -> None:
    planned = _plan(_checkpoint(tmp_path, _tokenizer("<|kept|>", "<|image|>"), {"vocab_size": 321}))
    assert planned.plan.metadata["tokenizer.ggml.tokens"][320] == "<|kept|>"
    assert any("<|image|>" in note and "no embedding" in note for note in planned.notes)
    assert ORIGINAL_KEY not in planned.plan.metadata


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="beyond the model's 300 embeddings"):
        _plan(_checkpoint(tmp_path, _tokenizer(), {"vocab_size": 300}))


def test_holes_are_filled_and_added_tokens_typed(tmp_path: Path) -> None:
    document = json.loads(_tokenizer("<|new|>", "<tool>"))
    document["added_tokens"][-1]["special"] = False
    metadata = _plan(_checkpoint(tmp_path, json.dumps(document))).plan.metadata
    assert metadata["tokenizer.ggml.tokens"][320:324] == ["<|new|>", "<tool>", "[PAD322]", "[PAD323]"]
    assert metadata["tokenizer.ggml.token_type"][319:324].tolist() == [1, 3, 4, 5, 5]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_what_the_library_has_no_counterpart_for_makes_the_file_carry_the_original(tmp_path: Path, flag: str) -> None:
    planned = _plan(_checkpoint(tmp_path, _tokenizer("<|new|>", **{flag: True})))
    assert json.loads(planned.plan.metadata[ORIGINAL_KEY])["added_tokens"][-1][flag] is True
    assert any(flag in note for note in planned.notes)


def test_the_carried_tokenizer_calls_special_what_the_file_does(tmp_path: Path) -> None:
    document = json.loads(_tokenizer("<|looks special|>", "<tool>", special=False))
    document["normalizer"] = {"type": "NFC"}
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    planned = _plan(_checkpoint(tmp_path, json.dumps(document)))
    carried = json.loads(planned.plan.metadata[ORIGINAL_KEY])
    assert [entry["special"] for entry in carried["added_tokens"]] == [True, True, True, True, False]
    assert carried["truncation"] is None
    assert carried["model"] == document["model"]


def test_templates_stand_in_the_order_of_their_names(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, _tokenizer(), chat_template="of the settings")
    (checkpoint / "chat_template.jinja").write_text("of the file", "utf-8")
    folder = checkpoint / "additional_chat_templates"
    folder.mkdir()
    for name in ("tool_use", "rag", "bad name"):
        (folder / f"{name}.jinja").write_text(name, "utf-8")
    metadata = _plan(checkpoint).plan.metadata
    assert metadata["tokenizer.chat_template"] == "of the file"
    assert metadata["tokenizer.chat_templates"] == ["rag", "tool_use"]
    assert [key for key in metadata if key.startswith("tokenizer.chat_template.")] == [
        "tokenizer.chat_template.rag",
        "tokenizer.chat_template.tool_use",
    ]
