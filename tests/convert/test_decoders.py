"""What the decoders refuse that are no llamas, and how their checkpoints differ among themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import change_json, write_json, write_safetensors
from random_checkpoint import PLAIN, make_checkpoint, read_model
from tiny_models import plan_of

from edgeinfer.convert.checkpoint import read_safetensors_header
from edgeinfer.errors import UnusableInputError


def _make(name: str, folder: Path, **changes: Any) -> Path:
    model = read_model(name)
    return make_checkpoint(replace(model, config=model.config | changes), PLAIN, folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("olmo3", {"layer_types": ["full_attention"]}),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}),
        ("olmo3", {"sliding_window": 0}),
        ("gptneox", {"attention_bias": False}),
        ("gptneox", {"hidden_act": "relu"}),
        ("gptneox", {"tie_word_embeddings": True}),
        ("gptneox", {"partial_rotary_factor": 2.0, "rotary_pct": None}),
        ("stablelm", {"hidden_act": "gelu"}),
        ("stablelm", {"partial_rotary_factor": 0.01}),
        ("falcon", {"alibi": True}),
        ("falcon", {"bias": True}),
        ("falcon", {"parallel_attn": False}),
        ("falcon-groups", {"num_kv_heads": 3}),
        ("falcon-groups", {"num_ln_in_parallel_attn": 3}),
        ("command-r", {"use_qk_norm": True}),
        ("command-r-plus", {"use_qk_norm": False}),
        ("command-r", {"attention_bias": True}),
        ("command-r", {"head_dim": 32}),
        ("command-r", {"tie_word_embeddings": False}),
        ("command-r", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        ),
        ("ministral3", {"model_type": "mistral4"}),
        ("mistral3-multimodal", {"text_config": {"model_type": "mistral4"}}),
        ("llama4", {"attention_chunk_size": 4096}),
        ("llama4", {"floor_scale": 4096}),
        ("llama4", {"attn_scale": 0.2}),
        ("llama4", {"attn_temperature_tuning": False}),
        ("llama4", {"no_rope_layers": [1, 1, 1, 1, 1]}),
        ("llama4", {"no_rope_layers": [], "no_rope_layer_interval": 2}),
        ("llama4", {"layer_types": ["full_attention"] * 5}),
        ("llama4", {"moe_layers": [0]}),
        ("llama4", {"use_qk_norm": False}),
        ("llama4", {"interleave_moe_layer_step": 0}),
        ("llama4", {"num_local_experts": 128, "use_qk_norm": True}),
        ("internlm2", {"bias": True}),
        ("internlm2", {"rope_scaling": {"type": "longrope", "factor": 2.0}}),
        ("internlm3", {"hidden_act": "gelu"}),
        ("exaone", {"activation_function": "gelu"}),
        ("exaone4", {"sliding_window": 16}),
        ("exaone4", {"head_dim": 32}),
        ("exaone4-windows", {"sliding_window": None}),
        ("exaone4-windows", {"sliding_window_pattern": 3}),
        ("cohere2", {"sliding_window_pattern": 2}),
        ("cohere2", {"layer_types": ["full_attention"] * 5}),
        ("cohere2", {"rotary_pct": 0.5}),
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_differently_is_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = _make(name, tmp_path)
    change_json(checkpoint / "config.json", change)
    with pytest.raises(UnusableInputError) as caught:
        plan_of(checkpoint)
    assert "config.json" in caught.value.message
    nested = {"rope_scaling", "rope_parameters", "activation_function", "text_config"}
    assert any(key in caught.value.message for key in change) or nested & set(change)


def test_a_falcon_of_the_first_kind_has_one_key_value_head_whatever_else_it_says(tmp_path: Path) -> None:
    metadata = plan_of(_make("falcon", tmp_path, num_kv_heads=4)).metadata
    assert metadata["falcon.attention.head_count_kv"] == 1


def test_falcon_2_keeps_its_own_rope_and_context(tmp_path: Path) -> None:
    metadata = plan_of(_make("falcon", tmp_path, rope_theta=500042.0, max_position_embeddings=8192)).metadata
    assert metadata["falcon.rope.freq_base"] == 500042.0
    assert metadata["falcon.context_length"] == 8192


@pytest.mark.parametrize(
    "change",
    [
        {"rope_type": "linear"},
        {"mscale": 0.5},
        {"mscale_all_dim": None},
        {"llama_4_scaling_beta": 0},
        {"attention_factor": 1.0},
        {"original_max_position_embeddings": 0},
    ],
    ids=str,
)
def test_ministral_with_another_rope_than_llama_cpps_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    rope = read_model("ministral3").config["rope_parameters"] | change
    checkpoint = _make("ministral3", tmp_path)
    change_json(checkpoint / "config.json", {"rope_parameters": rope})
    with pytest.raises(UnusableInputError, match=r"config\.json"):
        plan_of(checkpoint)


def test_olmo_3_in_the_newer_form_of_configs(tmp_path: Path) -> None:
    old = read_model("olmo3").config
    ropes = {
        "full_attention": {**old["rope_scaling"], "rope_theta": old["rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": old["rope_theta"]},
    }
    plans = [
        plan_of(_make("olmo3", tmp_path / "old")),
        plan_of(_make("olmo3", tmp_path / "new", rope_scaling=None, rope_theta=None, rope_parameters=ropes)),
    ]
    told = [{key: str(value) for key, value in plan.metadata.items() if key.startswith("olmo2.")} for plan in plans]
    assert told[0] == told[1]


def test_a_scaled_window_of_olmo_3_is_refused(tmp_path: Path) -> None:
    ropes = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5, "rope_type": "linear"}}
    with pytest.raises(UnusableInputError, match="sliding_attention"):
        plan_of(_make("olmo3", tmp_path, rope_scaling=None, rope_theta=None, rope_parameters=ropes))


def test_the_text_model_of_a_multimodal_llama_4(tmp_path: Path) -> None:
    model = read_model("llama4")
    own = {key: value for key, value in model.config.items() if key != "architectures"}
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": own}
    changed = replace(
        model,
        config=outer,
        prefixes={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        extra_tensors={"vision_model.class_embedding": [8], "multi_modal_projector.linear_1.weight": [8, 8]},
    )
    plan = plan_of(make_checkpoint(changed, PLAIN, tmp_path / "whole"))
    assert plan.tensors[0].parts
    assert [(t.name, t.shape, t.type) for t in plan.tensors] == [
        (t.name, t.shape, t.type) for t in plan_of(_make("llama4", tmp_path / "text")).tensors
    ]
    assert len(plan.dropped) == 2


def test_biases_that_no_rule_knows_are_left_out_only_when_they_are_zero(tmp_path: Path) -> None:
    checkpoint = _make("cohere2", tmp_path)
    name = "model.layers.1.self_attn.q_proj.bias"
    for value in (0, 1):
        write_safetensors(checkpoint / "model-2.safetensors", {name: np.full(256, value, np.float32)})
        files = [checkpoint / "model.safetensors", checkpoint / "model-2.safetensors"]
        weight_map = {name: file.name for file in files for name in read_safetensors_header(file)}
        write_json(checkpoint / "model.safetensors.index.json", {"weight_map": weight_map})
        if value == 0:
            assert f"1 tensors like {name} (biases that are all zero)" in plan_of(checkpoint).dropped
    with pytest.raises(UnusableInputError, match=r"surplus: model\.layers\.1\.self_attn\.q_proj\.bias"):
        plan_of(checkpoint)
