"""Tokenizers: what goes into the file is what the tokenizers library does, and what can't be the same is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    SPECIAL,
    byte_level_tokenizer,
    change_json,
    llama_config,
    sentencepiece_tokenizer,
    write_checkpoint,
    write_json,
)

from edgeinfer.convert.checkpoint import open_checkpoint
from edgeinfer.convert.tokenizer import load_tokenizer
from edgeinfer.convert.tokenizer.vocabulary import TokenType
from edgeinfer.errors import EdgeinferError, UnusableInputError

Change = Callable[[dict[str, Any]], Any]
KEY = "tokenizer.ggml."


def _load(folder: Path) -> dict[str, Any]:
    return load_tokenizer(open_checkpoint(folder)).metadata


def _changed(tmp_path: Path, change: Change, *, sentencepiece: bool = False, vocab_size: int = 410) -> Path:
    document = json.loads(sentencepiece_tokenizer() if sentencepiece else byte_level_tokenizer())
    change(document)
    config = llama_config(vocab_size=vocab_size)
    return write_checkpoint(tmp_path / "model", config, {}, tokenizer=json.dumps(document), settings={})


def _refused(folder: Path) -> str:
    with pytest.raises(UnusableInputError) as caught:
        _load(folder)
    return caught.value.message


def test_byte_level_bpe(tmp_path: Path) -> None:
    metadata = _load(write_checkpoint(tmp_path / "model"))
    model = json.loads(byte_level_tokenizer())["model"]
    assert metadata[KEY + "model"] == "gpt2"
    assert metadata[KEY + "tokens"] == sorted(model["vocab"], key=model["vocab"].get)
    assert metadata[KEY + "merges"] == [" ".join(pair) for pair in model["merges"]]
    assert set(metadata[KEY + "token_type"][:3]) == {TokenType.CONTROL}
    assert set(metadata[KEY + "token_type"][3:]) == {TokenType.NORMAL}
    assert metadata[KEY + "bos_token_id"] == 0
    assert metadata[KEY + "eos_token_id"] == 2


def test_merges_of_old_files_are_the_same(tmp_path: Path) -> None:
    def join(document: dict[str, Any]) -> None:
        document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]

    new = _load(_changed(tmp_path / "new", lambda d: None))
    old = _load(_changed(tmp_path / "old", join))
    assert old[KEY + "merges"] == new[KEY + "merges"]


def test_ids_beyond_the_tokens_are_padding(tmp_path: Path) -> None:
    metadata = _load(_changed(tmp_path, lambda d: None, vocab_size=323))
    assert metadata[KEY + "tokens"][320:] == ["[PAD320]", "[PAD321]", "[PAD322]"]
    assert metadata[KEY + "token_type"][320:].tolist() == [TokenType.UNUSED] * 3


def test_added_tokens_by_kind(tmp_path: Path) -> None:
    def add(document: dict[str, Any]) -> None:
        plain = {**document["added_tokens"][0], "special": False}
        texts = ["▁▁", "<|looks special|>", "<unused7>", "plain", "<mask>"]
        document["added_tokens"] += [{**plain, "id": 320 + i, "content": text} for i, text in enumerate(texts)]

    metadata = _load(_changed(tmp_path, add))
    assert metadata[KEY + "tokens"][320:325] == ["  ", "<|looks special|>", "<unused7>", "plain", "<mask>"]
    user, control = TokenType.USER_DEFINED, TokenType.CONTROL
    assert metadata[KEY + "token_type"][320:325].tolist() == [user, control, control, user, control]


def test_sentencepiece_scores_are_minus_the_rank_of_the_merge(tmp_path: Path) -> None:
    metadata = _load(_changed(tmp_path, lambda d: None, sentencepiece=True, vocab_size=400))
    model = json.loads(sentencepiece_tokenizer())["model"]
    vocab, scores, types = model["vocab"], metadata[KEY + "scores"], metadata[KEY + "token_type"]
    assert metadata[KEY + "model"] == "llama"
    assert metadata[KEY + "add_space_prefix"] is True
    for rank in (0, 7, len(model["merges"]) - 1):
        assert scores[vocab["".join(model["merges"][rank])]] == -rank
    assert scores[vocab["e"]] == -len(model["merges"])
    assert types[vocab["<unk>"]] == TokenType.UNKNOWN
    assert types[vocab["</s>"]] == TokenType.CONTROL
    assert (types == TokenType.BYTE).sum() == 256


def test_a_piece_that_two_merges_make_has_the_score_of_the_better_one(tmp_path: Path) -> None:
    def add(document: dict[str, Any]) -> None:
        model = document["model"]
        first, second = model["merges"][0]
        model["merges"].append([first, second])

    metadata = _load(_changed(tmp_path, add, sentencepiece=True))
    model = json.loads(sentencepiece_tokenizer())["model"]
    assert metadata[KEY + "scores"][model["vocab"]["".join(model["merges"][0])]] == 0


def _set(*path: Any, value: Any) -> Change:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def _added(**entry: Any) -> Change:
    return lambda d: d["added_tokens"].append({**d["added_tokens"][0], "id": 400, "content": "<new>", **entry})


GROWING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee" * 1000}
BAD = {
    "an id below zero": _added(id=-1),
    "an id that is text": _added(id="400"),
    "a fractional id": _added(id=1.5),
    "an id twice": _added(id=0),
    "the id of another token": _added(id=50),
    "a token twice": _added(content=SPECIAL[0]),
    "a zero byte": _added(content="a\0b"),
    "no content": lambda d: d["added_tokens"].append({"id": 400}),
    "added tokens of text": _set("added_tokens", value="x"),
    "a vocabulary with a negative id": _set("model", "vocab", "zz", value=-1),
    "a vocabulary with an id twice": _set("model", "vocab", "zz", value=50),
    "a vocabulary beyond the embedding": _set("model", "vocab", "zz", value=10**9),
    "a placeholder's name": _set("model", "vocab", "[PAD409]", value=330),
    "no vocabulary": _set("model", "vocab", value={}),
    "a vocabulary that is a list": _set("model", "vocab", value=[]),
    "no merges": _set("model", "merges", value=[]),
    "merges that are null": _set("model", "merges", value=None),
    "half a merge": _set("model", "merges", value=["a"]),
    "merges of three": _set("model", "merges", value=[["a", "b", "c"]]),
    "merges of numbers": _set("model", "merges", value=[[1, 2]]),
    "merges of unknown tokens": _set("model", "merges", value=["qq zz"]),
    "no model": _set("model", value=None),
    "another model": _set("model", value={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
    "no pre-tokenizer": _set("pre_tokenizer", value=None),
    "another pre-tokenizer": _set("pre_tokenizer", value={"type": "Whitespace"}),
    "a broken regex": _set(
        "pre_tokenizer", value={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    ),
    "a normalizer that explodes": _set("normalizer", value={"type": "Sequence", "normalizers": [GROWING] * 4}),
    "byte fallback without bytes": _set("model", "byte_fallback", value=True),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_malformed_tokenizer_is_refused(tmp_path: Path, change: Change) -> None:
    message = _refused(_changed(tmp_path, change))
    assert "tokenizer.json" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    "section",
    [
        None,
        {"type": "NFC"},
        {"type": "Sequence", "normalizers": []},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
    ],
    ids=str,
)
def test_harmless_normalizers_pass(tmp_path: Path, section: Any) -> None:
    assert _load(_changed(tmp_path, _set("normalizer", value=section)))


def test_a_missing_byte_of_a_sentencepiece_vocabulary_is_named(tmp_path: Path) -> None:
    folder = _changed(tmp_path, lambda d: d["model"]["vocab"].pop("<0xC3>"), sentencepiece=True)
    assert "<0xC3>" in _refused(folder)


@pytest.mark.parametrize("section", ["truncation", "padding"])
def test_settings_of_a_training_run_do_not_matter(tmp_path: Path, section: str) -> None:
    value = {
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5},
        "padding": {
            "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": SPECIAL[0],
        },
    }[section]  # fmt: skip
    folder = _changed(tmp_path, _set(section, value=value))
    original = load_tokenizer(open_checkpoint(folder)).original
    assert len(original.encode("Hello, world, hello").ids) > 2


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in _refused(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.json", "chat_template.jinja"]
)
def test_files_that_are_no_files_are_refused_and_never_read(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    assert name in _refused(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/nowhere/at/all")
    with pytest.raises(EdgeinferError, match=name):
        _load(folder)


def test_a_special_token_has_its_id_from_its_text_first(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": SPECIAL[1]}, "eos_token": "not an added token", "pad_token": ["?"]}
    config = llama_config(bos_token_id=7, eos_token_id=8, pad_token_id=9)
    metadata = _load(write_checkpoint(tmp_path / "model", config, {}, settings=settings))
    ids = {key: metadata[f"{KEY}{key}_token_id"] for key in ("bos", "eos", "padding")}
    assert ids == {"bos": 1, "eos": 8, "padding": 9}


@pytest.mark.parametrize("value", [-1, 320, 10**30, True, 1.0, "2", {}, None], ids=str)
def test_an_impossible_special_token_is_left_out(tmp_path: Path, value: Any) -> None:
    config = llama_config(pad_token_id=value)
    assert KEY + "padding_token_id" not in _load(write_checkpoint(tmp_path / "model", config, {}, settings={}))


def test_whether_bos_is_added_is_what_the_post_processor_does(tmp_path: Path) -> None:
    rule = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": SPECIAL[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {SPECIAL[0]: {"id": SPECIAL[0], "ids": [0], "tokens": [SPECIAL[0]]}},
    }
    folder = _changed(tmp_path, _set("post_processor", value=rule))
    change_json(folder / "tokenizer_config.json", {"add_bos_token": False, "add_eos_token": True})
    metadata = _load(folder)
    assert metadata[KEY + "add_bos_token"] is True
    assert metadata[KEY + "add_eos_token"] is True  # the rule says nothing of it


class TestTemplates:
    """The chat template and where it comes from."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = write_checkpoint(tmp_path / "model", settings={"chat_template": "of the settings"})
        write_json(folder / "chat_template.json", {"chat_template": "of the json file"})
        (folder / "chat_template.jinja").write_text("of the file: ü")
        return folder

    def test_the_file_comes_first(self, folder: Path) -> None:
        found = []
        for name in ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"):
            found.append(_load(folder).get("tokenizer.chat_template"))
            (folder / name).unlink()
        assert found == ["of the file: ü", "of the settings", "of the json file"]
        assert "tokenizer.chat_template" not in _load(folder)

    def test_named_ones_in_the_order_of_their_names(self, folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        named = [{"name": n, "template": f"the {n} one"} for n in ("tool_use", "default", "rag")]
        odd = [{"name": "x" * 70_000, "template": "t"}, {"name": "a\nb", "template": "t"}, {"name": 1, "template": "t"}]
        change_json(folder / "tokenizer_config.json", {"chat_template": [*named, *odd, "x", {"name": "no template"}]})
        metadata = {k: v for k, v in _load(folder).items() if "chat_template" in k}
        assert metadata == {
            "tokenizer.chat_template": "the default one",
            "tokenizer.chat_templates": ["rag", "tool_use"],
            "tokenizer.chat_template.rag": "the rag one",
            "tokenizer.chat_template.tool_use": "the tool_use one",
        }

    def test_an_enormous_one_is_refused_wherever_it_stands(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_bytes(b"x" * (2 << 20))
        assert "chat_template.jinja" in _refused(folder)
        (folder / "chat_template.jinja").unlink()
        change_json(folder / "tokenizer_config.json", {"chat_template": "x" * (2 << 20)})
        assert "1 MiB" in _refused(folder)

    def test_bytes_that_are_no_text_are_replaced(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_bytes(b"a\xffb")
        assert _load(folder)["tokenizer.chat_template"] == "a\ufffdb"


@pytest.mark.model
def test_the_real_tokenizer(smollm2_checkpoint: Path) -> None:
    metadata = _load(smollm2_checkpoint)
    assert metadata[KEY + "pre"] == "smollm"
    assert len(metadata[KEY + "tokens"]) == 49152
    assert np.unique(metadata[KEY + "token_type"]).tolist() == [TokenType.NORMAL, TokenType.CONTROL]
