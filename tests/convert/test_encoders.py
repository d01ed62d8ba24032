"""BERT and its relatives: their files beside the weights, the names of their tensors, and what runs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json, write_json
from gguf_parts import T, array, take_apart, u32
from random_checkpoint import PLAIN, make_checkpoint, prompt, read_model
from tiny_models import plan_of

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.api.embed import load_encoder
from edgeinfer.api.load import load
from edgeinfer.errors import ContextOverflowError, NotFoundError, UnusableInputError, UsageError
from edgeinfer.options import ConvertOptions, RuntimeOptions


def _make(name: str, folder: Path, **changes: Any) -> Path:
    model = read_model(name)
    return make_checkpoint(replace(model, config=model.config | changes), PLAIN, folder)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return _make("bert", tmp_path)


def _write_modules(checkpoint: Path, pooling: dict[str, Any], folder: str = "1_Pooling", *others: str) -> None:
    kinds = ["Transformer", "Pooling", *others]
    modules = [{"idx": i, "path": folder, "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    write_json(checkpoint / "modules.json", modules)
    (checkpoint / "1_Pooling").mkdir()
    write_json(checkpoint / "1_Pooling" / "config.json", pooling)


@pytest.mark.parametrize(
    ("stated", "number"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, 1),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, 2),
        ({"pooling_mode_lasttoken": True}, 3),
        ({"pooling_mode": "cls"}, 2),
    ],
    ids=str,
)
def test_pooling_is_what_sentence_transformers_states(bert: Path, stated: dict[str, Any], number: int) -> None:
    assert "bert.pooling_type" not in plan_of(bert).metadata
    _write_modules(bert, stated, "1_Pooling", "Normalize")
    assert plan_of(bert).metadata["bert.pooling_type"] == number


@pytest.mark.parametrize(
    "stated",
    [{}, {"pooling_mode_max_tokens": True}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}],
    ids=str,
)
def test_another_pooling_is_refused(bert: Path, stated: dict[str, Any]) -> None:
    _write_modules(bert, stated)
    with pytest.raises(UnusableInputError, match="unknown pooling"):
        plan_of(bert)


def test_a_module_that_llama_cpp_does_not_have_is_refused(bert: Path) -> None:
    _write_modules(bert, {"pooling_mode": "mean"}, "1_Pooling", "Dense")
    with pytest.raises(UnusableInputError, match=r"unknown module .*Dense"):
        plan_of(bert)


def test_the_poolings_file_is_looked_for_beside_the_config_only(bert: Path) -> None:
    _write_modules(bert, {"pooling_mode": "mean"}, "../../1_Pooling")
    assert plan_of(bert).metadata["bert.pooling_type"] == 1


@pytest.mark.parametrize("folder", ["", ".", "..", "/", "../..", "a\0b"])
def test_a_pooling_without_a_directory_of_its_own_is_refused(bert: Path, folder: str) -> None:
    write_json(bert / "modules.json", [{"type": "x.Pooling", "path": folder}])
    write_json(bert.parent / "config.json", {"pooling_mode": "cls"})
    with pytest.raises(UnusableInputError, match=r"modules\.json"):
        plan_of(bert)


@pytest.mark.parametrize("document", ["{}", "[1]", '[{"type": 1}]', "[", '[{"type": "x.Pooling"}]'])
def test_a_list_of_modules_that_is_none(bert: Path, document: str) -> None:
    (bert / "modules.json").write_text(document, "utf-8")
    if document == "{}":
        assert "bert.pooling_type" not in plan_of(bert).metadata
        return
    with pytest.raises(UnusableInputError, match=r"modules\.json"):
        plan_of(bert)


def _rename(checkpoint: Path, *pairs: tuple[bytes, bytes]) -> None:
    """Replace texts in the header of the weights by ones of any length."""
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    for old, new in pairs:
        header = header.replace(old, new)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def test_old_names_and_the_prefix_of_a_model_with_a_head(bert: Path) -> None:
    expected = [(t.name, t.shape, t.type) for t in plan_of(bert).tensors]
    _rename(
        bert,
        (b'"embeddings.', b'"bert.embeddings.'),
        (b'"encoder.', b'"bert.encoder.'),
        (b"LayerNorm.weight", b"LayerNorm.gamma"),
        (b"LayerNorm.bias", b"LayerNorm.beta"),
    )
    change_json(bert / "config.json", {"architectures": ["BertForMaskedLM"]})
    assert [(t.name, t.shape, t.type) for t in plan_of(bert).tensors] == expected


def test_heads_are_left_out_and_told(tmp_path: Path) -> None:
    extra = {"pooler.dense.weight": [256, 256], "cls.predictions.bias": [320], "embeddings.position_ids": [1, 64]}
    plan = plan_of(make_checkpoint(replace(read_model("bert"), extra_tensors=extra), PLAIN, tmp_path))
    assert plan.dropped == ("2 tensors like pooler.dense.weight (a head that embeddings do without)",)


def test_xlm_roberta_positions_begin_after_the_padding_token(tmp_path: Path) -> None:
    plan = plan_of(_make("xlm-roberta", tmp_path))
    (positions,) = (t for t in plan.tensors if t.name == "position_embd.weight")
    assert positions.shape == (256, 64)
    assert positions.parts[0].first_row == 2
    assert plan.metadata["bert.context_length"] == 64


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bert", {"hidden_act": "relu"}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"is_decoder": True}),
        ("bert", {"num_attention_heads": 3}),
        ("xlm-roberta", {"pad_token_id": 66}),
        ("xlm-roberta", {"pad_token_id": -1}),
        ("nomic-bert", {"activation_function": "gelu"}),
        ("nomic-bert", {"moe_every_n_layers": 2}),
        ("nomic-bert", {"qkv_proj_bias": True}),
        ("nomic-bert", {"rotary_emb_fraction": 0.5}),
        ("nomic-bert", {"n_head": 3}),
        ("modern-bert", {"hidden_activation": "relu"}),
        ("modern-bert", {"attention_bias": True}),
        ("modern-bert", {"norm_bias": True}),
        ("modern-bert", {"num_attention_heads": 3}),
        ("modern-bert", {"local_attention": -1}),
        ("modern-bert", {"global_attn_every_n_layers": 0}),
        ("modern-bert", {"rope_scaling": {"rope_type": "linear", "factor": 2}}),
        ("modern-bert", {"layer_types": ["full_attention"] * 4}),
        ("modern-bert", {"local_rope_theta": "x"}),
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_differently_is_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = _make(name, tmp_path)
    change_json(checkpoint / "config.json", change)
    with pytest.raises(UnusableInputError, match=r"config\.json"):
        plan_of(checkpoint)


def test_modern_bert_with_a_head_and_in_todays_words(tmp_path: Path) -> None:
    checkpoint = _make("modern-bert", tmp_path)
    expected = plan_of(checkpoint)
    names = [(f'"{name}.'.encode(), f'"model.{name}.'.encode()) for name in ("embeddings", "layers", "final_norm")]
    _rename(checkpoint, *names)
    ropes = {"full_attention": {"rope_theta": 160000.0}, "sliding_attention": {"rope_theta": 1000.0}}
    changes = {
        "architectures": ["ModernBertForMaskedLM"],
        "global_rope_theta": None,
        "local_rope_theta": 5.0,
        "rope_parameters": ropes,
        "global_attn_every_n_layers": None,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    }
    change_json(checkpoint / "config.json", changes)
    plan = plan_of(checkpoint)
    assert [(t.name, t.shape, t.type) for t in plan.tensors] == [(t.name, t.shape, t.type) for t in expected.tensors]
    for key in (key for key in expected.metadata if key.startswith("modern-bert.")):
        assert plan.metadata[key] == expected.metadata[key]


def test_modern_bert_without_a_rope_for_windows_has_the_other_there_too(tmp_path: Path) -> None:
    checkpoint = _make("modern-bert", tmp_path)
    change_json(checkpoint / "config.json", {"local_rope_theta": None})
    assert plan_of(checkpoint).metadata["modern-bert.rope.freq_base_swa"] == 160000.0


def test_modern_bert_without_windows_runs(tmp_path: Path) -> None:
    checkpoint = _make("modern-bert", tmp_path, num_hidden_layers=2, global_attn_every_n_layers=1)
    assert convert(checkpoint, tmp_path / "model.gguf", ConvertOptions(type="F16")).verified


@pytest.mark.parametrize("pattern", [u32(0), u32(1), array(T.BOOL, [0, 0, 0, 0]), array(T.BOOL, [1, 1, 1, 1])])
def test_a_file_whose_layers_are_all_of_one_kind_would_end_the_process(pattern: bytes, tmp_path: Path) -> None:
    output = tmp_path / "model.gguf"
    convert(_make("modern-bert", tmp_path), output, ConvertOptions(type="F16", verify=False))
    broken = take_apart(output).changed({"modern-bert.attention.sliding_window_pattern": pattern})
    output.write_bytes(broken.encoded())
    with pytest.raises(UnusableInputError, match="in all of its layers or in none"):
        load_encoder(output)


def test_an_encoder_is_loaded_as_one_and_refused_as_anything_else(bert: Path, tmp_path: Path) -> None:
    output = tmp_path / "bert.gguf"
    assert convert(bert, output, ConvertOptions(type="F16")).verified
    with pytest.raises(UnusableInputError, match="encoder"):
        load(output)
    tokens = prompt(read_model("bert"))
    with load_encoder(output) as encoder:
        vector = encoder.embed_tokens(tokens)
        assert vector.shape == (256,)
        assert np.isclose(np.linalg.norm(vector), 1)
        texts = encoder.embed(["Hello, world.", "Hello, world.", "Something else"])
        assert (texts[0] == texts[1]).all()
        assert not np.allclose(texts[0], texts[2], atol=1e-3)
        assert encoder.embed([]).shape == (0, 256)
        with pytest.raises(ContextOverflowError, match="65 tokens does not fit the context of 64"):
            encoder.embed_tokens(np.full(65, 5, np.int32))
        with pytest.raises(ValueError, match="vocabulary"):
            encoder.embed_tokens(np.array([320], np.int32))
    with load_encoder(output, RuntimeOptions(ctx_size=8)) as short, pytest.raises(ContextOverflowError):
        short.embed_tokens(tokens)


def test_a_model_that_writes_text_is_no_encoder(tmp_path: Path) -> None:
    output = tmp_path / "glm4.gguf"
    convert(_make("glm4", tmp_path), output, ConvertOptions(type="F16"))
    with pytest.raises(UnusableInputError, match="generates text"):
        load_encoder(output)


def test_an_encoder_is_not_calibrated(bert: Path, tmp_path: Path) -> None:
    options = ConvertOptions(type="Q4_0", calibrate=tmp_path / "text.txt")
    with pytest.raises(UsageError, match="an encoder"):
        convert(bert, tmp_path / "a.gguf", options)


def test_a_text_to_calibrate_with_that_is_not_there_is_said_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"text\.txt: no such file"):
        plan_conversion(_make("glm4", tmp_path), None, ConvertOptions(calibrate=tmp_path / "text.txt"))
