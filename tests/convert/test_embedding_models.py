"""Decoders that make vectors or scores: EmbeddingGemma, Qwen3's embedding models and rerankers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json, write_json
from gguf_parts import take_apart, u32
from random_checkpoint import PLAIN, make_checkpoint, prompt, read_model
from tiny_models import plan_of

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.api.embed import load_encoder
from edgeinfer.api.load import load
from edgeinfer.errors import NotFoundError, UnusableInputError
from edgeinfer.native import encoder as native_encoder
from edgeinfer.options import ConvertOptions


def _make(name: str, folder: Path, *without: str, **changes: Any) -> Path:
    model = read_model(name)
    beside = {path: content for path, content in model.beside.items() if path not in without}
    return make_checkpoint(replace(model, config=model.config | changes, beside=beside), PLAIN, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": True}, "bias or an activation"),
        ({"bias": None}, "bias or an activation"),
        ({"activation_function": "torch.nn.modules.activation.Tanh"}, "bias or an activation"),
        ({"activation_function": None}, "bias or an activation"),
        ({"in_features": 255}, "Dense layers of"),
        ({"out_features": 511}, "Dense layers of"),
        ({"out_features": -1}, "out_features"),
        ({"out_features": 2**31 - 1}, "Dense layers of"),
        ({"in_features": "x"}, "in_features"),
    ],
    ids=str,
)
def test_matrices_after_the_pooling_that_llama_cpp_would_not_compute(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = _make("gemma-embedding", tmp_path)
    change_json(checkpoint / "2_Dense" / "config.json", change)
    with pytest.raises(UnusableInputError, match=message):
        plan_of(checkpoint)


def test_one_matrix_after_the_pooling_alone_is_refused(tmp_path: Path) -> None:
    checkpoint = _make("gemma-embedding", tmp_path)
    modules = read_model("gemma-embedding").beside["modules.json"]
    write_json(checkpoint / "modules.json", modules[:3])
    with pytest.raises(UnusableInputError, match="Dense layers of"):
        plan_of(checkpoint)


def test_a_matrix_after_the_pooling_that_is_missing(tmp_path: Path) -> None:
    checkpoint = _make("gemma-embedding", tmp_path)
    (checkpoint / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises((UnusableInputError, NotFoundError), match="3_Dense"):
        plan_of(checkpoint)


def test_an_embedding_gemma_without_modules_ends_with_the_mean(tmp_path: Path) -> None:
    checkpoint = _make("gemma-embedding", tmp_path)
    (checkpoint / "modules.json").unlink()
    plan = plan_of(checkpoint)
    assert plan.is_encoder
    assert not any("dense" in t.name for t in plan.tensors)


def test_the_matrices_after_the_pooling_may_not_be_overwritten(tmp_path: Path) -> None:
    checkpoint = _make("gemma-embedding", tmp_path)
    assert checkpoint / "2_Dense" / "model.safetensors" in plan_conversion(checkpoint).inputs


def test_an_embedding_gemma_of_windows_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="all layers have a window"):
        plan_of(_make("gemma-embedding", tmp_path, num_hidden_layers=5))


def test_a_causal_gemma_is_no_encoder(tmp_path: Path) -> None:
    checkpoint = _make("gemma-embedding", tmp_path)
    change_json(checkpoint / "config.json", {"use_bidirectional_attention": False})
    with pytest.raises(UnusableInputError, match="use_bidirectional_attention"):
        plan_of(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"dense_2_feat_in": 255},
        {"dense_2_feat_out": 511},
        {"dense_3_feat_out": 2**31},
        {"dense_2_feat_in": None},
        {"embedding_length_out": 4096},
    ],
    ids=str,
)
def test_a_file_whose_vectors_the_library_would_read_past_their_end(
    changes: dict[str, int | None], tmp_path: Path
) -> None:
    output = tmp_path / "model.gguf"
    convert(_make("gemma-embedding", tmp_path), output, ConvertOptions(type="F16", verify=False))
    fields = {f"gemma-embedding.{key}": None if n is None else u32(n) for key, n in changes.items()}
    output.write_bytes(take_apart(output).changed(fields).encoded())
    with pytest.raises(UnusableInputError, match=r"vectors of another length|impossible matrix"):
        load_encoder(output)


@pytest.mark.parametrize("name", ["gemma-embedding", "qwen3-embedding"])
def test_an_embedding_model_makes_vectors_and_no_text(name: str, tmp_path: Path) -> None:
    output = tmp_path / "model.gguf"
    assert convert(_make(name, tmp_path), output, ConvertOptions(type="F16")).verified
    with pytest.raises(UnusableInputError, match="an encoder, which writes no text"):
        load(output)
    with load_encoder(output) as encoder:
        first, again, other = encoder.embed(["Hello, world.", "Hello, world.", "Something else"])
    assert (first == again).all()
    assert np.isclose(np.linalg.norm(first), 1)
    assert not np.allclose(first, other, atol=1e-3)


def test_a_long_text_goes_through_a_decoder_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "model.gguf"
    convert(_make("qwen3-embedding", tmp_path), output, ConvertOptions(type="F32"))
    tokens = prompt(read_model("qwen3-embedding"))
    with load_encoder(output) as encoder:
        whole = encoder.embed_tokens(tokens)
    monkeypatch.setattr(native_encoder, "_PIECE_TOKENS", 13)
    with load_encoder(output) as encoder:
        np.testing.assert_allclose(encoder.embed_tokens(tokens), whole, atol=1e-3)


def test_an_embedding_model_that_is_not_tied_needs_no_head(tmp_path: Path) -> None:
    checkpoint = _make("qwen3-embedding", tmp_path)
    change_json(checkpoint / "config.json", {"tie_word_embeddings": False})
    assert not any(t.name == "output.weight" for t in plan_of(checkpoint).tensors)


def test_a_reranker_makes_scores_only(tmp_path: Path) -> None:
    output = tmp_path / "model.gguf"
    assert convert(_make("qwen3-reranker", tmp_path), output, ConvertOptions(type="F16")).verified
    with pytest.raises(UnusableInputError, match="a reranker"):
        load_encoder(output)
    with pytest.raises(UnusableInputError, match="writes no text"):
        load(output)


def _named(checkpoint: Path) -> Path:
    return checkpoint.rename(checkpoint.with_name("Qwen3-Reranker-0.6B"))


def _described(checkpoint: Path) -> Path:
    (checkpoint / "README.md").write_text("---\ntags: []\n---\n# Qwen3-Reranker-0.6B\n", "utf-8")
    return checkpoint


def _configured(checkpoint: Path) -> Path:
    change_json(checkpoint / "config.json", {"_name_or_path": "Qwen/Qwen3-Reranker-4B"})
    return checkpoint


@pytest.mark.parametrize("told", [_named, _described, _configured])
def test_an_older_reranker_is_known_by_its_name(told: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = told(_make("qwen3", tmp_path))
    with pytest.raises(UnusableInputError, match=r"answers are the tokens \[None, None\]"):
        plan_of(checkpoint)
    _write_answers(checkpoint / "tokenizer.json")
    plan = plan_of(checkpoint)
    assert plan.metadata["qwen3.pooling_type"] == 4
    (answers,) = (t for t in plan.tensors if t.name == "cls.output.weight")
    assert [part.first_row for part in answers.parts] == [319, 318]


def _write_answers(path: Path) -> None:
    """In place of the last two words of the vocabulary, which nothing else is made of."""
    document = json.loads(path.read_text("utf-8"))
    vocabulary = {token: word for word, token in document["model"]["vocab"].items()} | {318: "no", 319: "yes"}
    document["model"]["vocab"] = {word: token for token, word in vocabulary.items()}
    document["model"]["merges"] = document["model"]["merges"][:-2]
    write_json(path, document)


@pytest.mark.parametrize("stated", [{"true_token_id": 5, "false_token_id": None}, {"true_token_id": 5}, {}])
def test_a_reranker_with_one_answer_is_refused(stated: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = _make("qwen3-reranker", tmp_path)
    write_json(checkpoint / "1_LogitScore" / "config.json", stated)
    with pytest.raises(UnusableInputError, match="token_id"):
        plan_of(checkpoint)


@pytest.mark.parametrize("token", [-1, 320, "yes", 2**40])
def test_an_answer_outside_the_vocabulary_is_refused(token: object, tmp_path: Path) -> None:
    checkpoint = _make("qwen3-reranker", tmp_path)
    write_json(checkpoint / "1_LogitScore" / "config.json", {"true_token_id": token, "false_token_id": 5})
    with pytest.raises(UnusableInputError, match="token"):
        plan_of(checkpoint)


def test_what_a_reranker_was_trained_to_read_goes_with_it(tmp_path: Path) -> None:
    metadata = plan_of(_make("qwen3-reranker", tmp_path)).metadata
    assert metadata["tokenizer.chat_templates"] == ["rerank"]
    assert "<Query>: {query}\n<Document>: {document}" in metadata["tokenizer.chat_template.rerank"]
    assert "answer_token_ids" not in str(plan_of(_make("qwen3", tmp_path)).metadata)
