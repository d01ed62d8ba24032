"""Gemma 4: what of its config llama.cpp computes in one way only, what checkpoints may have or lack, its tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from checkpoints import change_json, sentencepiece_tokenizer
from gguf_parts import T, array, take_apart, u32
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.api.load import load
from edgeinfer.api.vocabulary import tokenize
from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.convert.token_check import check_texts
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions

_ROPE = read_model("gemma4").config["rope_parameters"]
_WINDOW, _FULL = "sliding_attention", "full_attention"


def _make(folder: Path, name: str = "gemma4", **changes: Any) -> Path:
    model = read_model(name)
    return make_checkpoint(replace(model, config=model.config | changes), PLAIN, folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("gemma4"), "gemma4-moe")


def _plan(checkpoint: Path) -> ConvertPlan:
    return plan_conversion(checkpoint).plan


def _with(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """The same weights with another config."""
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    change_json(folder / "config.json", changes)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_activation": "silu"},
        {"attention_bias": True},
        {"use_bidirectional_attention": "all"},
        {"layer_types": [_WINDOW] * 8},
        {"layer_types": [_FULL] * 8},
        {"layer_types": [_FULL] * 7},
        {"layer_types": 5},
        {"num_kv_shared_layers": 3},
        {"num_kv_shared_layers": 8},
        {"num_kv_shared_layers": 9},
        {"num_kv_shared_layers": -1},
        {"num_kv_shared_layers": None, "num_hidden_layers": 0},
        {"global_head_dim": 63},
        {"global_head_dim": "x"},
        {"head_dim": 0},
        {"intermediate_size": 2**31 - 1},
        {"num_key_value_heads": 3},
        {"num_global_key_value_heads": 3, "attention_k_eq_v": True},
        {"hidden_size_per_layer_input": -1},
        {"vocab_size_per_layer_input": 321},
        {"final_logit_softcapping": -1.0},
        {"rope_parameters": {**_ROPE, _FULL: {"rope_type": "default", "rope_theta": 1e6}}},
        {"rope_parameters": {**_ROPE, _FULL: {**_ROPE[_FULL], "factor": 2.0}}},
        {"rope_parameters": {**_ROPE, _FULL: {**_ROPE[_FULL], "partial_rotary_factor": 1.5}}},
        {"rope_parameters": {**_ROPE, _FULL: {**_ROPE[_FULL], "partial_rotary_factor": "x"}}},
        {"rope_parameters": {**_ROPE, _WINDOW: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
        {"rope_parameters": []},
        {"rope_parameters": {_FULL: []}},
        {"per_layer_config": {"3": {"head_dim": 64}}},
        {"per_layer_config": {"3": {"head_dim": 64}, "7": {"head_dim": 32}}},
        {"per_layer_config": {"3": {"head_dim": 64}, "6": {"head_dim": 64}}},
        {"per_layer_config": {"3": 64, "7": 64}},
        {"per_layer_config": [64]},
        {"enable_moe_block": True},
        {"enable_moe_block": "x"},
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_differently_is_refused(
    changes: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnusableInputError, match=r"config\.json"):
        _plan(_with(checkpoint, tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [{"num_experts": 0}, {"num_experts": 2000}, {"top_k_experts": 5}, {"moe_intermediate_size": None}],
    ids=str,
)
def test_impossible_experts_are_refused(changes: dict[str, Any], with_experts: Path, tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match=r"config\.json"):
        _plan(_with(with_experts, tmp_path, **changes))


def _assert_same(plan: ConvertPlan, expected: ConvertPlan) -> None:
    assert [(t.name, t.shape, t.type) for t in plan.tensors] == [(t.name, t.shape, t.type) for t in expected.tensors]
    for key, value in expected.metadata.items():
        if key.startswith("gemma4."):
            np.testing.assert_equal(plan.metadata[key], value, err_msg=key)


def test_a_config_that_lists_layers(with_experts: Path, tmp_path: Path) -> None:
    of_full = {"head_dim": 64, "num_key_value_heads": 1}
    listed = {
        "global_head_dim": None,
        "num_global_key_value_heads": None,
        "per_layer_config": {"2": of_full, "5": of_full},
    }
    _assert_same(_plan(_with(with_experts, tmp_path, **listed)), _plan(with_experts))


def test_key_value_heads_of_full_layers_count_only_where_keys_are_values(checkpoint: Path, tmp_path: Path) -> None:
    _assert_same(_plan(_with(checkpoint, tmp_path, num_global_key_value_heads=1)), _plan(checkpoint))


def test_keys_of_a_layer_that_shares_anothers_may_be_there(tmp_path: Path) -> None:
    shapes = {"k_proj.weight": [128, 256], "v_proj.weight": [128, 256], "k_norm.weight": [64]}
    extra = {f"model.layers.7.self_attn.{name}": shape for name, shape in shapes.items()}
    plan = _plan(make_checkpoint(replace(read_model("gemma4"), extra_tensors=extra), PLAIN, tmp_path))
    names = {t.name for t in plan.tensors}
    assert {"blk.7.attn_k.weight", "blk.7.attn_v.weight", "blk.7.attn_k_norm.weight"} <= names
    assert "blk.6.attn_k.weight" not in names


def test_no_soft_cap_is_said(with_experts: Path) -> None:
    assert _plan(with_experts).metadata["gemma4.final_logit_softcapping"] == 0.0


def test_the_text_model_of_a_multimodal_one(checkpoint: Path, tmp_path: Path) -> None:
    model = read_model("gemma4")
    wrapped = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": model.config,
        "vision_config": {"hidden_size": 32},
    }
    extra = {"model.vision_tower.a": [2, 2], "model.audio_tower.b": [2], "model.embed_vision.c": [2, 2]}
    whole = replace(model, config=wrapped, prefixes={"model.": "model.language_model."}, extra_tensors=extra)
    plan = _plan(make_checkpoint(whole, PLAIN, tmp_path))
    _assert_same(plan, _plan(checkpoint))
    assert len(plan.dropped) == 3


def test_a_file_with_a_shared_cache_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.gguf"
    convert(checkpoint, output, ConvertOptions(type="Q8_0", verify=False))
    sound = take_apart(output)
    for changes in (
        {"attention.sliding_window_pattern": array(T.BOOL, [1, 1, 1, 1, 1, 1, 1, 0])},
        {"attention.sliding_window_pattern": array(T.BOOL, [1, 1, 1, 0])},
        {"attention.shared_kv_layers": u32(7)},
        {"attention.shared_kv_layers": u32(2**31)},
    ):
        output.write_bytes(sound.changed({f"gemma4.{key}": value for key, value in changes.items()}).encoded())
        with pytest.raises(UnusableInputError, match="share the cache"):
            load(output)


def test_its_tokenizer_merges_by_rank_and_shows_what_stands_around_thoughts(tmp_path: Path) -> None:
    document = json.loads(sentencepiece_tokenizer())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = ("<|channel>", "<turn|>")
    document["added_tokens"] += [{"id": 500 + i, "content": text, **flags} for i, text in enumerate(added)]
    checkpoint = _make(tmp_path, vocab_size=512, vocab_size_per_layer_input=512)
    (checkpoint / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    original = tokenizers.Tokenizer.from_str(json.dumps(document))
    output = tmp_path / "model.gguf"
    convert(checkpoint, output, ConvertOptions(type="Q8_0"))
    metadata = read_header(output).metadata
    assert metadata.text("tokenizer.ggml.model") == "gemma4"
    assert metadata["tokenizer.ggml.token_type"][500:502].tolist() == [4, 3]
    for text in (*check_texts(original), "\n" * 40 + " a   b", "a <|channel>b<turn|>"):
        expected = original.encode(text, add_special_tokens=False).ids
        assert [token.id for token in tokenize(output, text, add_special=False)] == expected
